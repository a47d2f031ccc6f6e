"""EAGLE-2's dynamic tree (arXiv 2406.16858, section 4): a beam search whose every child is remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.checks import at_least
from jspec.drafters.common import take, top_k
from jspec.types import Draft, PyTree

Expand = Callable[
    [Int[Array, ""], PyTree, PyTree, Int[Array, "B k"]], tuple[PyTree, PyTree, Float[Array, "B k Vd"]]
]


class TreeSettings(NamedTuple):
    """The shape of a dynamic tree; the defaults are EAGLE-2's for a target of 7B parameters."""

    top_k: int = 10  # children of an expanded node, and expanded nodes of a level
    depth: int = 6  # D: the drafter runs depth - 1 times, over top_k nodes each
    num_nodes: int = 60  # N: those with the greatest log q along their path are kept, root included

    def check(self, columns: int) -> None:
        """Refuse what no tree over ``columns`` tokens can be.

        Raises:
          ValueError: a number out of its range.
        """
        at_least(1, **{f"tree.{name}": value for name, value in self._asdict().items()})
        if self.top_k > columns:
            raise ValueError(f"tree.top_k: expected 1 to {columns} (columns of the head), got {self.top_k}")
        most = 1 + self.top_k + (self.depth - 1) * self.top_k**2
        if not 2 <= self.num_nodes <= most:
            raise ValueError(
                f"tree.num_nodes: expected 2 to {most} with top_k = {self.top_k} and depth = {self.depth}, "
                f"got {self.num_nodes}"
            )


def _children(
    logits: Float[Array, "B n Vd"], above: Float[Array, "B n"], k: int
) -> tuple[Float[Array, "B n*k"], Int[Array, "B n*k"]]:
    """The k likeliest children of each node: log q summed along the path (-inf: there is none), columns."""
    best, column = top_k(logits, k)
    scores = above[..., None] + (best - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    scores = jnp.where(scores > -jnp.inf, scores, -jnp.inf)  # NaN, too
    batch = logits.shape[0]
    return scores.reshape(batch, -1), column.reshape(batch, -1)


def dynamic_tree(
    root: Int[Array, " B"],
    logits: Float[Array, "B Vd"],
    expand: Expand,
    beam: PyTree,
    shared: PyTree,
    settings: TreeSettings,
    ids: Int[Array, " Vd"] | None = None,
) -> Draft:
    """The ``num_nodes`` likeliest nodes among all that a beam search of width ``top_k`` meets::

        level 1        the k likeliest tokens after the root, all of them the beam
        level d + 1    the k likeliest children of each of the beam's nodes; the best k of these k * k by
                       score, log q summed along the path, are the next beam, and all k * k are remembered
        draft          root and the num_nodes - 1 best scores of all levels, in the order of the levels

    A child never scores above its parent, and of equal scores the earlier node is taken, so a node is kept
    only with its parent, and follows it. Chosen children, hence laws=None: the draws of no law. q is the
    plain softmax of the logits; sampling options do not enter.

    ``expand(level, beam, shared, tokens [B, k]) -> (beam, shared, logits [B, k, Vd])`` runs the drafter over
    the beam's nodes, which stand at depth ``level`` = 1, 2, ...; the leaves of ``beam``, [B, k, ...], follow
    the nodes into the next beam (each gets its parent's), those of ``shared`` stay as they are. ``ids`` are
    the tokens of the logits' columns; None: column i is token i.
    """
    batch, k = root.shape[0], settings.top_k
    size = k + (settings.depth - 1) * k * k
    first = jnp.arange(k, dtype=jnp.int32)[None]
    score, column = _children(logits[:, None], jnp.zeros((batch, 1)), k)

    def token_of(column: Int[Array, "B n"]) -> Int[Array, "B n"]:
        return column if ids is None else ids[column].astype(jnp.int32)

    def put(into: Array, values: Array, start: Int[Array, ""] | int) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(into, values, start, axis=1)

    # All nodes but the root, [B, size], level by level: node j is child number j % k of `parents[j]`.
    scores = put(jnp.full((batch, size), -jnp.inf), score, 0)
    tokens = put(jnp.zeros((batch, size), jnp.int32), token_of(column), 0)
    parents = jnp.full((batch, size), -1, jnp.int32)

    def level(d: Int[Array, ""], carry: tuple) -> tuple:
        scores, tokens, parents, beam, shared, places = carry
        beam, shared, logits = expand(d, beam, shared, take(tokens, places))
        score, column = _children(logits, take(scores, places), k)
        start = k + (d - 1) * k * k
        scores = put(scores, score, start)
        tokens = put(tokens, token_of(column), start)
        parents = put(parents, jnp.repeat(places, k, axis=1), start)
        picked = top_k(score, k)[1]
        beam = jax.tree.map(lambda leaf: jax.vmap(lambda row, i: row[i])(leaf, picked // k), beam)
        return scores, tokens, parents, beam, shared, start + picked

    places = jnp.broadcast_to(first, (batch, k))
    if settings.depth > 1:
        carry = (scores, tokens, parents, beam, shared, places)
        scores, tokens, parents, *_ = jax.lax.fori_loop(1, settings.depth, level, carry)

    kept = jnp.sort(top_k(scores, settings.num_nodes - 1)[1], axis=1)
    above = take(parents, kept)
    same = above[:, :, None] == kept[:, None]  # nobody's where the parent is the root
    valid = take(scores, kept) > -jnp.inf
    parent = jnp.where(same.any(2), 1 + jnp.argmax(same, axis=2), 0).astype(jnp.int32)
    return Draft(
        tokens=jnp.concatenate([root[:, None], jnp.where(valid, take(tokens, kept), 0)], axis=1),
        parents=jnp.pad(parent, ((0, 0), (1, 0)), constant_values=-1),
        valid=jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True),
    )
