"""What speculative decoding can gain: the theory of Leviathan et al., and predictions from measured costs.

Words: alpha is the chance that a drafted token is accepted, gamma the number of drafted tokens, c the time of
one drafter step over the time of a one-token forward of the target, tau the tokens a round emits, and
t(n) the time of the target's forward over n tokens.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec import engine, sampling, trees
from jspec.measure import CostCurve, best_length, measure_curve
from jspec.round import make_context, verify_forward
from jspec.types import Drafter, LanguageModel, PyTree, Sampler, Verdict

__all__ = [
    "CostCurve",
    "best_gamma",
    "best_gamma_on",
    "best_length",
    "estimate_alpha",
    "expected_tokens",
    "measure_curve",
    "measure_drafting",
    "operations",
    "predict_from_curve",
    "predict_from_theory",
    "speedup",
    "speedup_on",
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


def speedup_on(curve: CostCurve, alpha: float, gamma: int, c: float) -> float:
    """`speedup` where a forward over gamma + 1 tokens costs what was measured.

    expected_tokens / (gamma c + t(gamma + 1) / t(1)): Theorem 3.8 with its assumption taken out.

    >>> flat, steep = CostCurve((1, 5), (1.0, 1.0)), CostCurve((1, 5), (1.0, 2.0))
    >>> speedup_on(flat, 0.8, 4, 0.1) == speedup(0.8, 4, 0.1), round(speedup_on(steep, 0.8, 4, 0.1), 2)
    (True, 1.4)
    """
    return expected_tokens(alpha, gamma) / (gamma * c + curve.relative(gamma + 1))


def best_gamma_on(curve: CostCurve, alpha: float, c: float, most: int) -> int:
    """The draft length in 1..most with the greatest `speedup_on`, the shortest of equals.

    >>> best_gamma_on(CostCurve((1, 2, 8), (1.0, 1.2, 2.0)), 0.7, 0.03, 7)
    3
    """
    return max(range(1, most + 1), key=lambda gamma: (speedup_on(curve, alpha, gamma, c), -gamma))


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


@functools.partial(jax.jit, static_argnames=("target",))
def _rounds_of_drafting(
    params: PyTree,
    drafter: Drafter,
    sampler: Sampler,
    state: engine.State,
    count: Int[Array, ""],
    *,
    target: LanguageModel,
) -> PyTree:
    """``count`` times propose and update, in a loop on the device, the drafter's state carried as there."""
    method = drafter.method
    context = make_context(params, state, target, sampler)
    draft, _ = method.propose(drafter.params, state.drafter_state, context, state.keys)
    mask = trees.ancestors(draft.parents)
    shapes = jax.eval_shape(lambda: verify_forward(context, draft, mask, method.taps, (method.width,)))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    noise = jax.random.normal(jax.random.key(0), shapes.logits.shape, shapes.logits.dtype)
    forward = zeros._replace(logits=noise)
    batch = state.lengths.shape[0]
    nothing = jnp.zeros((batch, method.depth + 1), jnp.int32)
    verdict = Verdict(nothing, nothing[:, 0], nothing, nothing[:, 0] + 1)

    def body(index: Array, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        inner, tokens = carry
        mine = context._replace(tokens=tokens)
        draft, inner = method.propose(drafter.params, inner, mine, sampling.fold(state.keys, index))
        inner = method.update(drafter.params, inner, mine, draft, verdict, forward)
        # Never true, which the compiler cannot know: the next round has to wait for this one.
        return inner, jnp.where(draft.tokens.max() < -1, 0, tokens)

    return jax.lax.fori_loop(0, count, body, (state.drafter_state, state.tokens))


def measure_drafting(
    params: PyTree,
    state: engine.State,
    *,
    target: LanguageModel,
    drafter: Drafter,
    sampler: Sampler,
    repeats: int = 7,
    least_seconds: float = 0.02,
) -> float:
    """Seconds of a round's drafting: propose and update, in ``state``, without the target's forward.

    The forward that `update` reads is made up (random logits, one token emitted): what it costs to learn
    from a round does not depend on the values. Median of ``repeats`` loops on the device, each of as many
    rounds as last ``least_seconds``.
    """

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(
            _rounds_of_drafting(params, drafter, sampler, state, jnp.int32(count), target=target)
        )
        return (time.perf_counter() - begin) / count

    seconds(1)  # compiles
    count = max(1, math.ceil(least_seconds / seconds(8)))
    return float(np.median([seconds(count) for _ in range(repeats)]))


def _check(alpha: float, gamma: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected a probability, got {alpha}")
    if gamma < 0:
        raise ValueError(f"gamma: expected a number >= 0, got {gamma}")
