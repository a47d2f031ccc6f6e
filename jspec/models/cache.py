"""The key-value cache: allocated once, written in one place, never moved.

Slot s of row b holds the key and value of the token at absolute position s, for s < ``lengths[b]``. Slots at
or beyond ``lengths`` are scratch: masked wherever the cache is read, so rejecting a draft costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


class Cache(NamedTuple):
    """Keys and values of the committed tokens, one array a layer (layers may differ in shape)."""

    keys: tuple[Float[Array, "B K S h"], ...]  # K key-value heads of h numbers
    values: tuple[Float[Array, "B K S h"], ...]
    lengths: Int[Array, " B"]


class Rows(NamedTuple):
    """Keys and values that no cache holds yet: those of pending rows, then those of the block.

    Each layer's window compares absolute positions, and a pending row's can't be told from its index (tree
    siblings share one), so the rows carry them. Every leaf leads with [B, P+N]: gather, pad and concatenate
    rows with `jax.tree.map`.
    """

    keys: tuple[Float[Array, "B P+N K h"], ...]
    values: tuple[Float[Array, "B P+N K h"], ...]
    positions: Int[Array, "B P+N"]


def empty(
    batch: int,
    capacity: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: DTypeLike = jnp.float32,
) -> Cache:
    """A cache of ``capacity`` slots a row, all of them free.

    >>> empty(2, 8, num_layers=1, num_kv_heads=3, head_dim=4).keys[0].shape
    (2, 3, 8, 4)
    """
    shape = (batch, num_kv_heads, capacity, head_dim)
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in range(2))
    return Cache(keys, values, jnp.zeros(batch, jnp.int32))


def commit(cache: Cache, rows: Rows, path: Int[Array, "B R"], count: Int[Array, " B"]) -> Cache:
    """Append ``rows[b, path[b, :count[b]]]`` to every row b; in place where the cache is donated or carried.

    With lengths 3, path (0, 2, 5), count 2 and capacity S, rows 0 and 2 go to slots 3 and 4, and row 5 to
    slot S, which does not exist: a scatter that drops, since a slice update would be clamped onto live slots.
    What lies beyond the capacity is dropped in the same way; ``lengths`` counts it nevertheless.

    The scatter is a vmap over rows: as one batched scatter it would gather a sharded cache on every device.

    Raises:
        ValueError: the rows are of another number of layers than the cache (those of a truncated model).
    """
    if len(rows.keys) != len(cache.keys):
        raise ValueError(f"rows: expected those of {len(cache.keys)} layers, got {len(rows.keys)}")
    capacity = cache.keys[0].shape[2]
    steps = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    written = (steps < count[:, None]) & (jnp.take_along_axis(rows.positions, path, axis=1) >= 0)
    slots = jnp.where(written, cache.lengths[:, None] + steps, capacity)

    def write(
        slab: Float[Array, "K S h"],
        new: Float[Array, "P+N K h"],
        path: Int[Array, " R"],
        slots: Int[Array, " R"],
    ) -> Float[Array, "K S h"]:
        return slab.at[:, slots].set(new[path].swapaxes(0, 1).astype(slab.dtype), mode="drop")

    def write_all(slabs: tuple[Array, ...], new: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(jax.vmap(write)(slab, n, path, slots) for slab, n in zip(slabs, new, strict=True))

    return Cache(
        write_all(cache.keys, rows.keys), write_all(cache.values, rows.values), cache.lengths + count
    )
