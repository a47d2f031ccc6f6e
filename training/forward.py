"""The teacher-forced forward: one function for every language model, as decoding runs it."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.models.layers import Dropout
from jspec.types import Block, Forward, LanguageModel, Prompt, PyTree


def hidden(
    lm: LanguageModel,
    params: PyTree,
    batch: PyTree,
    *,
    taps: tuple[int, ...] = (),
    dropout: Dropout | None = None,
) -> Forward:
    """All positions of ``batch.tokens`` in one forward over an empty cache.

    Padding is on the right and attention is causal, so no position with a weight sees any.

    Args:
      batch: ``tokens`` [B, T], ``lengths`` [B] and, for an encoder-decoder, ``source`` [B, Ts] and
        ``source_lengths`` [B]; see `training.data.Batch`.
    """
    noise = {} if dropout is None else {"dropout": dropout}
    prompt = Prompt(batch.tokens, batch.lengths, batch.source, batch.source_lengths)
    cache = lm.start(params, prompt, 0, **noise)
    width = batch.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], batch.tokens.shape)
    return lm.extend(params, cache, Block(batch.tokens, positions), taps=taps, **noise)


def logits(
    lm: LanguageModel, params: PyTree, batch: PyTree, *, dropout: Dropout | None = None
) -> Float[Array, "B T V"]:
    """Logits of every position, float32; those at ``t`` predict ``batch.labels[:, t]``."""
    return lm.head(params, hidden(lm, params, batch, dropout=dropout).hidden)


def possible(
    logits: Float[Array, "... V"], width: int | None = None, banned: Sequence[int] = ()
) -> Float[Array, "... W"]:
    """Logits of what can come out, as decoding has it: the first ``width`` tokens (None: all), without the
    ``banned`` ones, which get -inf. Those of a pair are the target's, for both laws.

    >>> possible(jnp.array([1.0, 2.0, 3.0, 4.0]), 3, [1, 3]).tolist()
    [1.0, -inf, 3.0]
    """
    logits = logits[..., :width]
    if not banned:
        return logits
    return logits.at[..., jnp.array(banned, jnp.int32)].set(-jnp.inf, mode="drop")
