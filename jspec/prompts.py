"""What users pass as prompts, as requests: ids that fit into the model, or an error that names the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec import engine
from jspec.batch import Request
from jspec.checkpoint import Model
from jspec.options import check_tokens


def as_requests(
    model: Model, prompts: Any, chat: bool, system: str | None, decoder_prefix: Any = None
) -> list[Request]:
    """Every prompt as ids: one or several strings or lists of ids."""
    prompts = _listed("prompts", prompts)
    if len(prompts) == 0:
        raise ValueError("prompts: expected at least one, got none")
    if system is not None and not chat:
        raise ValueError("system: expected chat=True with a system message, got chat=False")
    if chat and model.decoder_start:
        raise ValueError(f"chat: expected False, because {model.name} is an encoder-decoder, got True")
    ids = [_as_ids(model, f"prompts[{i}]", prompt, chat, system) for i, prompt in enumerate(prompts)]
    if not model.decoder_start:
        if decoder_prefix is not None:
            raise ValueError(f"decoder_prefix: expected None, because {model.name} has no encoder")
        return [Request(tokens) for tokens in ids]
    _check_sources(model, ids)
    begins = _decoder_begins(model, decoder_prefix, len(ids))
    return [Request(begin, source) for begin, source in zip(begins, ids, strict=True)]


def _listed(name: str, values: Any) -> Sequence[Any]:
    """One string or list of ids as a list of one; several as they are."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str):
        return [values]
    if isinstance(values, Sequence) and not isinstance(values, bytes) and _is_id(next(iter(values), None)):
        return [values]
    if not isinstance(values, Sequence) or isinstance(values, bytes):
        raise ValueError(f"{name}: expected strings or lists of token ids, got {type(values).__name__}")
    return values


def _check_sources(model: Model, sources: Sequence[Sequence[int]]) -> None:
    most = model.source_length
    for i, source in enumerate(sources):
        if most is not None and len(source) > most:
            raise ValueError(f"prompts[{i}]: {len(source)} tokens, {model.name} reads at most {most}")


def _decoder_begins(model: Model, decoder_prefix: Any, count: int) -> list[list[int]]:
    """What the decoder of every sequence begins with: the start tokens and the prefix."""
    start = list(model.decoder_start)
    if decoder_prefix is None:
        return [start] * count
    prefixes = _listed("decoder_prefix", decoder_prefix)
    if len(prefixes) not in (1, count):
        raise ValueError(
            f"decoder_prefix: expected one, or one for each of {count} prompts, got {len(prefixes)}"
        )
    begins = []
    for i, prefix in enumerate(prefixes):
        name = f"decoder_prefix[{i}]"
        if isinstance(prefix, str):
            if model.tokenizer is None:
                raise ValueError(
                    f"{name}: expected token ids, because {model.name} has no tokenizer, got a string"
                )
            prefix = model.tokenizer.encode_target(prefix, special=False)
        begins.append([*start, *check_tokens(name, prefix, model.vocab_size)])
    return begins * (count // len(begins))


def _is_id(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _as_ids(model: Model, name: str, prompt: Any, chat: bool, system: str | None) -> list[int]:
    if not isinstance(prompt, str):
        if chat:
            raise ValueError(f"{name}: expected a string, because chat=True, got {type(prompt).__name__}")
        ids = prompt
    elif model.tokenizer is None:
        raise ValueError(f"{name}: expected token ids, because {model.name} has no tokenizer, got a string")
    elif chat and prompt:
        ids = model.tokenizer.chat([*system_messages(system), {"role": "user", "content": prompt}])
    else:
        ids = model.tokenizer.encode(prompt)
    ids = check_tokens(name, ids, model.vocab_size)
    if not ids:
        raise ValueError(f"{name}: expected at least one token, got an empty prompt")
    return ids


def system_messages(system: str | None) -> list[dict[str, str]]:
    """How a conversation begins: with the system message, if there is one."""
    return [] if system is None else [{"role": "system", "content": system}]


def needed_capacity(
    model: Model, requests: Sequence[Request], limits: np.ndarray, capacity: int | None
) -> int:
    """Slots for the longest request, which must fit into the model's positions and ``capacity``."""
    if capacity is not None and not _is_id(capacity):
        raise ValueError(f"capacity: expected a whole number of slots, got {capacity!r}")
    what = "decoder tokens (start and prefix)" if model.decoder_start else "tokens"
    for i, ((prompt, _), limit) in enumerate(zip(requests, limits, strict=True)):
        for room, whose in ((model.context_length, f"{model.name} has"), (capacity, "capacity is")):
            if room is not None and len(prompt) + limit > room:
                raise ValueError(
                    f"prompts[{i}]: {len(prompt)} {what} and max_new_tokens={limit} need "
                    f"{len(prompt) + limit} positions, {whose} {room}"
                )
    if capacity is not None:
        return capacity
    needed = max(len(prompt) + int(limit) for (prompt, _), limit in zip(requests, limits, strict=True))
    return min(engine.bucket(needed), model.context_length)
