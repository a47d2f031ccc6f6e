"""No draft at all: plain decoding through the same engine, the baseline of every table."""

from __future__ import annotations

import jax.numpy as jnp

from jspec.drafters.common import chain, no_update, root
from jspec.types import Context, Draft, Drafter, Keys, LanguageModel, Method, Prompt


def _init(params: tuple[()], prompt: Prompt, capacity: int, target: LanguageModel) -> tuple[()]:
    return ()


def _propose(params: tuple[()], state: tuple[()], context: Context, keys: Keys) -> tuple[Draft, tuple[()]]:
    batch = context.lengths.shape[0]
    return chain(root(context), jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch, 0), bool)), state


_METHOD = Method(_init, _propose, no_update, width=1, depth=0)


def plain() -> Drafter:
    """Every round is one target forward of one token. Lossless in law."""
    return Drafter((), _METHOD)
