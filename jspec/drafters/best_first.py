"""A tree of the likeliest paths through laws that are known for every depth at once."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.common import take, top_k
from jspec.types import Draft


def no_bias(token: Int[Array, "B M"]) -> None:
    """The laws of a depth are the same after every token."""


def best_first(
    root: Int[Array, " B"],
    logits: Float[Array, "B D Vd"],
    num_nodes: int,
    branching: int,
    beam: int,
    bias: Callable[[Int[Array, "B M"]], Float[Array, "B M Vd"] | None] = no_bias,
    ids: Int[Array, " Vd"] | None = None,
) -> Draft:
    """The ``num_nodes`` likeliest nodes (root included); a node is as likely as its path.

    What a search with a heap finds (DDTree, arXiv 2604.12989; JetSpec, arXiv 2606.18394), as D steps of
    static shape. A child is never likelier than its parent, so the likeliest nodes of all levels together are
    a tree; and what hangs below a node that n others of its level are likelier than is never among the n
    likeliest, so ``beam`` = num_nodes - 1 nodes a level miss none. Levels are listed one after the other, and
    of equal nodes the first is taken: a parent always precedes its children.

    Args:
      root: node 0.
      logits: of depth 1 to D.
      branching: children of a node that are considered, the likeliest ones.
      beam: nodes of a level whose children are considered.
      bias: what the logits of its children gain by a node's token; None: nothing.
      ids: tokens of the columns; None: column i is token i.
    Returns:
      A draft of chosen nodes; those of no likelihood, and all but the root where logits are NaN, are invalid.

    >>> laws = jnp.log(jnp.array([[[0.6, 0.4], [0.9, 0.1]]]))
    >>> draft = best_first(jnp.array([5]), laws, 4, 2, 3)
    >>> draft.tokens.tolist(), draft.parents.tolist()
    ([[5, 0, 1, 0]], [[-1, 0, 0, 1]])
    """
    batch, depth, columns = logits.shape
    branching = min(branching, columns)
    ids = jnp.arange(columns, dtype=jnp.int32) if ids is None else ids
    tokens, above, scores = [], [], []  # of all candidates, level by level
    at, token, score = jnp.full((batch, 1), -1, jnp.int32), root[:, None], jnp.zeros((batch, 1))  # the beam
    listed = 0
    for level in range(depth):
        own, added = logits[:, level, None], bias(token)
        best, column = top_k(jax.nn.log_softmax(own if added is None else own + added), branching)
        wide = (batch, token.shape[1], branching)  # `best` has one row for all, or one a node of the beam
        score = (score[..., None] + best).reshape(batch, -1)
        tokens.append(jnp.broadcast_to(ids[column], wide).reshape(batch, -1))
        above.append(jnp.broadcast_to(at[..., None], wide).reshape(batch, -1))
        scores.append(score)
        score, picked = jax.lax.top_k(score, min(beam, score.shape[1]))
        at, token = listed + picked.astype(jnp.int32), take(tokens[-1], picked)
        listed += scores[-1].shape[1]
    tokens, above, scores = (jnp.concatenate(parts, axis=1) for parts in (tokens, above, scores))

    picked = jnp.sort(jax.lax.top_k(scores, num_nodes - 1)[1].astype(jnp.int32), axis=1)
    exists = take(scores, picked) > -jnp.inf
    up = take(above, picked)
    parent = 1 + jnp.argmax(up[:, :, None] == picked[:, None], axis=2).astype(jnp.int32)
    parents = jnp.where(exists & (up >= 0), parent, 0)
    return Draft(
        tokens=jnp.concatenate([root[:, None], jnp.where(exists, take(tokens, picked), 0)], axis=1),
        parents=jnp.pad(parents, ((0, 0), (1, 0)), constant_values=-1),
        valid=jnp.pad(exists, ((0, 0), (1, 0)), constant_values=True),
    )


def num_candidates(depth: int, branching: int, beam: int) -> int:
    """How many nodes, root included, there are to choose from.

    >>> num_candidates(3, 2, 8), num_candidates(3, 2, 2)
    (15, 11)
    """
    level, total = 1, 1
    for _ in range(depth):
        total += level * branching
        level = min(beam, level * branching)
    return total
