"""Block verification: the draft chain is judged as a whole."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Float, Int

from jspec import sampling
from jspec.types import Draft, Keys, PyTree, Sampler, Verdict, Verifier
from jspec.verify import base


class _State(NamedTuple):
    i: Int[Array, ""]
    weight: Float[Array, " B"]  # w_i; 0 ends the row, for no longer prefix can be kept
    num_accepted: Int[Array, " B"]  # the longest prefix kept so far
    residual: Float[Array, "B V"]  # what to draw from after it, not normalised
    history: PyTree


def _block(
    sampler: Sampler, history: PyTree, logits: Float[Array, "B N V"], draft: Draft, depth: int, keys: Keys
) -> Verdict:
    length = base.chain_length(draft, depth, "block")
    batch, _, vocab_size = logits.shape
    accept_keys = sampling.fold(keys, base.ACCEPT)

    def running(s: _State) -> Array:
        return (s.i <= length) & (s.weight > 0)

    def body(s: _State) -> _State:
        p = sampler.law(s.history, jax.lax.dynamic_index_in_dim(logits, s.i, axis=1, keepdims=False))
        child = jnp.full(batch, jnp.minimum(s.i + 1, depth))
        token = base.at(draft.tokens, child)
        q = base.drawn_from(draft, child, vocab_size)
        last = s.i == length
        residual = base.select(last, p, jnp.maximum(s.weight[:, None] * p - q, 0))
        missing = residual.sum(-1)
        # h_i, as numerator and denominator. It is 1 where w = 1, the root among them, whatever rounding
        # makes of R / R or 0 / 0 (p = q): a prefix kept for sure must not be lost.
        certain = s.weight >= 1
        above = jnp.where(certain, 1, jnp.where(last, s.weight, missing))
        below = jnp.where(certain | last, 1, missing + (1 - s.weight))
        kept = running(s) & sampling.accept(
            sampling.fold(accept_keys, s.i),
            jnp.where(running(s), above, 0),
            jnp.where(running(s), below, 1),
        )
        q_token = base.at(q, token)
        ratio = jnp.where(q_token > 0, base.at(p, token) / jnp.where(q_token > 0, q_token, 1), 0)
        return _State(
            s.i + 1,
            jnp.where(running(s), jnp.minimum(1, s.weight * ratio), 0),
            jnp.where(kept, s.i, s.num_accepted),
            base.select(kept, base.select(missing > 0, residual, p), s.residual),
            sampler.push(s.history, token),
        )

    start = _State(
        jnp.int32(0), jnp.ones(batch), jnp.zeros(batch, jnp.int32), jnp.zeros((batch, vocab_size)), history
    )
    s = jax.lax.while_loop(lambda s: running(s).any(), body, start)
    law = sampling.normalize(s.residual, s.residual)
    path = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32)[None], (batch, depth + 1))
    return base.verdict(draft, path, s.num_accepted, sampling.draw(sampling.fold(keys, base.DRAW), law))


def block() -> Verifier:
    r"""Block verification on chains. Lossless in law.

    With x_1 ... x_L drafted, x_{i+1} drawn from q_{i+1} where the target's law is p_{i+1}::

        w_0 = 1,  w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))         P(at least i are kept | x_1 ... x_i)
        R_i = sum_x (w_i p_{i+1}(x) - q_{i+1}(x))+
        h_i = R_i / (R_i + 1 - w_i) for i < L,  h_L = w_L
        keep the longest prefix i whose coin u_i < h_i comes up; a failed coin does not end the search
        then emit a token of norm((w_i p_{i+1} - q_{i+1})+), or of p_{L+1} if i = L

    The expected length is never below that of `token`, and the greatest of all rules that keep a prefix of
    a chain. Equal to it at temperature 0 and for chosen tokens. L may differ from row to row and depend on
    the tokens before, as long as it is settled before the next token is drawn. Two things differ from the
    paper: L is such a stopping time, not a constant, and coins are tossed from left to right, which
    changes nothing because they are independent.

    Returns:
        A `Verifier`; its rule raises ValueError while tracing unless N == depth + 1.

    Example:
        p = q at both positions: everything is kept.

        >>> import jax, jax.numpy as jnp
        >>> from jspec import sampling, trees, types
        >>> logits = jnp.log(jnp.array([[[0.5, 0.5], [0.1, 0.9]]]))
        >>> draft = types.Draft(jnp.array([[0, 1]]), trees.chain_parents(1, 2), jnp.ones((1, 2), bool),
        ...                     jnp.exp(logits))
        >>> sampler = sampling.sampler(sampling.Settings(jnp.ones(1)))
        >>> v = block().rule(sampler, (), logits, draft, 1, sampling.row_keys(jnp.arange(1)))
        >>> v.num_accepted.tolist()
        [1]

    Reference:
        Sun, Mendlovic, Leviathan et al., Block Verification Accelerates Speculative Decoding, arXiv
        2403.10444.
    """
    return Verifier(Partial(_block), base.ALL_DRAWS, True, "block")
