"""Places of a text where a draft network is trained, and what the target says there.

An anchor is a root's index: the next token belongs to the answer. The target's laws are made from its hidden
states (`training.features`) at the places that the anchors need and nowhere else.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.models.layers import wide_product
from jspec.types import LanguageModel, PyTree
from training.data import Laws
from training.draft_loss import Known
from training.forward import possible

ROWS = 256  # of the target's head at a time, where only some columns are kept
RESOLUTION = 1e-6  # of a probability that is what others leave of 1


def sample(key: jax.Array, weights: Float[Array, "B T"], number: int) -> Int[Array, "B A"]:
    """A = min(``number``, T) anchors a row, without repetition, ascending, uniformly from those that there
    are; -1 where there are fewer.

    >>> sample(jax.random.key(0), jnp.array([[0.0, 1.0, 1.0]]), 3).tolist()
    [[-1, 1, 2]]
    """
    scores = jnp.where(weights > 0, jax.random.uniform(key, weights.shape), -1)
    best, chosen = jax.lax.top_k(scores, min(number, weights.shape[1]))
    return jnp.sort(jnp.where(best >= 0, chosen.astype(jnp.int32), -1), axis=1)


def places(
    anchors: Int[Array, "B A"], weights: Float[Array, "B T"], num_tokens: int
) -> tuple[Int[Array, "B A K"], Bool[Array, "B A K"]]:
    """Where the law of token a + k comes from, index a + k - 1, and whether that token belongs to the answer
    (and with it all before it, from a + 1 on)."""
    at = anchors[..., None] + jnp.arange(num_tokens, dtype=jnp.int32)[None, None]
    inside = (anchors[..., None] >= 0) & (at < weights.shape[1])
    at = jnp.clip(at, 0, weights.shape[1] - 1)
    exists = inside & (jax.vmap(lambda row, i: row[i])(weights, at) > 0)
    return at, jnp.cumprod(exists.astype(jnp.int32), axis=-1).astype(bool)


def look(
    target: LanguageModel,
    target_params: PyTree,
    hidden: Float[Array, "B T E"],
    labels: Int[Array, "B T"],
    at: Int[Array, "B A K"],
    exists: Bool[Array, "B A K"],
    ids: Int[Array, " Vd"] | None,
    vocab_size: int,
    longest: int,
    banned: tuple[int, ...] = (),
    laws: Laws | None = None,
    kernel: Float[Array, "E Vd"] | None = None,
) -> Known:
    """What the target says at ``at``, without gradient.

    Anchors share places: each is run through the head once, and of a reduced vocabulary only its columns
    outlive a block of `ROWS` of them. With ``laws`` and ``kernel`` only these columns are computed.

    Args:
      hidden: what the head reads; the law of token t + 1 is made from ``hidden[:, t]``, which is
        ``labels[:, t]`` in the text.
      ids: the drafter's columns; None: all tokens.
      vocab_size, banned: tokens, and those of them that the target never emits; logits of others are no part
        of a law.
      longest: the most places of a row that exist.
      laws, kernel: what is known of the whole laws at ``labels``, and the target's head of ``ids``; of both
        or neither.
    """
    batch, width, size = hidden.shape
    rows = jnp.arange(batch)[:, None]
    needed = jnp.zeros((batch, width), bool).at[rows[..., None], at].max(exists)
    slots = min(width, at.shape[1] * at.shape[2], longest)
    distinct = jnp.argsort(~needed, axis=1, stable=True)[:, :slots]  # the needed places first, in order
    slot = jnp.clip(jnp.cumsum(needed, axis=1) - 1, 0, slots - 1)[rows[..., None], at]  # [B, A, K]

    hidden = jax.lax.stop_gradient(hidden)
    read = hidden[rows, distinct].reshape(-1, size)
    rest = None
    if ids is None:
        columns = possible(target.head(target_params, read), vocab_size, banned)
        best = columns.argmax(-1).astype(jnp.int32)
        column = jnp.arange(vocab_size, dtype=jnp.int32)
    elif laws is not None and kernel is not None:
        columns = wide_product(read, kernel)
        if banned:
            columns = jnp.where(jnp.isin(ids, jnp.array(banned)), -jnp.inf, columns)
        whole, best = (jnp.asarray(x)[rows, distinct].reshape(-1) for x in laws)
        share = jnp.minimum(jax.nn.logsumexp(columns, axis=-1) - whole, 0)
        rest = whole + jnp.log(jnp.maximum(-jnp.expm1(share), RESOLUTION))
        column = _column_of(ids, vocab_size)
    else:
        outside = jnp.ones(vocab_size, bool).at[ids].set(False)

        def law(row: Float[Array, " E"]) -> tuple[Any, ...]:
            logits = possible(target.head(target_params, row), vocab_size, banned)
            others = jax.nn.logsumexp(jnp.where(outside, logits, -jnp.inf))
            return logits[ids], others, logits.argmax(-1).astype(jnp.int32)

        columns, rest, best = jax.lax.map(law, read, batch_size=ROWS)
        column = _column_of(ids, vocab_size)
    columns, rest, best = jax.lax.stop_gradient((columns, rest, best))

    def spread(values: Array) -> Array:
        return values.reshape(batch, slots, *values.shape[1:])[rows[..., None], slot]

    best = spread(best)
    return Known(
        target=spread(columns),
        rest=None if rest is None else spread(rest),
        inside=column[best] >= 0,
        best=best,
        labels=column[labels[rows[..., None], at]],
        hidden=hidden[rows[..., None], at],
        exists=exists,
    )


def _column_of(ids: Int[Array, " Vd"], vocab_size: int) -> Int[Array, " V"]:
    """The column of every token; -1: it has none."""
    return jnp.full(vocab_size, -1, jnp.int32).at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))
