"""Measuring on this machine: what a forward over n tokens costs, and how fast a drafter decodes a prompt."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec import engine, sampling
from jspec.types import (
    Block,
    Context,
    Draft,
    Drafter,
    Info,
    Keys,
    LanguageModel,
    Prompt,
    PyTree,
    Sampler,
    Verifier,
)

REPEATS = 7  # of a cost curve

# --- the cost curve ---------------------------------------------------------------------------------


class CostCurve(NamedTuple):
    """t(n): seconds of the target's forward over n tokens, for the ascending ``widths`` n, from 1 on."""

    widths: tuple[int, ...]
    seconds: tuple[float, ...]

    def relative(self, width: float) -> float:
        """t(width) / t(1); linear between the widths, and beyond the last with the slope before it.

        >>> curve = CostCurve((1, 2, 4), (10.0, 13.0, 15.0))
        >>> curve.relative(3), curve.relative(6)
        (1.4, 1.7)
        """
        x, y = np.asarray(self.widths, float), np.asarray(self.seconds) / self.seconds[0]
        if width <= x[-1] or len(x) == 1:
            return float(np.interp(width, x, y))
        return float(y[-1] + (width - x[-1]) * (y[-1] - y[-2]) / (x[-1] - x[-2]))


@functools.partial(jax.jit, static_argnames=("target",))
def _forward(
    params: PyTree, cache: PyTree, tokens: Int[Array, "B N"], *, target: LanguageModel
) -> Int[Array, "B N"]:
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    out = target.extend(params, cache, Block(tokens, positions))
    return sampling.argmax(target.head(params, out.hidden))


def measure_curve(
    target: LanguageModel,
    params: PyTree,
    widths: Sequence[int],
    *,
    fill: int = 128,
    capacity: int = 256,
    repeats: int = REPEATS,
    least_seconds: float = 0.01,
    advance: Callable[[], object] = lambda: None,
) -> CostCurve:
    """Time extend and head over n tokens of one row, for each n in ``widths``, in turn.

    Args:
      widths: n; 1 is added where it is missing.
      fill: cached tokens the forward looks back on, at most ``capacity`` less the widest block.
      repeats: rounds over all widths; a cost is the median over them.
      least_seconds: a timing is the mean of as many calls as last that long, so that what the host does
        between calls is hidden where calls are short.
      advance: called after each width of each round, and after each compilation: for a progress bar.
    """
    ns = sorted({1, *widths})
    if ns[0] < 1 or fill + ns[-1] > capacity:
        raise ValueError(
            f"widths: expected numbers in 1 .. {capacity - fill} (capacity - fill), got {widths}"
        )
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    cache = jax.jit(target.start, static_argnums=2)(params, prompt, capacity)
    cache = cache._replace(lengths=jnp.full_like(cache.lengths, fill))

    def seconds(n: int, calls: int) -> float:
        tokens = jnp.zeros((1, n), jnp.int32)
        begin = time.perf_counter()
        for _ in range(calls):
            out = _forward(params, cache, tokens, target=target)
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / calls

    for n in ns:
        seconds(n, 1)
        advance()
    calls = max(1, math.ceil(least_seconds / seconds(1, 1)))
    timings = np.empty((repeats, len(ns)))
    for repeat in range(repeats):
        for column, n in enumerate(ns):
            timings[repeat, column] = seconds(n, calls)
            advance()
    # The median of ratios to the same repeat's t(1): a machine that is busy for a while slows both.
    base = float(np.median(timings[:, 0]))
    ratios = np.median(timings / timings[:, :1], axis=0)
    return CostCurve(tuple(ns), tuple(float(base * ratio) for ratio in ratios))


def best_length(
    survival: Sequence[float], curve: CostCurve, *, draft_cost: float = 0.0, drafting: float = 1.0
) -> tuple[int, float]:
    """The draft length with the greatest expected speed-up, and that speed-up; 0 and 1 where none pays.

    A draft of n tokens emits 1 + sum(survival[:n]) a round and costs t(n + 1) / t(1) in the share
    ``drafting`` of the rounds, t(1) / t(1) in the others, and n * ``draft_cost`` for drafting.

    Args:
      survival: ``survival[i]`` is the share of rounds in which drafted tokens 0 .. i were all accepted.
      draft_cost: time of a drafter step over t(1).
      drafting: share of rounds in which anything is drafted.

    >>> length, speedup = best_length([0.7, 0.5, 0.1], CostCurve((1, 2, 4), (1.0, 1.1, 1.4)))
    >>> length, round(speedup, 2)
    (2, 1.76)
    """
    best = (0, 1.0)
    for n in range(1, len(survival) + 1):
        cost = drafting * curve.relative(n + 1) + (1 - drafting) + n * draft_cost
        gain = (1 + sum(survival[:n])) / cost
        if gain > best[1]:
            best = (n, gain)
    return best


# --- one prompt, timed ------------------------------------------------------------------------------


class Rounds(NamedTuple):
    """The rounds of one prompt, one entry each."""

    emitted: np.ndarray
    accepted: np.ndarray
    proposed: np.ndarray  # depth of the draft
    nodes: np.ndarray  # tokens of the draft, root included: what the block's width must hold

    @property
    def judged(self) -> np.ndarray:
        """Depths that the verifier decided on: the accepted ones, and the refused one where there is one.
        A round that an end token cut short refused nothing."""
        return self.accepted + ((self.emitted > self.accepted) & (self.accepted < self.proposed))

    @staticmethod
    def join(parts: Sequence[Rounds]) -> Rounds:
        """All rounds of several prompts."""
        return Rounds(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def survival(self, depth: int) -> np.ndarray:
        """[depth]: share of the rounds in which the first i + 1 drafted tokens were accepted."""
        return (self.accepted[:, None] > np.arange(depth)[None]).mean(0)


class Trial(NamedTuple):
    """One prompt decoded once."""

    tokens: np.ndarray  # new ones
    rounds: Rounds
    prompt_seconds: float  # until the first round can start
    decode_seconds: float  # all rounds


def nodes(info: Info) -> Int[Array, "B R"]:
    """Record: how many tokens of the block are up to the last valid node."""
    count = jnp.max(
        jnp.where(info.draft.valid, jnp.arange(1, info.draft.tokens.shape[1] + 1, dtype=jnp.int32)[None], 1),
        axis=1,
    )
    return jnp.broadcast_to(count[:, None], info.verdict.tokens.shape)


def decode(
    params: PyTree,
    tokens: Sequence[int],
    key: Keys,
    *,
    target: LanguageModel,
    drafter: Drafter,
    verify: Verifier,
    sampler: Sampler,
    stops: engine.Stops,
    max_new_tokens: int,
    capacity: int | None = None,
    widths: tuple[int, ...] | None = None,
) -> Trial:
    """Decode one prompt and time it, the reading of the prompt and the rounds apart.

    The first call with a drafter compiles; time a second one. ``key`` [1] is the row's.
    """
    prompt = Prompt(jnp.asarray(tokens, jnp.int32)[None], jnp.asarray([len(tokens)], jnp.int32))
    shared: dict[str, Any] = {"target": target, "drafter": drafter, "sampler": sampler}
    record = engine.records(statistics=engine.statistics, nodes=nodes)
    begin = time.perf_counter()
    state = engine.start(
        params, prompt, key, **shared, max_new_tokens=max_new_tokens, capacity=capacity, record=record
    )
    jax.block_until_ready(state)
    read = time.perf_counter()
    state = engine.run(params, state, **shared, verify=verify, stops=stops, widths=widths, record=record)
    jax.block_until_ready(state)
    end = time.perf_counter()

    new = slice(int(state.starts[0]), int(state.lengths[0]))
    kept = jax.tree.map(lambda leaf: np.asarray(leaf)[0, new], state.record)
    opens = np.flatnonzero(kept["statistics"].offset == 0)
    rounds = Rounds(
        emitted=np.diff(np.append(opens, new.stop - new.start)),
        accepted=np.add.reduceat(kept["statistics"].accepted.astype(int), opens) if len(opens) else opens,
        proposed=kept["statistics"].proposed[opens],
        nodes=kept["nodes"][opens],
    )
    return Trial(np.asarray(state.tokens)[0, new], rounds, read - begin, end - read)


# --- one prompt, replayed -----------------------------------------------------------------------------


class Replay(NamedTuple):
    """What a chain drafter would have drafted at each new token of a known greedy text."""

    # Entry i is about the draft that begins at new token i.
    accepted: np.ndarray  # how many of its tokens are right, up to a wrong one
    proposed: np.ndarray  # how many there are

    def cost(self, length: int, curve: CostCurve) -> float:
        """Time over t(1) to emit the text in rounds whose drafts are cut to ``length`` tokens."""
        place, cost, end = 0, 0.0, len(self.accepted)
        while place < end:
            drafted = min(length, self.proposed[place], end - place - 1)
            cost += curve.relative(length + 1) if drafted else 1.0
            place += min(self.accepted[place], drafted) + 1
        return cost


def replay(
    drafter: Drafter, prompt: Sequence[int], new: Sequence[int] | np.ndarray, *, capacity: int, rows: int
) -> Replay:
    """Let a drafter without state draft at every place of the text ``prompt + new``, in one call.

    No forward of the target is needed, so that many settings can be compared in a moment. ``capacity``
    (slots, at least those of the text) and ``rows`` (at least the new tokens) fix the compiled shape.
    """
    end = len(prompt) + len(new)
    text = np.zeros(capacity, np.int32)
    text[:end] = [*prompt, *new]
    # Row i sees the text before new token i; the rows beyond the last are of no use.
    lengths = len(prompt) + np.minimum(np.arange(rows), len(new) - 1)
    draft = _propose(drafter, jnp.asarray(np.tile(text, (rows, 1))), jnp.asarray(lengths, jnp.int32))
    tokens, valid = (np.asarray(leaf)[: len(new), 1:] for leaf in (draft.tokens, draft.valid))
    places = lengths[: len(new), None] + np.arange(tokens.shape[1])[None]
    right = valid & (places < end) & (tokens == text[np.minimum(places, end - 1)])
    return Replay(np.cumprod(right, axis=1).sum(1), valid.sum(1))


@jax.jit
def _propose(drafter: Drafter, tokens: Int[Array, "B S"], lengths: Int[Array, " B"]) -> Draft:
    budget = jnp.full_like(lengths, tokens.shape[1])
    context = Context(tokens, lengths, budget, (), *[None] * 4)  # type: ignore[arg-type]
    return drafter.method.propose(drafter.params, (), context, None)[0]
