"""The token rule: speculative sampling on a chain, one coin a drafted token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from jspec import sampling
from jspec.types import Draft, Keys, PyTree, Sampler, Verdict, Verifier
from jspec.verify import base

# Up to this many numbers of all nodes' laws together, all at once are cheaper than those of visited nodes one
# after the other: a round of a T5 with 4,000 tokens and drafts of 5 takes 4 % less time.
FEW = 2**16


class _State(NamedTuple):
    i: Int[Array, ""]  # every running row stands at node i and has accepted i tokens
    num_accepted: Int[Array, " B"]
    running: Bool[Array, " B"]
    law: Float[Array, "B V"]  # p at node num_accepted
    history: PyTree


def _token(
    sampler: Sampler, history: PyTree, logits: Float[Array, "B N V"], draft: Draft, depth: int, keys: Keys
) -> Verdict:
    length = base.chain_length(draft, depth, "token")
    _, width, vocab_size = logits.shape
    known = not jax.tree.leaves(history)  # no law depends on the tokens before it
    judge = _at_once if known and width * vocab_size <= FEW else _in_turn
    num_accepted, p = judge(sampler, history, logits, draft, length, sampling.fold(keys, base.ACCEPT))
    q = base.drawn_from(draft, jnp.minimum(num_accepted + 1, depth), vocab_size)
    residual = sampling.normalize(jnp.maximum(p - q, 0), p)
    law = base.select(num_accepted < length, residual, p)
    path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], draft.tokens.shape)
    return base.verdict(draft, path, num_accepted, sampling.draw(sampling.fold(keys, base.DRAW), law))


def _at_once(
    sampler: Sampler,
    history: PyTree,
    logits: Float[Array, "B N V"],
    draft: Draft,
    length: Int[Array, " B"],
    keys: Keys,
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
    """What `_in_turn` returns, up to rounding, where no law depends on the tokens before it."""
    p = jax.vmap(lambda node: sampler.law(history, node), in_axes=1, out_axes=1)(logits)
    num_accepted, running = jnp.zeros_like(length), jnp.ones_like(length, bool)
    for i in range(1, logits.shape[1]):
        node = jnp.full_like(length, i)
        running = running & _judge(p[:, i - 1], draft, node, running & (i <= length), keys)
        num_accepted = num_accepted + running.astype(jnp.int32)
    return num_accepted, base.at(p, num_accepted)


def _judge(
    p: Float[Array, "B V"], draft: Draft, child: Int[Array, " B"], running: Bool[Array, " B"], keys: Keys
) -> Bool[Array, " B"]:
    """Whether the token of ``child`` is accepted, in rows that have got so far."""
    token = base.at(draft.tokens, child)
    q_token = base.at(base.drawn_from(draft, child, p.shape[1]), token)
    # A token that its law cannot have produced is never accepted.
    judged = running & (q_token > 0)
    return judged & sampling.accept(
        sampling.fold(keys, child),
        jnp.where(judged, base.at(p, token), 0),
        jnp.where(judged, q_token, 1),
    )


def _in_turn(
    sampler: Sampler,
    history: PyTree,
    logits: Float[Array, "B N V"],
    draft: Draft,
    length: Int[Array, " B"],
    keys: Keys,
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
    """The number of accepted tokens, and p at the last one."""
    batch, width, vocab_size = logits.shape

    def body(s: _State) -> _State:
        p = sampler.law(s.history, jax.lax.dynamic_index_in_dim(logits, s.i, axis=1, keepdims=False))
        child = jnp.full(batch, jnp.minimum(s.i + 1, width - 1))
        accepted = _judge(p, draft, child, s.running & (s.i < length), keys)
        return _State(
            s.i + 1,
            s.num_accepted + accepted.astype(jnp.int32),
            accepted,
            base.select(s.running, p, s.law),
            base.select(accepted, sampler.push(s.history, base.at(draft.tokens, child)), s.history),
        )

    start = _State(
        jnp.int32(0),
        jnp.zeros(batch, jnp.int32),
        jnp.ones(batch, bool),
        jnp.zeros((batch, vocab_size)),
        history,
    )
    s = jax.lax.while_loop(lambda s: s.running.any(), body, start)
    return s.num_accepted, s.law


def token() -> Verifier:
    r"""The token rule on chains. Lossless in law.

    Drafted token x, drawn from q where the target's law is p (q one-hot for a chosen token)::

        accept x with probability min(1, p(x) / q(x)) and go on;
        at the first rejection emit a token of norm((p - q)+), after the last token one of p.

    Expected tokens of a round with acceptance rate alpha: (1 - alpha^(D+1)) / (1 - alpha).
    For chains only; chosen, drawn and mixed nodes alike. The reference for `block`, which is never worse.

    Returns:
        A `Verifier`; its rule raises ValueError while tracing unless N == depth + 1.

    Example:
        A chain of one token, drawn from q = (0, 1), where p = (1, 0): rejected, and recovered from p.

        >>> import jax, jax.numpy as jnp
        >>> from jspec import sampling, trees, types
        >>> draft = types.Draft(jnp.array([[0, 1]]), trees.chain_parents(1, 2), jnp.ones((1, 2), bool),
        ...                     jnp.array([[[0.0, 1.0]]]), jnp.array([[-1, 0]]))
        >>> logits = jnp.array([[[9.0, 0.0], [0.0, 9.0]]])
        >>> v = token().rule(sampling.greedy(1), (), logits, draft, 1, sampling.row_keys(jnp.arange(1)))
        >>> v.num_accepted.tolist(), v.tokens.tolist()
        ([0], [[0, 0]])

    Reference:
        Leviathan, Kalman, Matias, Fast Inference from Transformers via Speculative Decoding, arXiv
        2211.17192, Algorithm 1; Chen et al., arXiv 2302.01318, Algorithm 2 (there p and q are swapped).
    """
    return Verifier(Partial(_token), base.ALL_DRAWS, True, "token")
