"""Token trees as arrays: templates, depths, ancestor masks.

A tree is ``parents [N]`` in topological order: ``parents[0] = -1`` is the root and ``parents[i] < i``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jspec.checks import at_least, check


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

    Raises:
      ValueError: a path of no ranks, a rank that is no whole number >= 0, or a node whose parent is missing.
    """
    for path in paths:
        check(len(path) > 0, "paths", "those of nodes below the root", path)
        for rank in path:
            at_least(0, paths=rank)
    nodes = sorted(set(paths), key=lambda path: (len(path), path))
    index: dict[tuple[int, ...], int] = {(): 0}
    for path in nodes:
        if path[:-1] not in index:
            raise ValueError(f"paths: {path} has no parent {path[:-1]} in the tree")
        index[path] = len(index)
    parents = (-1, *(index[path[:-1]] for path in nodes))
    return Template(parents, (0, *(path[-1] for path in nodes)), (0, *(len(path) for path in nodes)))


def _grown(accuracies: np.ndarray, num_nodes: int) -> list[tuple[float, tuple[int, ...]]]:
    """Value and rank path of the most valuable nodes, the root left out, best first: any beginning of it is
    the best tree of its size. Of equal values the shallower node comes first, then the better
    rank."""
    depth, branching = accuracies.shape
    _check_size(num_nodes, depth, branching)
    frontier: list[tuple[float, int, tuple[int, ...]]] = [
        (-value, 1, (r,)) for r, value in enumerate(accuracies[0].tolist())
    ]
    heapq.heapify(frontier)
    chosen: list[tuple[float, tuple[int, ...]]] = []
    while len(chosen) < num_nodes - 1:
        value, length, path = heapq.heappop(frontier)
        chosen.append((-value, path))
        if length < depth:
            for r, accuracy in enumerate(accuracies[length].tolist()):
                heapq.heappush(frontier, (value * accuracy, length + 1, (*path, r)))
    return chosen


def _check_size(num_nodes: int, depth: int, branching: int) -> None:
    at_least(0, num_nodes=num_nodes)
    most = 1 + sum(branching**d for d in range(1, depth + 1))
    if not 1 <= num_nodes <= most:
        raise ValueError(
            f"num_nodes: expected at most {most} for accuracies [{depth}, {branching}], and at least 1, "
            f"got {num_nodes}"
        )


def grow(accuracies: np.ndarray, num_nodes: int) -> Template:
    """The static tree of ``num_nodes`` nodes (root included) with the greatest expected length.

    ``accuracies[d, r]`` is the probability that, at depth d + 1, child r is the accepted one. A node's
    value is the product along its path, the expected length their sum, so the best tree takes the most
    valuable nodes first (Medusa, arXiv 2401.10774, section 2.3). That is for chosen children, of which any
    may be left out; for drawn ones see `sequoia`.

    >>> grow(np.array([[0.6, 0.3], [0.5, 0.1]]), 4).parents
    (-1, 0, 0, 1)
    """
    return template(tuple(path for _, path in _grown(np.asarray(accuracies, float), num_nodes)))


def _by_depth(accuracies: np.ndarray, depth: int | None, num_nodes: int) -> np.ndarray:
    """Accuracies [depth, R], of which those given as [R] hold at every depth."""
    accuracies = np.asarray(accuracies, float)
    if accuracies.ndim not in (1, 2) or not ((accuracies >= 0) & (accuracies <= 1)).all():
        raise ValueError(f"accuracies: expected probabilities [R] or [D, R], got {accuracies.tolist()}")
    most = max(num_nodes - 1, 1) if accuracies.ndim == 1 else len(accuracies)
    depth = most if depth is None else depth
    if depth < 1 or (accuracies.ndim == 2 and depth > most):
        raise ValueError(f"depth: expected 1 to {most}, got {depth}")
    return (
        np.broadcast_to(accuracies, (depth, len(accuracies))) if accuracies.ndim == 1 else accuracies[:depth]
    )


class _Plan(NamedTuple):
    """For a node at one depth: by the size m of its tree, how many children it has; and by child and m,
    how many of the nodes left to the children up to that one are below it."""

    children: np.ndarray  # [N + 1]
    nodes: np.ndarray  # [R, N + 1]


def _sequoia(accuracies: np.ndarray, num_nodes: int) -> tuple[np.ndarray, list[_Plan]]:
    """Expected tokens of the best tree by size (-inf: there is none), and how it is made.

    From the deepest nodes up: T_b(m) is that of a node with b children and m nodes in all, G_d(m) the best
    over b at depth d::

        T_0(1) = 1      T_b(m) = max_y  T_{b-1}(m - y) + P_d[b] G_{d+1}(y)
    """
    size = np.arange(num_nodes + 1)
    rest = size[:, None] - size[None]  # [m, y]: what y nodes below the last child leave of m
    alone = np.where(size == 1, 1.0, -np.inf)
    below, plans = alone, []
    for row in accuracies[::-1]:
        grown, nodes = [alone], []
        for accuracy in row:
            child = np.where(np.isfinite(below), accuracy * np.maximum(below, 0), -np.inf)
            tokens = np.where(rest >= 0, grown[-1][np.maximum(rest, 0)] + child[None], -np.inf)
            nodes.append(tokens.argmax(1))
            grown.append(tokens.max(1))
        plans.append(_Plan(np.argmax(grown, axis=0), np.array(nodes)))
        below = np.max(grown, axis=0)
    return below, plans[::-1]


def _planned(plans: list[_Plan], num_nodes: int) -> Template:
    paths: list[tuple[int, ...]] = []
    left: list[tuple[tuple[int, ...], int]] = [((), num_nodes)]
    while left:
        path, nodes = left.pop()
        if nodes == 1:
            continue
        plan = plans[len(path)]
        for rank in reversed(range(plan.children[nodes])):
            below = int(plan.nodes[rank, nodes])
            paths.append((*path, rank))
            left.append(((*path, rank), below))
            nodes -= below
    return template(tuple(paths))


def sequoia(accuracies: np.ndarray, num_nodes: int, depth: int | None = None) -> Template:
    """The static tree of ``num_nodes`` nodes and at most that depth with the greatest expected length, where
    siblings come in order: child r stands only beside children 0 ... r - 1.

    So it is for drawn children, the r-th of which is looked at when the ones before it were refused. The
    dynamic programme holds for any accuracies. Where they do not grow with the rank, the most valuable nodes
    are in order anyway, and `grow` finds a tree as good.

    Args:
      accuracies: as for `grow`; [R]: those of every depth, as the paper assumes.
      num_nodes: root included.
      depth: None: any, or that of the accuracies.
    Raises:
      ValueError: more nodes than there are; no probabilities; a depth beyond the accuracies.

    >>> sequoia(np.array([0.5, 0.3]), 4).parents
    (-1, 0, 0, 1)
    >>> sequoia(np.array([0.1, 0.6]), 3).ranks  # the second child is the good one, and needs the first
    (0, 0, 1)

    Reference: Chen et al. 2024, Sequoia, arXiv 2402.12374 (tree construction).
    """
    accuracies = _by_depth(accuracies, depth, num_nodes)
    _check_size(num_nodes, *accuracies.shape)
    return _planned(_sequoia(accuracies, num_nodes)[1], num_nodes)


def expected_tokens(tree: Template, accuracies: np.ndarray) -> float:
    """Tokens of a round: 1, and the sum over drafted nodes of the product of accuracies along their paths.

    >>> expected_tokens(template(((0,), (1,), (0, 0))), np.array([0.5, 0.25]))
    2.0
    """
    accuracies = _by_depth(accuracies, None, tree.width)
    values = [1.0]
    for parent, rank, depth in zip(*(field[1:] for field in tree), strict=True):
        values.append(values[parent] * float(accuracies[depth - 1, rank]))
    return sum(values)


def fastest(
    accuracies: np.ndarray, costs: Sequence[float], *, level_cost: float = 0.0, in_order: bool = False
) -> Template:
    """The static tree with the most expected tokens for its time, over all sizes and depths.

    A round of a tree of n nodes and depth d takes ``costs[n - 1] + d level_cost``. For each depth the best
    trees of all sizes are those of `grow`, which is optimal for chosen children, or with ``in_order`` those
    of `sequoia`, for drawn ones. The smallest of equals; at least 2 nodes.

    Args:
      accuracies: [D, R] or [R], as for `sequoia`.
      costs: time of the target's forward over 1, 2, ... tokens, what every round costs besides included, in
        any unit (``[curve.relative(n) for n in range(1, 65)]`` of a `jspec.measure.CostCurve`); trees are
        no wider.
      level_cost: time of drafting one level; 0 where all are drafted at once (Medusa).
    Raises:
      ValueError: fewer than 2 costs, or costs that are not positive; no probabilities.

    >>> flat, linear = [1.0] * 4, [1.0, 2.0, 3.0, 4.0]
    >>> accuracies = np.array([[0.6, 0.3], [0.5, 0.1]])
    >>> fastest(accuracies, flat).width, fastest(accuracies, linear).width
    (4, 2)

    Reference: Chen et al. 2024, Sequoia, arXiv 2402.12374 (hardware-aware tree optimiser).
    """
    times = np.asarray(costs, float)
    if len(times) < 2 or not (times > 0).all() or level_cost < 0:
        raise ValueError(
            "costs, level_cost: expected 2 or more positive costs and a level's of at least 0, "
            f"got {times.tolist()} and {level_cost}"
        )
    accuracies = _by_depth(accuracies, None, len(times))
    best: tuple[float, Template] | None = None
    for depth in range(1, len(accuracies) + 1):
        most = 1 + sum(accuracies.shape[1] ** d for d in range(1, depth + 1))
        widest = min(len(times), most)
        plans: list[_Plan] = []
        nodes: list[tuple[float, tuple[int, ...]]] = []
        if in_order:
            tokens, plans = _sequoia(accuracies[:depth], widest)
            tokens = tokens[1:]
        else:
            nodes = _grown(accuracies[:depth], widest)
            tokens = np.cumsum([1.0, *(value for value, _ in nodes)])
        rates = tokens / (times[:widest] + depth * level_cost)
        width = 2 + int(np.argmax(rates[1:]))
        if best is None or rates[width - 1] > best[0]:
            tree = (
                _planned(plans, width)
                if in_order
                else template(tuple(path for _, path in nodes[: width - 1]))
            )
            best = float(rates[width - 1]), tree
    assert best is not None
    return best[1]


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
