"""Attention of a block against the cache and against uncommitted rows."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.types import Block

MASKED = -1e30  # finite: a row that sees nothing (padding) gives numbers nobody reads, not NaN


def see_cache(
    capacity: int, lengths: Int[Array, " B"], positions: Int[Array, "B N"], window: int | None
) -> Bool[Array, "B 1_or_N S"]:
    """Which slots each row of a block sees: the committed ones, within ``window`` positions of itself.

    Slot s holds position s. With length 4, capacity 6 and window 3, rows at positions 4 and 5 see::

        0 0 1 1 . .
        0 0 0 1 . .
    """
    slots = jnp.arange(capacity, dtype=jnp.int32)[None, None]
    seen = slots < lengths[:, None, None]
    return seen if window is None else seen & (slots > positions[:, :, None] - window)


def see_rows(
    mask: Bool[Array, "B N M"],
    positions: Int[Array, "B N"],
    row_positions: Int[Array, "B M"],
    window: int | None,
) -> Bool[Array, "B N M"]:
    """``mask`` less the rows that lie ``window`` or more positions behind."""
    return mask if window is None else mask & (row_positions[:, None] > positions[:, :, None] - window)


def block_mask(block: Block, pending: Int[Array, "B P"] | None) -> Bool[Array, "B N P+N"]:
    """The mask of a block, checked; causal where it has none.

    Raises:
        ValueError: a mask of another shape, or none although there are pending rows.
    """
    batch, width = block.tokens.shape
    num_pending = 0 if pending is None else pending.shape[1]
    mask = block.mask
    if mask is None:
        if num_pending:
            raise ValueError(
                f"block.mask: needed to say which of {num_pending} pending rows are seen, got None"
            )
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool))[None], (batch, width, width))
    if mask.shape != (batch, width, num_pending + width):
        raise ValueError(f"block.mask: expected {(batch, width, num_pending + width)}, got {mask.shape}")
    return mask


def attend(
    queries: Float[Array, "B N H h"],
    cached: tuple[Float[Array, "B K S h"], Float[Array, "B K S h"]],
    rows: tuple[Float[Array, "B M K h"], Float[Array, "B M K h"]],
    cache_seen: Bool[Array, "B 1_or_N S"],
    rows_seen: Bool[Array, "B N M"],
    scale: float,
    softcap: float | None = None,
    biases: tuple[Float[Array, "B H N S"] | None, Float[Array, "B H N M"] | None] = (None, None),
) -> Float[Array, "B N H*h"]:
    """Softmax attention over cache and rows together, without ever joining the two.

    ``biases`` are added to the (scaled) scores of either.

    One softmax over two score arrays s and t: with m = max(s, t)::

        out = (exp(s - m) @ cached_values + exp(t - m) @ row_values) / (sum exp(s - m) + sum exp(t - m))

    Cache and rows may differ in dtype; the output has the queries'. Scores, softmax and sums are float32.
    Query head i reads key-value head ``i // (H // K)``. A row whose value is not finite makes NaN of the
    queries that see it and of no other: a rejected draft or a padding token must not be felt, and a weight of
    0 alone would not keep it out, since 0 * NaN is NaN.
    """
    batch, width, heads, size = queries.shape
    kv_heads = cached[0].shape[1]
    groups = heads // kv_heads
    # [B, K, G*N, h]: one matrix product a key-value head, whose keys are read once for all G query heads.
    queries = queries.reshape(batch, width, kv_heads, groups, size).transpose(0, 2, 3, 1, 4)
    queries = queries.reshape(batch, kv_heads, groups * width, size)

    def scores(
        equation: str, keys: Array, seen: Bool[Array, "B 1_or_N T"], bias: Float[Array, "B H N T"] | None
    ) -> Float[Array, "B K G*N T"]:
        same = queries.astype(keys.dtype)
        logits = jnp.einsum(equation, same, keys, preferred_element_type=jnp.float32) * scale
        if softcap is not None:
            logits = jnp.tanh(logits / softcap) * softcap
        shape = logits.shape
        logits = logits.reshape(batch, kv_heads, groups, width, shape[-1])
        if bias is not None:
            logits = logits + bias.reshape(bias.shape[0], kv_heads, groups, *bias.shape[2:])
        return jnp.where(seen[:, None, None], logits, MASKED).reshape(shape)

    s = scores("bkqh,bksh->bkqs", cached[0], cache_seen, biases[0])
    t = scores("bkqh,bmkh->bkqm", rows[0], rows_seen, biases[1])
    # `initial`, because there may be no slots at all (whole sequences, in training) or no rows (an encoder's
    # output is all there is to see).
    top = jnp.maximum(*(x.max(-1, keepdims=True, initial=MASKED) for x in (s, t)))
    s, t = jnp.exp(s - top), jnp.exp(t - top)
    total = s.sum(-1, keepdims=True) + t.sum(-1, keepdims=True)

    def mean(equation: str, weights: Array, values: Array) -> Float[Array, "B K G*N h"]:
        return jnp.einsum(equation, weights.astype(values.dtype), values, preferred_element_type=jnp.float32)

    out = mean("bkqs,bksh->bkqh", s, cached[1])
    finite = jnp.isfinite(rows[1]).all((2, 3))
    values = jnp.where(finite[:, :, None, None], rows[1], 0)
    out += mean("bkqm,bmkh->bkqh", t, values)
    out = (out / total).astype(queries.dtype).reshape(batch, kv_heads, groups, width, size)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, width, heads * size)
    return jnp.where((rows_seen & ~finite[:, None]).any(-1)[:, :, None], jnp.nan, out)
