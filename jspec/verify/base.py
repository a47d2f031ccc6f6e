"""What the acceptance rules share: indexing by row, the laws of drafted nodes, the walk's result.

Every rule is a pure function ``(sampler, history, logits, draft, depth, keys) -> Verdict``. It asks
``sampler.law`` for one node at a time, [B, V], with a history that holds the node's ancestors, and takes
randomness from `sampling.accept` (stream `ACCEPT`) and `sampling.draw` (stream `DRAW`) alone, each key
folded with a number that occurs once a round. Nothing is computed across rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec import trees
from jspec.types import Draft, PyTree, Sampler, Verdict

ACCEPT, DRAW = 0, 1
ALL_DRAWS = frozenset({"chosen", "iid", "distinct", "mixed"})


def at(array: Array, index: Int[Array, " B"]) -> Array:
    """``array[b, index[b]]`` for every row b: [B, N, ...] -> [B, ...]."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_index_in_dim(row, i, keepdims=False))(array, index)


def select(rows: Bool[Array, " B"], new: PyTree, old: PyTree) -> PyTree:
    """``new`` in the marked rows, ``old`` in the others; every leaf leads with B."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(jnp.expand_dims(rows, tuple(range(1, a.ndim))), a, b)

    return jax.tree.map(pick, new, old)


def one_hot(token: Int[Array, " B"], vocab_size: int) -> Float[Array, "B V"]:
    """All mass on ``token``."""
    return (jnp.arange(vocab_size, dtype=jnp.int32)[None] == token[:, None]).astype(jnp.float32)


def drawn_from(draft: Draft, node: Int[Array, " B"], vocab_size: int) -> Float[Array, "B V"]:
    """The law that ``node`` was drawn from; one-hot for a chosen node.

    A law without mass, which a drafter has where the sampler allows nothing of its vocabulary, may be NaN;
    here it is 0: its token is never kept, and the law of what is emitted in its place is the target's.
    """
    hot = one_hot(at(draft.tokens, node), vocab_size)
    if draft.laws is None:
        return hot
    law = at(law_index(draft), node)
    drawn = at(draft.laws, jnp.maximum(law, 0))
    return jnp.where((law < 0)[:, None], hot, jnp.where(jnp.isnan(drawn), 0, drawn))


def law_index(draft: Draft) -> Int[Array, "B N"]:
    """Row of ``draft.laws`` of every node, -1 for a chosen one."""
    if draft.laws is None:
        return jnp.full_like(draft.parents, -1)
    return draft.parents if draft.law is None else draft.law


def next_child(draft: Draft, node: Int[Array, " B"], after: Int[Array, " B"]) -> Int[Array, " B"]:
    """The first valid child of ``node`` with an index above ``after``; N if there is none."""
    width = draft.tokens.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None]
    child = draft.valid & (draft.parents == node[:, None]) & (index > after[:, None])
    return jnp.where(child, index, width).min(1)


def chain_length(draft: Draft, depth: int, name: str) -> Int[Array, " B"]:
    """Number of valid draft tokens of a chain.

    A tree with N nodes and depth N - 1 is a chain, so a rule for chains needs N == depth + 1 (``width ==
    depth + 1`` of a `Method`). Where a method of that shape hands over another tree, the chain ends
    before the first node whose parent is not the node before it: still exact, only shorter.

    Raises:
        ValueError: if N is not depth + 1.
    """
    width = draft.tokens.shape[1]
    if width != depth + 1:
        raise ValueError(
            f"verify.{name} judges chains only: expected a draft of N = depth + 1 = {depth + 1} nodes, "
            f"got N = {width}; verify.tree() judges trees"
        )
    index = jnp.arange(width - 1, dtype=jnp.int32)[None]
    linked = draft.valid[:, 1:] & (draft.parents[:, 1:] == index)
    return jnp.where(linked, width - 1, index).min(1, initial=width - 1)


def path_to(draft: Draft, node: Int[Array, " B"], depth: int) -> Int[Array, "B R"]:
    """The nodes from the root to ``node``, one a depth; 0 beyond it."""
    mask = trees.ancestors(draft.parents)
    level = jnp.arange(depth + 1, dtype=jnp.int32)[None, :, None]
    return jnp.argmax(at(mask, node)[:, None] & (trees.depths(mask)[:, None] == level), -1).astype(jnp.int32)


def push_path(
    sampler: Sampler, history: PyTree, draft: Draft, path: Int[Array, "B R"], count: Int[Array, " B"]
) -> PyTree:
    """``history`` after the tokens of ``path[:, 1 : count + 1]``."""
    if not jax.tree.leaves(history):
        return history
    for d in range(1, path.shape[1]):
        history = select(d <= count, sampler.push(history, at(draft.tokens, path[:, d])), history)
    return history


def verdict(
    draft: Draft, path: Int[Array, "B R"], num_accepted: Int[Array, " B"], token: Int[Array, " B"]
) -> Verdict:
    """The result of a round: the tokens along ``path``, then ``token``."""
    # The token that follows node path[d] is the one of node path[d + 1]; after the last accepted, `token`:
    #   path 0 2 5 0, num_accepted 2  ->  tokens[2] tokens[5] token 0
    d = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    drafted = jnp.roll(jnp.take_along_axis(draft.tokens, path, axis=1), -1, axis=1)
    last = jnp.where(d == num_accepted[:, None], token[:, None], 0)
    tokens = jnp.where(d < num_accepted[:, None], drafted, last)
    return Verdict(path, num_accepted, tokens, num_accepted + 1)
