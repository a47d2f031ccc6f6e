"""A byte-level tokenizer of 262 tokens, and models whose text is known."""

from __future__ import annotations

from typing import Any

import numpy as np

from jspec import testing
from jspec.io.tokenizer import Tokenizer, from_gguf
from jspec.text import Model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
START, END = 0, 1


def letters() -> list[str]:
    """The stand-in of every byte, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def metadata(**changes: Any) -> dict[str, Any]:
    """GGUF metadata: two specials, the 256 bytes, "he", "the", " the", one unused. ``None`` drops a key."""
    tokens = ["<|im_start|>", "<|im_end|>", *letters(), "he", "the", "Ġthe", "[PAD261]"]
    entries = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * 259 + [5],
        "merges": ["h e", "t he", "Ġ the"],
        "eos_token_id": END,
        "bos_token_id": START,
    } | changes
    found = {f"tokenizer.ggml.{key}": value for key, value in entries.items() if value is not None}
    return found if "chat_template" in changes else found | {"tokenizer.chat_template": TEMPLATE}


def tokenizer(**changes: Any) -> Tokenizer:
    return from_gguf(metadata(**changes))


def decoder(seed: int = 0, logits: int = 263) -> Model:
    """A random tiny decoder with that tokenizer; the logits beyond its 261 tokens are padding."""
    spoken = tokenizer()
    lm, params = testing.tiny_decoder(
        seed=seed, vocab_size=logits, num_layers=1, width=16, context_length=1024
    )
    return Model(lm, params, spoken, spoken.eos, "tiny", len(spoken.vocabulary))


def cycle(text: str, end: bool = False) -> Model:
    """A model that goes on from any byte of ``text`` to the next one (all must differ), and after the last
    to the first, or to the end token."""
    spoken = tokenizer()
    ids = [2 + byte for byte in text.encode()]
    assert len(set(ids)) == len(ids)
    law = np.eye(len(spoken.vocabulary), dtype=np.float32)
    for a, b in zip(ids, [*ids[1:], END if end else ids[0]], strict=True):
        law[a] = np.eye(len(law))[b]
    return Model(*testing.table_lm(law), spoken, spoken.eos, "cycle", len(law))


def script(text: str, length: int = 200) -> np.ndarray:
    """The token at each position when `cycle`'s text is prompted with its first byte."""
    ids = [2 + byte for byte in text.encode()]
    return np.resize(np.array(ids, np.int32), length)
