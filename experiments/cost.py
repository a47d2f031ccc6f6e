"""What speculative decoding can gain: the theory of Leviathan et al., and predictions from measured costs.

Words: alpha is the chance that a drafted token is accepted, gamma the number of drafted tokens, c the time of
one drafter step over the time of a one-token forward of the target, tau the tokens a round emits, and
t(n) the time of the target's forward over n tokens.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec import engine, trees
from jspec.measure import CostCurve, best_length, measure_curve
from jspec.round import make_context, verify_forward
from jspec.types import Context, Draft, Drafter, Forward, LanguageModel, PyTree, Sampler, Verdict

__all__ = [
    "CostCurve",
    "best_gamma",
    "best_length",
    "estimate_alpha",
    "expected_tokens",
    "measure_curve",
    "measure_drafting",
    "operations",
    "predict_from_curve",
    "predict_from_theory",
    "speedup",
]


def expected_tokens(alpha: float, gamma: float) -> float:
    """Tokens of a round when every drafted token is accepted with probability alpha, independently.

    (1 - alpha^(gamma + 1)) / (1 - alpha), and gamma + 1 at alpha = 1.
    Leviathan, Kalman, Matias 2023 (arXiv 2211.17192), equation 1.

    >>> round(expected_tokens(0.8, 5), 2)
    3.69
    """
    _check(alpha, gamma)
    if alpha == 1:
        return gamma + 1.0
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


def speedup(alpha: float, gamma: float, c: float) -> float:
    """Speed-up over plain decoding, if a forward over gamma + 1 tokens takes as long as one over 1.

    expected_tokens / (gamma c + 1). Theorem 3.8 of arXiv 2211.17192.

    >>> round(speedup(0.75, 7, 0.02), 1)
    3.2
    """
    if c < 0:
        raise ValueError(f"c: expected a number >= 0, got {c}")
    return expected_tokens(alpha, gamma) / (gamma * c + 1)


def operations(alpha: float, gamma: float, c_hat: float) -> float:
    """Arithmetic operations per token over those of plain decoding, the drafter's being ``c_hat`` of these.

    (gamma c_hat + gamma + 1) / expected_tokens. Theorem 3.11 of arXiv 2211.17192.

    >>> round(operations(0.9, 10, 0.0), 2)
    1.6
    """
    if c_hat < 0:
        raise ValueError(f"c_hat: expected a number >= 0, got {c_hat}")
    return (gamma * c_hat + gamma + 1) / expected_tokens(alpha, gamma)


def best_gamma(alpha: float, c: float, most: int = 64) -> int:
    """The draft length in 0..most with the greatest `speedup`, the shortest of equals; 0 = do not draft.

    >>> best_gamma(0.71, 0.11), best_gamma(0.05, 0.11)
    (4, 0)
    """
    return max(range(most + 1), key=lambda gamma: (speedup(alpha, gamma, c), -gamma))


def estimate_alpha(accepted: Sequence[int] | np.ndarray, judged: Sequence[int] | np.ndarray) -> float:
    """alpha from rounds: accepted depths over judged depths, the maximum-likelihood estimate.

    Of the drafted depths of a round the accepted ones were judged, and the refused one where there is one;
    those behind it never were (`jspec.measure.Rounds.judged`). In a tree a depth counts as accepted when any
    of its nodes is. 0 where nothing was judged.

    >>> estimate_alpha([2, 0, 3], [3, 1, 3])  # of three tokens each: 5 accepted, 2 refused
    0.7142857142857143
    """
    if (np.asarray(accepted) > np.asarray(judged)).any():
        raise ValueError("accepted: expected no more than were judged")
    total = np.sum(judged)
    return float(np.sum(accepted) / total) if total else 0.0


def predict_from_theory(alpha: float, gammas: Sequence[int], c: float) -> float:
    """Theorem 3.8 for a draft whose length changes from round to round.

    mean_r expected_tokens(alpha, gamma_r) / mean_r (gamma_r c + 1); `speedup` itself for a constant length.

    >>> predict_from_theory(0.8, [5, 5], 0.1) == speedup(0.8, 5, 0.1)
    True
    """
    lengths, counts = np.unique(np.asarray(gammas), return_counts=True)
    tokens = sum(n * expected_tokens(alpha, float(gamma)) for gamma, n in zip(lengths, counts, strict=True))
    return float(tokens / (counts * (lengths * c + 1)).sum())


def predict_from_curve(tau: float, widths: Sequence[int], draft_cost: float, curve: CostCurve) -> float:
    """Speed-up from the measured tau and what the rounds cost on this machine.

    tau / (mean_r t(widths_r) / t(1) + draft_cost), where ``widths[r]`` is how many tokens the target's
    forward of round r read, and ``draft_cost`` the drafter's time a round over t(1). Independence is not
    assumed.

    >>> round(predict_from_curve(1.8, [1, 4], 0.05, CostCurve((1, 4), (10.0, 15.0))), 3)
    1.385
    """
    return float(tau / (np.mean([curve.relative(width) for width in widths]) + draft_cost))


def measure_drafting(
    params: PyTree,
    state: engine.State,
    *,
    target: LanguageModel,
    drafter: Drafter,
    sampler: Sampler,
    repeats: int = 9,
) -> float:
    """Seconds of a round's drafting: propose and update, in ``state``, without the target's forward.

    The forward that `update` reads is made up (random logits, one token emitted): what it costs to learn
    from a round does not depend on the values. Median of ``repeats`` calls, the drafter's state donated as in
    the loop; a call from the host is dearer than a step in the loop by some tenths of a millisecond.
    """
    method = drafter.method
    everything = state._replace(drafter_state=())

    def context_of(params: PyTree, state: engine.State, sampler: Sampler) -> Context:
        return make_context(params, state, target, sampler)

    @jax.jit
    def imagine(params: PyTree, drafter: Drafter, sampler: Sampler, state: engine.State) -> Forward:
        context = context_of(params, state, sampler)
        draft, _ = method.propose(drafter.params, state.drafter_state, context, state.keys)
        mask = trees.ancestors(draft.parents)
        shapes = jax.eval_shape(lambda: verify_forward(context, draft, mask, method.taps, (method.width,)))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        noise = jax.random.normal(jax.random.key(0), shapes.logits.shape, shapes.logits.dtype)
        return zeros._replace(logits=noise)

    @functools.partial(jax.jit, donate_argnames=("inner",))
    def step(
        params: PyTree,
        drafter: Drafter,
        sampler: Sampler,
        state: engine.State,
        inner: PyTree,
        forward: Forward,
    ) -> tuple[Draft, PyTree]:
        context = context_of(params, state, sampler)
        draft, inner = method.propose(drafter.params, inner, context, state.keys)
        batch = state.lengths.shape[0]
        zeros = jnp.zeros((batch, method.depth + 1), jnp.int32)
        verdict = Verdict(zeros, zeros[:, 0], zeros, zeros[:, 0] + 1)
        return draft, method.update(drafter.params, inner, context, draft, verdict, forward)

    forward = imagine(params, drafter, sampler, state)
    seconds = []
    for _ in range(repeats + 1):
        inner = jax.block_until_ready(jax.tree.map(jnp.copy, state.drafter_state))
        begin = time.perf_counter()
        jax.block_until_ready(step(params, drafter, sampler, everything, inner, forward))
        seconds.append(time.perf_counter() - begin)
    return float(np.median(seconds[1:]))  # the first one compiles


def _check(alpha: float, gamma: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected a probability, got {alpha}")
    if gamma < 0:
        raise ValueError(f"gamma: expected a number >= 0, got {gamma}")
