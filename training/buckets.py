"""Which shapes batches have: a few nested buckets that hold every example with little padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Bucket(NamedTuple):
    """The shape of a batch: ``rows`` x (``source`` + ``target``); ``source`` is 0 without encoder."""

    source: int
    target: int
    rows: int


LEVELS = (*(i / 16 for i in range(1, 16)), 0.97, 0.99, 1.0)  # quantiles that may become edges


def choose_edges(needed: Int[np.ndarray, "n 2"], count: int, multiple: int = 8) -> list[tuple[int, int]]:
    """At most ``count`` nested shapes (source, target) that hold all examples with the least padding.

    Edges are quantiles of the two lengths, rounded up to multiples of ``multiple``. Among all chains of such
    pairs the one with the fewest slots is found by dynamic programming over its last pair.

    Raises:
      ValueError: ``count`` below 1.

    >>> choose_edges(np.array([[5, 4]] * 90 + [[30, 8]] * 9 + [[100, 60]]), 3)
    [(8, 8), (32, 8), (104, 64)]
    """
    if count < 1:
        raise ValueError(f"buckets: expected a number >= 1, got {count}")
    edges = [
        np.unique(-(-np.quantile(side, LEVELS, method="higher").astype(np.int64) // multiple) * multiple)
        for side in needed.T
    ]
    at = [np.searchsorted(edge, side) for edge, side in zip(edges, needed.T, strict=True)]
    shape = (len(edges[0]), len(edges[1]))
    cells = np.bincount(at[0] * shape[1] + at[1], minlength=shape[0] * shape[1]).reshape(shape)
    held = cells.cumsum(0).cumsum(1).ravel()  # examples that fit into pair i
    pairs = np.stack(np.meshgrid(*edges, indexing="ij"), axis=-1).reshape(-1, 2)
    slots = pairs.sum(1)
    nested = (pairs[:, None] >= pairs[None]).all(-1)
    step = np.where(nested, (held[:, None] - held[None]) * slots[:, None], np.inf)  # from pair j to pair i
    cost, before = held * slots, []
    for _ in range(count - 1):
        total = cost[None] + step
        before.append(total.argmin(1))
        cost = total.min(1)
    chain = [len(pairs) - 1]
    for previous in reversed(before):
        chain.append(int(previous[chain[-1]]))
    return sorted({(int(pairs[i, 0]), int(pairs[i, 1])) for i in chain if held[i]})


def make_buckets(
    needed: Int[np.ndarray, "n 2"],
    edges: Sequence[tuple[int, int]],
    batch_size: int | None,
    max_tokens: int | None,
    multiple: int,
) -> tuple[Bucket, ...]:
    """The edges, checked, with the rows of a batch of each, a multiple of ``multiple``.

    Raises:
      ValueError: edges that are not nested or do not hold every example; not one of ``batch_size`` and
        ``max_tokens``, or one that gives no such batch.
    """
    if len(edges) == 0:
        raise ValueError("buckets: expected at least one, got none")
    if any(a[0] > b[0] or a[1] > b[1] for a, b in itertools.pairwise(edges)):
        raise ValueError(f"buckets: expected each to hold the one before, got {list(edges)}")
    outside = np.flatnonzero((needed > np.array(edges[-1])).any(1))
    if len(outside):
        source, target = needed[outside[0]]
        raise ValueError(
            f"buckets: expected the last one to hold every example, but {tuple(edges[-1])} does not hold "
            f"example {outside[0]} with {source} and {target} ({len(outside)} in all)"
        )
    if (batch_size is None) == (max_tokens is None):
        raise ValueError(f"batch_size, max_tokens: expected one of them, got {batch_size}, {max_tokens}")
    if batch_size is not None and (batch_size < 1 or batch_size % multiple):
        raise ValueError(f"batch_size: expected a multiple of {multiple}, got {batch_size}")
    found = []
    for source, target in edges:
        rows = batch_size or (max_tokens or 0) // (source + target) // multiple * multiple
        if rows < 1:
            least = (source + target) * multiple
            raise ValueError(
                f"max_tokens: expected at least {least}, {multiple} rows of {source} + {target}, "
                f"got {max_tokens}"
            )
        found.append(Bucket(source, target, rows))
    return tuple(found)
