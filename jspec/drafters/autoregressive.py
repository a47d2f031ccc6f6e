"""Drafting token by token: the loop that every autoregressive drafter shares, and its stopping rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from jspec import sampling
from jspec.checks import between, instance
from jspec.drafters.common import chain, root
from jspec.types import Context, Draft, Keys, PyTree

Step = Callable[
    [PyTree, Int[Array, " B"], Int[Array, ""], Bool[Array, " B"]], tuple[PyTree, Float[Array, "B V"]]
]
Continue = Callable[[Float[Array, "B V"]], Bool[Array, " B"]]


def _confident(threshold: Float[Array, ""], law: Float[Array, "B V"]) -> Bool[Array, " B"]:
    return law.max(-1) >= threshold


def confidence(threshold: float) -> Continue:
    """Draft on while the drafter gives its most likely token at least this probability, before the request's
    temperature, filters and penalties: one threshold means the same for all requests, greedy ones, too.

    Transformers' ``assistant_confidence_threshold`` looks at the drafted token instead, which is exact only
    for greedy drafts: a stop that depends on the drawn token biases the output.

    Raises:
      ValueError: a threshold beyond 0 and 1.

    >>> confidence(0.5)(jnp.array([[0.6, 0.4], [0.4, 0.3]])).tolist()
    [True, False]
    """
    between(0, 1, threshold=threshold)
    return Partial(_confident, jnp.float32(threshold))


def _likely_accepted(
    threshold: Float[Array, ""], scale: Float[Array, ""], law: Float[Array, "B V"]
) -> Bool[Array, " B"]:
    entropy = -jnp.sum(jnp.where(law > 0, law * jnp.log(jnp.where(law > 0, law, 1)), 0), axis=-1)
    return 1 - jnp.sqrt(scale * entropy) >= threshold


def entropy_bound(threshold: float, scale: float = 0.2) -> Continue:
    """Draft on while ``1 - sqrt(scale * H(q))``, a bound on the acceptance rate from the entropy of the
    drafter's law in nats, is at least ``threshold`` (in the manner of AdaEDL, arXiv 2410.18351; ``scale`` is
    a constant to be set per drafter). It is the law before the request's settings, as for `confidence`.

    Raises:
      ValueError: a threshold beyond 0 and 1, or a negative scale.
    """
    between(0, 1, threshold=threshold)
    between(0, float("inf"), scale=scale)
    return Partial(_likely_accepted, jnp.float32(threshold), jnp.float32(scale))


def stopping(proceed: Continue | None) -> Continue | None:
    """``proceed``, as factories take it.

    Raises:
      ValueError: it is no rule.
    """
    if proceed is not None:
        instance(Partial, "confidence(threshold), entropy_bound(threshold) or None", proceed=proceed)
    return proceed


def fit_vocabulary(logits: Float[Array, "B Vd"], vocab_size: int) -> Float[Array, "B V"]:
    """A drafter's logits at the target's width: surplus columns dropped, missing ones impossible."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=sampling.NEG_INF)


class _Loop(NamedTuple):
    step: Int[Array, ""]
    carry: PyTree
    token: Int[Array, " B"]
    alive: Bool[Array, " B"]
    history: PyTree
    tokens: Int[Array, "B D"]
    valid: Bool[Array, "B D"]
    laws: Float[Array, "B D V"] | None


def draft_chain(
    context: Context,
    keys: Keys,
    step: Step,
    carry: PyTree,
    *,
    num_tokens: int,
    sample: bool,
    proceed: Continue | None = None,
    room: Int[Array, " B"] | None = None,
    ready: Callable[[PyTree], Bool[Array, " B"]] | None = None,
) -> tuple[Draft, PyTree]:
    """A chain of up to ``num_tokens`` tokens from ``step(carry, token, t, active) -> (carry, logits)``.

    The first call of ``step`` gets the root. Rows that are not ``active`` any more must keep their carry: how
    long the loop runs depends on the neighbours, and nothing of a row may. A token is drafted if the budget
    leaves room for it, if ``room`` (tokens the drafter can still place) does, if ``proceed`` holds for the
    softmax of its logits, and ``ready(carry)`` for the carry that came with it (a confidence head): all
    known before the draw, so that the output law is untouched. The loop ends when no row goes on. Drawn
    tokens (``sample``) carry their laws; otherwise each token is the argmax of its law.
    """
    batch, vocab_size = context.lengths.shape[0], context.target.config.vocab_size
    room = context.budget - 1 if room is None else jnp.minimum(room, context.budget - 1)

    def going(loop: _Loop) -> Bool[Array, ""]:
        return (loop.step < num_tokens) & jnp.any(loop.alive & (loop.step < room))

    def body(loop: _Loop) -> _Loop:
        t = loop.step
        alive = loop.alive & (t < room)
        carry, logits = step(loop.carry, loop.token, t, alive)
        logits = fit_vocabulary(logits, vocab_size)
        law = context.sampler.law(loop.history, logits)
        if proceed is not None:  # not the sampler's law: that of temperature 0 is always sure
            alive = alive & proceed(jax.nn.softmax(logits.astype(jnp.float32), axis=-1))
        if ready is not None:
            alive = alive & ready(carry)
        token = sampling.draw(sampling.fold(keys, t), law) if sample else sampling.argmax(law)
        token = jnp.maximum(token, 0)  # a law without mass (NaN weights) accepts nothing, whatever the token
        token = jnp.where(alive, token, 0)
        return _Loop(
            t + 1,
            carry,
            token,
            alive,
            context.sampler.push(loop.history, token),
            loop.tokens.at[:, t].set(token),
            loop.valid.at[:, t].set(alive),
            None if loop.laws is None else loop.laws.at[:, t].set(law),
        )

    loop = jax.lax.while_loop(
        going,
        body,
        _Loop(
            jnp.int32(0),
            carry,
            root(context),
            jnp.ones(batch, bool),
            context.history,
            jnp.zeros((batch, num_tokens), jnp.int32),
            jnp.zeros((batch, num_tokens), bool),
            jnp.zeros((batch, num_tokens, vocab_size)) if sample else None,
        ),
    )
    return chain(root(context), loop.tokens, loop.valid, loop.laws), loop.carry
