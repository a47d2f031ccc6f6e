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
from jspec.batch import Request, pad, source_width
from jspec.checks import at_least
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
LEAST_SECONDS = 0.05  # of a timing: in a loop of 10 ms its start and the wait for it are felt on a slow host

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
def _forwards(
    params: PyTree,
    cache: PyTree,
    tokens: Int[Array, "B N"],
    count: Int[Array, ""],
    *,
    target: LanguageModel,
) -> Int[Array, "B N"]:
    """``count`` forwards in a loop on the device, as the engine runs them; each reads what the one before
    chose, so that none can be left out."""
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def body(_: Array, tokens: Int[Array, "B N"]) -> Int[Array, "B N"]:
        out = target.extend(params, cache, Block(tokens, positions))
        return sampling.argmax(target.head(params, out.hidden))

    return jax.lax.fori_loop(0, count, body, tokens)


def measure_curve(
    target: LanguageModel,
    params: PyTree,
    widths: Sequence[int],
    *,
    fill: int = 128,
    capacity: int = 256,
    source: int = 0,
    batch: int = 1,
    repeats: int = REPEATS,
    advance: Callable[[], object] = lambda: None,
) -> CostCurve:
    """Time extend and head over n tokens of each row, for each n in ``widths``, in turn. A timing is the mean
    of as many forwards, in one loop on the device, as last `LEAST_SECONDS` at n = 1.

    Args:
      widths: n; 1 is added where it is missing.
      fill: cached tokens the forward looks back on, at most ``capacity`` less the widest block.
      source: tokens that an encoder-decoder's encoder has read; 0 for a decoder-only model.
      batch: rows.
      repeats: rounds over all widths; a cost is the median over them.
      advance: called after each width of each round, and after each compilation: for a progress bar.
    """
    ns = sorted({1, *widths})
    at_least(0, fill=fill)
    if ns[0] < 1 or fill + ns[-1] > capacity:
        raise ValueError(
            f"widths: expected numbers in 1 .. {capacity - fill} (capacity - fill), got {widths}"
        )
    prompt = Prompt(jnp.zeros((batch, 1), jnp.int32), jnp.ones(batch, jnp.int32))
    if source:
        prompt = prompt._replace(
            source=jnp.zeros((batch, source), jnp.int32), source_lengths=jnp.full(batch, source, jnp.int32)
        )
    cache = jax.jit(target.start, static_argnums=2)(params, prompt, capacity)
    cache = cache._replace(lengths=jnp.full_like(cache.lengths, fill))

    def seconds(n: int, calls: int) -> float:
        tokens, count = jnp.zeros((batch, n), jnp.int32), jnp.int32(calls)
        begin = time.perf_counter()
        jax.block_until_ready(_forwards(params, cache, tokens, count, target=target))
        return (time.perf_counter() - begin) / calls

    for n in ns:
        seconds(n, 1)
        advance()
    calls = max(1, math.ceil(LEAST_SECONDS / seconds(1, 1)))
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


# --- prompts, timed ----------------------------------------------------------------------------------


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

    @property
    def are_chains(self) -> bool:
        """Whether no draft had a branch: a chain of n tokens has n + 1 nodes, a tree of that depth more."""
        return bool((self.nodes == self.proposed + 1).all())

    @staticmethod
    def join(parts: Sequence[Rounds]) -> Rounds:
        """All rounds of several prompts."""
        return Rounds(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def survival(self, depth: int) -> np.ndarray:
        """[depth]: share of the rounds in which the first i + 1 drafted tokens were accepted."""
        return (self.accepted[:, None] > np.arange(depth)[None]).mean(0)


class Trial(NamedTuple):
    """One prompt decoded once. The seconds are those of all prompts that were decoded together with it."""

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


def decode(params: PyTree, request: Request, key: Keys, **settings: Any) -> Trial:
    """Decode one prompt and time it; ``key`` [1], and settings as for `decode_together`."""
    return decode_together(params, [request], key, **settings)[0]


def decode_together(
    params: PyTree,
    requests: Sequence[Request],
    keys: Keys,
    *,
    target: LanguageModel,
    drafter: Drafter,
    verify: Verifier,
    sampler: Sampler,
    stops: engine.Stops,
    max_new_tokens: int | Sequence[int],
    capacity: int | None = None,
    source: int | None = None,
    widths: tuple[int, ...] | None = None,
) -> list[Trial]:
    """Decode prompts as one batch and time it, the reading of the prompts and the rounds apart.

    The first call with a drafter compiles; time a second one.

    Args:
      keys: [B], one a row.
      max_new_tokens: one number, or one a row.
      source: width of the encoder's input; None: `jspec.batch.source_width` of these requests.
    """
    if source is None:
        source = source_width(requests, getattr(target.config, "source_length", None))
    prompt = jax.tree.map(jnp.asarray, pad(requests, source))
    shared: dict[str, Any] = {"target": target, "drafter": drafter, "sampler": sampler}
    record = engine.records(statistics=engine.statistics, nodes=nodes)
    begin = time.perf_counter()
    state = engine.start(
        params,
        prompt,
        keys,
        **shared,
        max_new_tokens=np.asarray(max_new_tokens, np.int32),  # pyright: ignore[reportArgumentType]
        capacity=capacity,
        record=record,
    )
    jax.block_until_ready(state)
    read = time.perf_counter()
    state = engine.run(params, state, **shared, verify=verify, stops=stops, widths=widths, record=record)
    jax.block_until_ready(state)
    end = time.perf_counter()

    tokens, starts, lengths, kept = jax.device_get((state.tokens, state.starts, state.lengths, state.record))
    trials = []
    for row in range(len(requests)):
        new = slice(int(starts[row]), int(lengths[row]))
        mine = jax.tree.map(lambda leaf, row=row, new=new: leaf[row, new], kept)
        trials.append(Trial(tokens[row, new], _rounds(mine), read - begin, end - read))
    return trials


def _rounds(kept: dict[str, Any]) -> Rounds:
    """The rounds behind the records of each token."""
    opens = np.flatnonzero(kept["statistics"].offset == 0)
    accepted = kept["statistics"].accepted.astype(int)
    return Rounds(
        emitted=np.diff(np.append(opens, len(accepted))),
        accepted=np.add.reduceat(accepted, opens) if len(opens) else opens,
        proposed=kept["statistics"].proposed[opens],
        nodes=kept["nodes"][opens],
    )


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
    drafter: Drafter, request: Request, new: Sequence[int] | np.ndarray, *, capacity: int, rows: int
) -> Replay:
    """Let a drafter that learns nothing draft at every place of ``request.tokens + new``, in one call.

    No forward of the target is needed, so that many settings can be compared in a moment. ``capacity``
    (slots, at least those of the text) and ``rows`` (at least the new tokens) fix the compiled shape.
    """
    prompt = request.tokens
    end = len(prompt) + len(new)
    text = np.zeros(capacity, np.int32)
    text[:end] = [*prompt, *new]
    # Row i sees the text before new token i; the rows beyond the last are of no use.
    lengths = len(prompt) + np.minimum(np.arange(rows), len(new) - 1)
    tokens = jnp.asarray(np.tile(text, (rows, 1)))
    source = jax.tree.map(
        lambda leaf: jnp.repeat(jnp.asarray(leaf), rows, axis=0), pad([request], source_width([request]))[2:]
    )
    draft = _propose(drafter, Prompt(tokens, jnp.asarray(lengths, jnp.int32), *source))
    tokens, valid = (np.asarray(leaf)[: len(new), 1:] for leaf in (draft.tokens, draft.valid))
    places = lengths[: len(new), None] + np.arange(tokens.shape[1])[None]
    right = valid & (places < end) & (tokens == text[np.minimum(places, end - 1)])
    return Replay(np.cumprod(right, axis=1).sum(1), valid.sum(1))


@jax.jit
def _propose(drafter: Drafter, prompt: Prompt) -> Draft:
    tokens, lengths = prompt.tokens, prompt.lengths
    budget = jnp.full_like(lengths, tokens.shape[1])
    context = Context(tokens, lengths, budget, (), *[None] * 4)  # type: ignore[arg-type]
    state = drafter.method.init(drafter.params, prompt, tokens.shape[1], None)
    return drafter.method.propose(drafter.params, state, context, None)[0]
