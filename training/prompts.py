"""Prompts that a chat model writes itself, for want of others: half a conversation, continued.

A chat template names the speaker before each turn. Given no more than that, an instruction-tuned model
writes what a user might say (Magpie, arXiv 2406.08464, section 2): prompts of no one's licence, of the kinds
that the model was tuned on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from jspec.checkpoint import Model
from training.files import write_whole
from training.generation import Progress, generate_answers

MARK = "\ufffc"  # stands for the user's words in the template; a character that no template has


def before_user(model: Model) -> list[int]:
    """The ids of a conversation up to where the user's words begin.

    Raises:
      ValueError: no chat template, or one that does not hold the user's words as they are.
    """
    if model.tokenizer is None or not model.tokenizer.has_chat_template:
        raise ValueError(f"target: expected a model with a chat template, got {model.name}")
    messages = [{"role": "user", "content": MARK}]
    text = model.tokenizer.backend.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if not isinstance(text, str) or text.count(MARK) != 1:
        raise ValueError("target: expected a chat template with the user's words in it, got another")
    return model.tokenizer.backend(text.split(MARK)[0], add_special_tokens=False)["input_ids"]


def write_prompts(
    model: Model,
    count: int,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    max_tokens: int = 128,
    batch_size: int = 32,
    progress: Callable[[Progress], None] | None = None,
) -> list[str]:
    """What a user might say: ``count`` drawn turns, less those that are empty, cut off or there already.

    Raises:
      ValueError: a model without chat template; see `training.generation.generate_answers`.
    """
    begin = before_user(model)
    assert model.tokenizer is not None
    answers = generate_answers(
        model,
        [begin] * count,
        temperature=temperature,
        seed=seed,
        max_new_tokens=max_tokens,
        batch_size=batch_size,
        progress=progress,
    )
    whole = [answer[:-1] for answer in answers if answer and answer[-1] in model.eos]
    texts = (model.tokenizer.decode(answer).strip() for answer in whole)
    return [text for text in dict.fromkeys(texts) if text]


def save_prompts(path: str | Path, prompts: list[str]) -> None:
    """One ``{"prompt": ...}`` a line.

    Raises:
      OSError: the file cannot be written; what was there stays.
    """
    text = "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts)
    write_whole(Path(path), lambda file: file.write(text.encode()), "prompts")
