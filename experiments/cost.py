"""What speculative decoding can gain: the theory of Leviathan et al., and predictions from measured costs.

Words: alpha is the chance that a drafted token is accepted, gamma the number of drafted tokens, c the time of
one drafter step over the time of a one-token forward of the target, tau the tokens that a round emits, and
t(n) the time of the target's forward over n tokens.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec import engine, measure, sampling, trees
from jspec.measure import CostCurve, best_length, measure_curve
from jspec.round import make_context, verify_forward
from jspec.types import Draft, Drafter, Forward, LanguageModel, PyTree, Sampler, Verdict
from training.acceptance import tau

__all__ = [
    "CostCurve",
    "Drafting",
    "best_gamma_on",
    "best_length",
    "estimate_alpha",
    "measure_curve",
    "measure_drafting",
    "predict_from_curve",
    "predict_from_theory",
    "speedup",
    "speedup_on",
    "tau",
]


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Speed-up over plain decoding, if a forward over gamma + 1 tokens takes as long as one over 1.

    tau(alpha, gamma) / (gamma c + 1). Theorem 3.8 of arXiv 2211.17192.

    >>> round(speedup(0.75, 7, 0.02), 1)
    3.2
    """
    _check(alpha, gamma, c)
    return tau(alpha, gamma) / (gamma * c + 1)


def speedup_on(curve: CostCurve, alpha: float, gamma: int, c: float) -> float:
    """`speedup` where a forward over gamma + 1 tokens costs what was measured.

    tau(alpha, gamma) / (gamma c + t(gamma + 1) / t(1)): Theorem 3.8 with its assumption taken out.

    >>> flat, steep = CostCurve((1, 5), (1.0, 1.0)), CostCurve((1, 5), (1.0, 2.0))
    >>> speedup_on(flat, 0.8, 4, 0.1) == speedup(0.8, 4, 0.1), round(speedup_on(steep, 0.8, 4, 0.1), 2)
    (True, 1.4)
    """
    _check(alpha, gamma, c)
    return tau(alpha, gamma) / (gamma * c + curve.relative(gamma + 1))


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

    mean_r tau(alpha, gamma_r) / mean_r (gamma_r c + 1); `speedup` itself for a constant length.

    >>> predict_from_theory(0.8, [5, 5], 0.1) == speedup(0.8, 5, 0.1)
    True
    """
    lengths, counts = np.unique(np.asarray(gammas), return_counts=True)
    tokens = sum(n * tau(alpha, int(gamma)) for gamma, n in zip(lengths, counts, strict=True))
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


class Drafting(NamedTuple):
    """Seconds of a round's drafting, after a round in which nothing or everything was accepted.

    A draft model whose draft was accepted whole is one token behind, and reads it before it drafts.
    """

    after_nothing: float
    after_everything: float

    def mean(self, share: float) -> float:
        """The mean where ``share`` of the rounds follow one in which everything was accepted.

        >>> Drafting(1.0, 2.0).mean(0.25)
        1.25
        """
        return (1 - share) * self.after_nothing + share * self.after_everything


def _made_up(
    params: PyTree, drafter: Drafter, sampler: Sampler, state: engine.State, target: LanguageModel
) -> Forward:
    """A forward of the target over a draft: zeros, and random logits."""
    method = drafter.method

    def forward() -> Forward:
        context = make_context(params, state, target, sampler)
        draft, _ = method.propose(drafter.params, state.drafter_state, context, state.keys)
        mask = trees.ancestors(draft.parents)
        return verify_forward(context, draft, mask, method.taps, (method.width,))

    shapes = jax.eval_shape(forward)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return zeros._replace(logits=jax.random.normal(jax.random.key(0), zeros.logits.shape, zeros.logits.dtype))


def _drafted(
    params: PyTree,
    drafter: Drafter,
    sampler: Sampler,
    state: engine.State,
    accepted: Int[Array, ""],
    index: Int[Array, ""],
    target: LanguageModel,
    forward: Forward,
) -> tuple[PyTree, Draft, Verdict]:
    """Propose and update, with a verdict that accepts so many tokens."""
    method, batch = drafter.method, state.lengths.shape[0]
    context = make_context(params, state, target, sampler)
    keys = sampling.fold(state.keys, index)
    draft, inner = method.propose(drafter.params, state.drafter_state, context, keys)
    depth = jnp.arange(method.depth + 1, dtype=jnp.int32)[None]
    tokens = jnp.pad(draft.tokens[:, 1 : method.depth + 1], ((0, 0), (0, 1)))
    emitted = jnp.full(batch, accepted + 1, jnp.int32)
    verdict = Verdict(
        path=jnp.broadcast_to(jnp.where(depth <= accepted, depth, 0), tokens.shape),
        num_accepted=emitted - 1,
        tokens=jnp.where(depth < accepted, tokens, 0),
        num_emitted=emitted,
    )
    return method.update(drafter.params, inner, context, draft, verdict, forward), draft, verdict


@functools.partial(jax.jit, static_argnames=("target",))
def _after_a_round(
    params: PyTree,
    drafter: Drafter,
    sampler: Sampler,
    state: engine.State,
    accepted: Int[Array, ""],
    *,
    target: LanguageModel,
) -> engine.State:
    """The state after a round of drafting in which so many tokens were accepted."""
    forward = _made_up(params, drafter, sampler, state, target)
    inner, _, verdict = _drafted(params, drafter, sampler, state, accepted, jnp.int32(0), target, forward)
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    return state._replace(
        tokens=put(state.tokens, verdict.tokens, state.lengths),
        lengths=state.lengths + verdict.num_emitted,
        cache=state.cache._replace(lengths=state.cache.lengths + verdict.num_emitted),
        drafter_state=inner,
    )


@functools.partial(jax.jit, static_argnames=("target",))
def _rounds_of_drafting(
    params: PyTree,
    drafter: Drafter,
    sampler: Sampler,
    state: engine.State,
    accepted: Int[Array, ""],
    count: Int[Array, ""],
    *,
    target: LanguageModel,
) -> PyTree:
    """``count`` times propose and update, in a loop on the device, the drafter's state carried as there.

    The context is that of ``state`` throughout, and so are the lengths of the drafter's caches, whose slots
    beyond them are scratch: otherwise a cache would soon be full.
    """
    forward = _made_up(params, drafter, sampler, state, target)

    def rewound(now: PyTree) -> PyTree:
        def keep(path: tuple[Any, ...], old: Array, new: Array) -> Array:
            is_lengths = any(getattr(key, "name", "") == "lengths" for key in path[-1:])
            return old if is_lengths else new

        return jax.tree_util.tree_map_with_path(keep, state.drafter_state, now)

    def body(index: Array, carry: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
        inner, tokens = carry
        now = state._replace(tokens=tokens, drafter_state=inner)
        inner, draft, _ = _drafted(params, drafter, sampler, now, accepted, index + 1, target, forward)
        # Never true, which the compiler cannot know: the next round has to wait for this one.
        return rewound(inner), jnp.where(draft.tokens.max() < -1, 0, tokens)

    return jax.lax.fori_loop(0, count, body, (state.drafter_state, state.tokens))


def measure_drafting(
    params: PyTree,
    state: engine.State,
    *,
    target: LanguageModel,
    drafter: Drafter,
    sampler: Sampler,
    repeats: int = 7,
) -> Drafting:
    """Time a round's drafting: propose and update, in ``state``, without the target's forward.

    What the target would have said is made up (random logits, and a verdict that takes nothing or, of a
    tree, nodes that need not be a path): what it costs to learn from a round does not depend on the values.
    Medians of ``repeats`` loops on the device, each of as many rounds as last `measure.LEAST_SECONDS`.

    Args:
      state: with slots and budget for two whole drafts.
    """

    depth = drafter.method.depth
    after = {
        accepted: _after_a_round(params, drafter, sampler, state, jnp.int32(accepted), target=target)
        for accepted in (0, depth)
    }

    def seconds(accepted: int, count: int) -> float:
        numbers = jnp.int32(accepted), jnp.int32(count)
        begin = time.perf_counter()
        jax.block_until_ready(
            _rounds_of_drafting(params, drafter, sampler, after[accepted], *numbers, target=target)
        )
        return (time.perf_counter() - begin) / count

    seconds(0, 1)  # compiles
    count = max(1, math.ceil(measure.LEAST_SECONDS / seconds(0, 8)))
    timings = [[seconds(accepted, count) for accepted in after] for _ in range(repeats)]
    return Drafting(*np.median(timings, axis=0).tolist())


def _check(alpha: float, gamma: int, c: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected a probability, got {alpha}")
    if gamma < 0:
        raise ValueError(f"gamma: expected a number >= 0, got {gamma}")
    if c < 0:
        raise ValueError(f"c: expected a number >= 0, got {c}")
