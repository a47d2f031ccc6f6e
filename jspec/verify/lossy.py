"""Lossy rules: they emit another law than the target's, to accept more or to study throughput.

Those that judge node by node (`typical`, `top_beta`, `blockwise`, `rollback`) look at every node whose
ancestors all passed and keep the longest path that did, the likelier one on ties. They read the law that the
sampler gives, so bans and filters hold, and at temperature 0, where that law is one-hot, they are exact
(`lenience` is not).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from jspec import sampling, trees
from jspec.types import Draft, Keys, PyTree, Sampler, Verdict, Verifier
from jspec.verify import base
from jspec.verify.tree import descend, in_turn


def _lenience(
    factor: Float[Array, ""],
    sampler: Sampler,
    history: PyTree,
    logits: Float[Array, "B N V"],
    draft: Draft,
    depth: int,
    keys: Keys,
) -> Verdict:
    width, vocab_size = logits.shape[1:]
    index = jnp.arange(width, dtype=jnp.int32)[None]
    level = trees.depths(trees.ancestors(draft.parents))
    judge = in_turn(draft, keys, replacement=False, lenience=factor)

    def siblings(
        p: Float[Array, "B V"], node: Int[Array, " B"], looking: Bool[Array, " B"]
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
        def likely_enough() -> Int[Array, " B"]:
            # A one-hot law says nothing but which token is the best. So the children's logits are raised by
            # -log l: then one of them is the best if and only if it has l times the best probability.
            children = draft.valid & (draft.parents == node[:, None])
            drafted = jax.vmap(lambda tokens: jnp.zeros(vocab_size, bool).at[tokens].set(True, mode="drop"))(
                jnp.where(children, draft.tokens, vocab_size)
            )
            at_node = base.at(logits, node)
            raised = jnp.where(drafted, at_node - jnp.log(factor), at_node)
            path = base.path_to(draft, node, depth)
            law = sampler.law(base.push_path(sampler, history, draft, path, base.at(level, node)), raised)
            best = children & (draft.tokens == sampling.argmax(law)[:, None])
            return jnp.where(best, index, width).min(1)

        child, leftover = judge(p, node, looking)
        greedy = looking & ((p > 0).sum(-1) == 1)
        lenient = jax.lax.cond(greedy.any(), likely_enough, lambda: child)
        return jnp.where(greedy, lenient, child), base.select(greedy, p, leftover)

    return descend(sampler, history, logits, draft, depth, keys, siblings)


def lenience(factor: float) -> Verifier:
    """Lossy, because a drafted token is accepted with probability min(1, p(x) / (l q(x))), l < 1.

    Siblings and residual are those of `tree`, which this is at l = 1. On a chain no token comes out with a
    probability above p(x) / l, and the acceptance rate is sum_x min(p(x) / l, q(x)).

    At temperature 0 (and wherever a law is one-hot, as with ``top_k`` 1) that ratio says nothing, and the
    paper compares what the law was made of: a token is accepted if p(x) >= l max p, p at temperature 1, after
    penalties and bans; of several such siblings the likeliest. The token after them is the target's best.

    Args:
        factor: l in (0, 1].

    Raises:
        ValueError: if ``factor`` is not in (0, 1].

    Example:
        >>> lenience(0.5).lossless
        False

    Reference:
        Leviathan, Kalman, Matias, arXiv 2211.17192, appendix A.5 and Table 5.
    """
    _check(0 < factor <= 1, "factor", "a number in (0, 1]", factor)
    return Verifier(Partial(_lenience, jnp.float32(factor)), base.ALL_DRAWS, False, "lenience")


# Which of the tokens whose probabilities are given pass at a node with law p.
Passes = Callable[[Float[Array, "B V"], Float[Array, "B N"]], Bool[Array, "B N"]]


class _Search(NamedTuple):
    node: Int[Array, " B"]  # looked at next, N at the end
    passed: Bool[Array, "B N"]
    score: Float[Array, "B N"]  # log-likelihood of a passed node's path


def _longest(
    sampler: Sampler, history: PyTree, logits: Float[Array, "B N V"], draft: Draft, depth: int, passes: Passes
) -> tuple[Int[Array, "B R"], Int[Array, " B"], Float[Array, "B V"]]:
    """The longest path of passing nodes, its length, and the target's law after it."""
    batch, width, _ = logits.shape
    index = jnp.arange(width, dtype=jnp.int32)[None]
    level = trees.depths(trees.ancestors(draft.parents))
    inner = (draft.valid[:, None] & (draft.parents[:, None] == index[:, :, None])).any(-1)  # has children

    def law_at(node: Int[Array, " B"]) -> Float[Array, "B V"]:
        path = base.path_to(draft, node, depth)
        return sampler.law(
            base.push_path(sampler, history, draft, path, base.at(level, node)), base.at(logits, node)
        )

    def body(s: _Search) -> _Search:
        node = jnp.minimum(s.node, width - 1)
        p = law_at(node)
        p_tokens = jnp.take_along_axis(p, draft.tokens, axis=1)
        child = draft.valid & (draft.parents == s.node[:, None]) & passes(p, p_tokens) & (p_tokens > 0)
        passed = s.passed | child
        log_p = jnp.log(jnp.where(child, p_tokens, 1))
        return _Search(
            jnp.where(passed & inner & (index > s.node[:, None]), index, width).min(1),
            passed,
            jnp.where(child, base.at(s.score, node)[:, None] + log_p, s.score),
        )

    root = jnp.broadcast_to(index == 0, (batch, width))
    start = _Search(jnp.where(inner[:, 0], 0, width), root, jnp.zeros((batch, width)))
    s = jax.lax.while_loop(lambda s: (s.node < width).any(), body, start)
    reach = jnp.where(s.passed, level, -1)
    deepest = reach == reach.max(1, keepdims=True)
    node = jnp.argmax(jnp.where(deepest, s.score, -jnp.inf), axis=1).astype(jnp.int32)
    return base.path_to(draft, node, depth), base.at(level, node), law_at(node)


def _typical(
    epsilon: Float[Array, ""],
    delta: Float[Array, ""],
    sampler: Sampler,
    history: PyTree,
    logits: Float[Array, "B N V"],
    draft: Draft,
    depth: int,
    keys: Keys,
) -> Verdict:
    def passes(p: Float[Array, "B V"], p_tokens: Float[Array, "B N"]) -> Bool[Array, "B N"]:
        entropy = -(p * jnp.log(jnp.where(p > 0, p, 1))).sum(-1, keepdims=True)
        return p_tokens > jnp.minimum(epsilon, delta * jnp.exp(-entropy))

    path, num_accepted, law = _longest(sampler, history, logits, draft, depth, passes)
    return base.verdict(draft, path, num_accepted, sampling.draw(sampling.fold(keys, base.DRAW), law))


def typical(epsilon: float = 0.09, delta: float = 0.3) -> Verifier:
    """Lossy, because every token that is likely enough passes: p(x) > min(epsilon, delta exp(-H(p))).

    The token after the longest passing path is drawn from the target's law. At temperature 0 exact. (The
    released code takes the argmax as the first token of a round at any temperature; here all are alike.)

    Args:
        epsilon: the hard threshold, in [0, 1).
        delta: the factor of the entropy-dependent one, in [0, 1); the paper takes sqrt(epsilon).

    Raises:
        ValueError: if one of them is not in [0, 1).

    Example:
        >>> typical().rule.args
        (Array(0.09, dtype=float32), Array(0.3, dtype=float32))

    Reference:
        Cai et al., Medusa, arXiv 2401.10774, section 2.3.1.
    """
    _check(0 <= epsilon < 1, "epsilon", "a number in [0, 1)", epsilon)
    _check(0 <= delta < 1, "delta", "a number in [0, 1)", delta)
    rule = Partial(_typical, jnp.float32(epsilon), jnp.float32(delta))
    return Verifier(rule, base.ALL_DRAWS, False, "typical")


def _top_beta(
    beta: Int[Array, ""],
    tau: Float[Array, ""],
    sampler: Sampler,
    history: PyTree,
    logits: Float[Array, "B N V"],
    draft: Draft,
    depth: int,
    keys: Keys,
) -> Verdict:
    def passes(p: Float[Array, "B V"], p_tokens: Float[Array, "B N"]) -> Bool[Array, "B N"]:
        rank = (p[:, None] > p_tokens[:, :, None]).sum(-1)
        return (rank < beta) & (p_tokens >= p.max(-1, keepdims=True) * jnp.exp(-tau))

    path, num_accepted, law = _longest(sampler, history, logits, draft, depth, passes)
    return base.verdict(draft, path, num_accepted, sampling.argmax(law))


def top_beta(beta: int = 5, tau: float = 3.0) -> Verifier:
    """Lossy, because a token passes if it is one of the ``beta`` likeliest and its log-probability is
    within ``tau`` of the best.

    The token after them is the target's likeliest, as in the paper: no random number is used. The paper's
    setting is temperature 1, which is what the law is judged at; at temperature 0, and with beta = 1, it
    is greedy decoding.

    Args:
        beta: ranks that pass, at least 1 (tokens tied with the last one pass too).
        tau: tolerance, in nats, at least 0.

    Raises:
        ValueError: if beta < 1 or tau < 0.

    Example:
        >>> top_beta(beta=1).name
        'top_beta'

    Reference:
        Xia et al., Speculative Decoding (SpecDec), arXiv 2203.16487 (Spec-Verification).
    """
    _check(beta >= 1, "beta", "a number of at least 1", beta)
    _check(tau >= 0, "tau", "a number of at least 0", tau)
    return Verifier(Partial(_top_beta, jnp.int32(beta), jnp.float32(tau)), base.ALL_DRAWS, False, "top_beta")


def _blockwise(
    top_k: Int[Array, ""],
    distance: Int[Array, ""],
    sampler: Sampler,
    history: PyTree,
    logits: Float[Array, "B N V"],
    draft: Draft,
    depth: int,
    keys: Keys,
) -> Verdict:
    def passes(p: Float[Array, "B V"], p_tokens: Float[Array, "B N"]) -> Bool[Array, "B N"]:
        rank = (p[:, None] > p_tokens[:, :, None]).sum(-1)
        return (rank < top_k) | (jnp.abs(draft.tokens - sampling.argmax(p)[:, None]) <= distance)

    path, num_accepted, law = _longest(sampler, history, logits, draft, depth, passes)
    return base.verdict(draft, path, num_accepted, sampling.argmax(law))


def blockwise(top_k: int = 2, distance: int = 0) -> Verifier:
    """Lossy, because a token passes if it is one of the ``top_k`` likeliest, or if its id lies within
    ``distance`` of the likeliest one's.

    The token after them is the target's likeliest. As for `top_beta`, temperature 1 is the setting to judge
    at (by rank it is `top_beta` without tolerance); at temperature 0, and with 1 and 0, it is greedy
    decoding. A distance means something where ids are intensities, as those of the paper's pixels.

    Args:
        top_k: ranks that pass, at least 1 (tokens tied with the last one pass too).
        distance: at least 0; the paper takes 2 for pixels.

    Raises:
        ValueError: if top_k < 1 or distance < 0.

    Example:
        >>> blockwise(distance=2).lossless
        False

    Reference:
        Stern, Shazeer, Uszkoreit, arXiv 1811.03115, section 5 (top-k and distance-based selection).
    """
    _check(top_k >= 1, "top_k", "a number of at least 1", top_k)
    _check(distance >= 0, "distance", "a number of at least 0", distance)
    rule = Partial(_blockwise, jnp.int32(top_k), jnp.int32(distance))
    return Verifier(rule, base.ALL_DRAWS, False, "blockwise")


def _rollback(
    threshold: Float[Array, ""],
    sampler: Sampler,
    history: PyTree,
    logits: Float[Array, "B N V"],
    draft: Draft,
    depth: int,
    keys: Keys,
) -> Verdict:
    def passes(p: Float[Array, "B V"], p_tokens: Float[Array, "B N"]) -> Bool[Array, "B N"]:
        return p_tokens >= jnp.exp(-threshold)

    path, num_accepted, law = _longest(sampler, history, logits, draft, depth, passes)
    return base.verdict(draft, path, num_accepted, sampling.argmax(law))


def rollback(threshold: float = 2.0) -> Verifier:
    """Lossy, because a drafted token stays as long as the target's cross-entropy on it, -log p(x), is at
    most ``threshold``.

    The first one beyond it is rolled back and replaced by the target's likeliest token. That is the half
    of BiLD that belongs to the target; its other half, handing over when the small model is unsure, is a
    confidence threshold of the drafter. Judge at temperature 1; at temperature 0 it is greedy decoding.

    Args:
        threshold: in nats, at least 0; the paper uses 2 to 5.

    Raises:
        ValueError: if ``threshold`` is negative.

    Example:
        >>> rollback(3.0).lossless
        False

    Reference:
        Kim et al., Big Little Decoder (BiLD), arXiv 2302.07863 (rollback policy).
    """
    _check(threshold >= 0, "threshold", "a number of at least 0", threshold)
    return Verifier(Partial(_rollback, jnp.float32(threshold)), base.ALL_DRAWS, False, "rollback")


def _synthetic(
    rates: Float[Array, " D"],
    sampler: Sampler,
    history: PyTree,
    logits: Float[Array, "B N V"],
    draft: Draft,
    depth: int,
    keys: Keys,
) -> Verdict:
    if rates.shape[0] < depth:
        raise ValueError(f"rates: expected one for each depth 1 ... {depth}, got {rates.shape[0]}")
    width = logits.shape[1]
    accept_keys = sampling.fold(keys, base.ACCEPT)
    level = trees.depths(trees.ancestors(draft.parents))

    def siblings(
        p: Float[Array, "B V"], node: Int[Array, " B"], looking: Bool[Array, " B"]
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
        child = base.next_child(draft, node, node)
        judged = looking & (child < width)
        rate = jnp.where(judged, jnp.take(rates, base.at(level, node), mode="clip"), 0)
        accepted = sampling.accept(sampling.fold(accept_keys, child), rate, jnp.ones_like(rate))
        return jnp.where(judged & accepted, child, width), p

    return descend(sampler, history, logits, draft, depth, keys, siblings)


def synthetic(rates: Float[Array, " D"] | Sequence[float]) -> Verifier:
    """Lossy, because drafted tokens are accepted at prescribed rates, whatever they are.

    For throughput studies without a trained drafter: a round does all the work of a real one (a law a
    level, one draw) and emits 1 + r_1 + r_1 r_2 + ... tokens on average. The first valid child of a node
    stands for all; the last token is drawn from the target's law, so text is still produced.

    Args:
        rates: [D] float32 in [0, 1]; ``rates[d - 1]`` is the probability that a node at depth d is accepted
            when its parent was. From unconditional rates a by position: a_1, a_2 / a_1, a_3 / a_2 ...

    Raises:
        ValueError: if ``rates`` is not a vector of numbers in [0, 1], or (while tracing) shorter than the
            draft is deep.

    Example:
        >>> synthetic([0.8, 0.8, 0.5]).rule.args[0].shape
        (3,)

    Reference:
        The synthetic rejection sampler of vLLM serves the same purpose.
    """
    rates = jnp.asarray(rates, jnp.float32)
    good = rates.ndim == 1 and bool(((rates >= 0) & (rates <= 1)).all())
    _check(good, "rates", "a vector of numbers in [0, 1]", rates)
    return Verifier(Partial(_synthetic, rates), base.ALL_DRAWS, False, "synthetic")


def _check(good: bool, name: str, expected: str, value: object) -> None:
    if not good:
        raise ValueError(f"{name}: expected {expected}, got {value}")
