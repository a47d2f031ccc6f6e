"""Token trees as arrays: templates, depths, ancestor masks.

A tree is ``parents [N]`` in topological order: ``parents[0] = -1`` is the root and ``parents[i] < i``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int


class Template(NamedTuple):
    """A static tree: node i is child number ``ranks[i]`` of ``parents[i]``, at depth ``depths[i]``."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of nodes, root included."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths)


def template(paths: tuple[tuple[int, ...], ...]) -> Template:
    """Tree from the rank paths of its nodes, without the root.

    >>> template(((0,), (1,), (0, 0)))
    Template(parents=(-1, 0, 0, 1), ranks=(0, 0, 1, 0), depths=(0, 1, 1, 2))
    """
    nodes = sorted(set(paths), key=lambda path: (len(path), path))
    index: dict[tuple[int, ...], int] = {(): 0}
    for path in nodes:
        if path[:-1] not in index:
            raise ValueError(f"paths: {path} has no parent {path[:-1]} in the tree")
        index[path] = len(index)
    parents = (-1, *(index[path[:-1]] for path in nodes))
    return Template(parents, (0, *(path[-1] for path in nodes)), (0, *(len(path) for path in nodes)))


def grow(accuracies: np.ndarray, num_nodes: int) -> Template:
    """The static tree of ``num_nodes`` nodes (root included) with the greatest expected length.

    ``accuracies[d, r]`` is the probability that, at depth d + 1, child r is the accepted one. A node's
    value is the product along its path, the expected length their sum, so the best tree takes the most
    valuable nodes first (Medusa, arXiv 2401.10774, section 2.3).

    >>> grow(np.array([[0.6, 0.3], [0.5, 0.1]]), 4).parents
    (-1, 0, 0, 1)
    """
    depth, branching = accuracies.shape
    most = 1 + sum(branching**d for d in range(1, depth + 1))
    if num_nodes > most:
        raise ValueError(
            f"num_nodes: expected at most {most} for accuracies [{depth}, {branching}], got {num_nodes}"
        )
    frontier: dict[tuple[int, ...], float] = {(r,): accuracies[0, r] for r in range(accuracies.shape[1])}
    chosen: list[tuple[int, ...]] = []
    while len(chosen) < num_nodes - 1:
        path = max(frontier, key=lambda path: (frontier[path], -len(path), path))
        value = frontier.pop(path)
        chosen.append(path)
        if len(path) < accuracies.shape[0]:
            frontier |= {(*path, r): value * accuracies[len(path), r] for r in range(accuracies.shape[1])}
    return template(tuple(chosen))


def chain_parents(batch: int, width: int) -> Int[Array, "B N"]:
    """Parents of a chain: -1, 0, 1, ..."""
    return jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32) - 1, (batch, width))


def ancestors(parents: Int[Array, "B N"]) -> Bool[Array, "B N N"]:
    """``[b, i, j]``: j is i or an ancestor of i. Pointer doubling: log2(N) gathers.

    For parents (-1, 0, 0, 1)::

        1 . . .
        1 1 . .
        1 . 1 .
        1 1 . 1
    """
    width = parents.shape[1]
    mask = jnp.eye(width, dtype=bool)[None] | (parents[:, :, None] == jnp.arange(width)[None, None])
    # Before step k, mask[i] reaches the ancestors up to distance 2^k, and jump[i] is the one exactly there
    # (the root where there is none).
    jump = jnp.maximum(parents, 0)
    for _ in range(math.ceil(math.log2(width))):
        mask = mask | jnp.take_along_axis(mask, jump[:, :, None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return mask


def depths(ancestor_mask: Bool[Array, "B N N"]) -> Int[Array, "B N"]:
    """Depth of every node, the root's is 0."""
    return ancestor_mask.sum(-1, dtype=jnp.int32) - 1
