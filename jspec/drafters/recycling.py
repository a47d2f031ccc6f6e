"""Token Recycling: a table of each token's likely successors, unrolled into a tree.

A forward over N draft nodes gives N rows of logits, of which plain speculative decoding uses the few on the
accepted path. Here every row leaves its k best tokens in a table ``successors[token]``, and the next
draft is a fixed tree read from it level by level: child r of a node is ``successors[node, r]``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec import trees
from jspec.checks import at_least
from jspec.drafters.common import (
    move_to_front,
    read_rows,
    root,
    top_k,
    write_rows,
)
from jspec.types import Context, Draft, Drafter, Forward, Keys, LanguageModel, Method, Prompt, Verdict

# How often child r (column) was the next token at depth d + 1 (row), its parent being right: 2,765 greedy
# rounds of SmolLM2-135M-Instruct on 70 prompts (instructions, code, translation, news, sums), none of them
# from Spec-Bench.
ACCURACIES = np.array(
    [
        [0.282, 0.080, 0.041, 0.019, 0.018, 0.010, 0.011, 0.008],
        [0.469, 0.099, 0.041, 0.030, 0.016, 0.006, 0.012, 0.006],
        [0.480, 0.092, 0.037, 0.024, 0.021, 0.016, 0.013, 0.007],
        [0.524, 0.093, 0.038, 0.026, 0.022, 0.017, 0.012, 0.009],
        [0.589, 0.063, 0.033, 0.012, 0.024, 0.026, 0.005, 0.003],
        [0.561, 0.113, 0.019, 0.029, 0.023, 0.013, 0.009, 0.013],
        [0.643, 0.077, 0.033, 0.004, 0.008, 0.008, 0.008, 0.004],
        [0.711, 0.088, 0.043, 0.017, 0.005, 0.011, 0.000, 0.016],
    ]
)


@functools.cache
def _token_recycling(template: trees.Template, k: int) -> Method:
    def init(params: tuple[()], prompt: Prompt, capacity: int, target: LanguageModel) -> Int[Array, "B V k"]:
        vocab_size = target.config.vocab_size
        return jnp.full((prompt.lengths.shape[0], vocab_size, min(k, vocab_size)), -1, jnp.int32)

    def propose(
        params: tuple[()], table: Int[Array, "B V k"], context: Context, keys: Keys
    ) -> tuple[Draft, Int[Array, "B V k"]]:
        batch = context.lengths.shape[0]
        parents, ranks = np.array(template.parents), np.array(template.ranks)
        tokens = root(context)[:, None]
        # One gather a level. An unset entry is -1, and so is whatever would follow it.
        for depth in range(1, template.depth + 1):
            level = np.flatnonzero(np.array(template.depths) == depth)
            above = tokens[:, parents[level]]
            rank = jnp.asarray(ranks[level])
            new = jax.vmap(lambda t, token, rank=rank: t.at[token, rank].get(mode="fill", fill_value=-1))(
                table, jnp.maximum(above, 0)
            )
            tokens = jnp.concatenate([tokens, jnp.where(above < 0, -1, new)], axis=1)
        draft = Draft(
            tokens=jnp.maximum(tokens, 0),
            parents=jnp.broadcast_to(jnp.array(template.parents, jnp.int32), (batch, template.width)),
            valid=tokens >= 0,
        )
        return draft, table

    def update(
        params: tuple[()],
        table: Int[Array, "B V k"],
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> Int[Array, "B V k"]:
        if forward.logits is None:
            return _learn_text(table, draft.tokens, verdict)
        return _learn_logits(table, draft, verdict, forward)

    return Method(init, propose, update, width=template.width, depth=template.depth)


def _learn_text(
    table: Int[Array, "B V k"], tokens: Int[Array, "B C"], verdict: Verdict
) -> Int[Array, "B V k"]:
    """A prompt has no logits, but its own successors: each is moved to the front, in the text's order."""

    def step(t: Int[Array, ""], table: Int[Array, "B V k"]) -> Int[Array, "B V k"]:
        token = tokens[:, t]
        rows = jax.vmap(move_to_front)(read_rows(table, token), verdict.tokens[:, t])
        token = jnp.where(t < verdict.num_emitted, token, table.shape[1])
        return write_rows(table, token[:, None], rows[:, None])

    return jax.lax.fori_loop(0, verdict.num_emitted.max(), step, table)


def _learn_logits(
    table: Int[Array, "B V k"], draft: Draft, verdict: Verdict, forward: Forward
) -> Int[Array, "B V k"]:
    """The k best tokens after every valid node, rejected ones included. Where nodes share a token, the
    deepest accepted one is kept, or else the last: a scatter with duplicates would not be deterministic."""
    assert forward.logits is not None
    width = draft.tokens.shape[1]
    node = jnp.arange(width, dtype=jnp.int32)[None]
    depth = jnp.arange(verdict.path.shape[1])[None]
    on_path = (verdict.path[:, :, None] == node[:, None]) & (depth <= verdict.num_accepted[:, None])[
        :, :, None
    ]
    priority = node + jnp.where(on_path.any(1), width, 0)
    learns = draft.valid & (verdict.num_emitted > 0)[:, None]
    priority = jnp.where(learns, priority, -1)
    same = draft.tokens[:, :, None] == draft.tokens[:, None]
    beaten = (same & (priority[:, None] > priority[:, :, None])).any(2)

    _, rows = top_k(forward.logits[:, :width], table.shape[2])
    return write_rows(table, jnp.where(learns & ~beaten, draft.tokens, table.shape[1]), rows)


def token_recycling(num_nodes: int = 24, *, k: int = 8, template: trees.Template | None = None) -> Drafter:
    """A tree of the successors that the target itself found likely the last time it saw each token.

    Lossless in law with any lossless rule: every node is chosen. No weights. The state is the table,
    [B, V, k] int32 (1.5 MB a row at V = 49,152, k = 8), empty at first and written in place::

        after every round   successors[x_i] = the k largest of logits_i, for every node i, accepted or not
        from the prompt     x_{t+1} is moved to the front of successors[x_t]

    The second rule is ours: the original's table starts with zeros, and is kept from one prompt to the
    next, which makes its figures depend on the order of prompts. An encoder-decoder's source is not read: its
    successors are of another language, or none of the target's.

    Args:
      num_nodes: width of the tree, root included, for which the nodes most often right are taken
        (`trees.grow` from `ACCURACIES`).
      k: successors kept for a token.
      template: another tree; replaces ``num_nodes``.

    Raises:
      ValueError: fewer than 2 nodes, or more than the table has ranks for; ``k`` < 1; a template with a
        rank of k or more.

    >>> token_recycling().method.width
    24

    Reference: Luo et al. 2025, "Turning Trash into Treasure", arXiv 2408.08696, section 3. Their tree has 81
    nodes, which pays on large accelerators only.
    """
    at_least(2, num_nodes=num_nodes)
    at_least(1, k=k)
    if template is None:
        columns = min(k, ACCURACIES.shape[1])
        most = sum(columns**depth for depth in range(len(ACCURACIES) + 1))
        if num_nodes > most:
            raise ValueError(f"num_nodes: expected at most {most} with k = {k}, got {num_nodes}")
        template = trees.grow(ACCURACIES[:, :columns], num_nodes)
    if max(template.ranks) >= k:
        raise ValueError(f"template: expected ranks below k = {k}, got {max(template.ranks)}")
    return Drafter((), _token_recycling(template, k))
