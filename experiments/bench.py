"""The bench: settings of drafter and verifier on the same prompts, in turn with plain decoding.

Every table measures with it. `Bench.trials` decodes, `Bench.curve` and `Bench.draft_seconds` measure costs in
loops of their own; `experiments.figures` says what they show, and what the costs let one expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import jspec
from experiments import alpha, cost, environment
from experiments.report import Flip
from jspec import drafters, engine, measure, verify
from jspec.batch import Request, pad
from jspec.measure import CostCurve, Trial
from jspec.options import Options, SamplingOptions, resolve
from jspec.types import Drafter, Info, Verifier

DRAFTING_ROUND = 4  # drafting is timed in the state after so many rounds

Advance = Callable[[], None]
Trials = list[list[list[Trial]]]  # [repeat][setting][prompt]


class Setting(NamedTuple):
    """A drafter with its rule and block widths: a row of a table."""

    name: str
    drafter: Drafter
    verify: Verifier
    widths: tuple[int, ...]
    note: str = ""

    @property
    def drafts(self) -> bool:
        """False for plain decoding."""
        return self.drafter.method.depth > 0

    def executed(self, nodes: np.ndarray) -> np.ndarray:
        """Tokens that the target's forward of each round read: the block's width and the side rows."""
        widths = np.asarray(self.widths)
        return widths[np.searchsorted(widths, nodes)] + self.drafter.method.side


class Case(NamedTuple):
    """A prompt as tokens."""

    name: str
    category: str
    request: Request


PLAIN = Setting("plain", drafters.plain(), verify.target_only(), (1,))


class Bench:
    """A model, prompts, and how they are decoded.

    Args:
      max_new_tokens: of every prompt.
      seed: prompt i of n gets the stream of ``seed + i``, whatever rows are beside it; above temperature 0
        in repeat r that of ``seed + r n + i``, so that the repeats' spread holds the chance of sampling.
      repeats: times that every prompt is decoded.
      batch_size: prompts decoded together, in their order; the last batch is filled up with rows that are
        finished from the start.
      slots: the capacity is a multiple; fewer slots are cheaper to attend to, more of them fewer programs.
      source: the least width of an encoder's input. All sources have one width, so that no drafter's loop is
        compiled twice.
    """

    def __init__(
        self,
        model: jspec.Model,
        cases: Sequence[Case],
        *,
        max_new_tokens: int,
        seed: int = 0,
        repeats: int = 3,
        batch_size: int = 1,
        slots: int = engine.CAPACITY_STEP,
        source: int = 0,
    ) -> None:
        self.model, self.cases, self.max_new_tokens = model, list(cases), max_new_tokens
        self.seed, self.repeats, self.batch_size, self.slots = seed, repeats, batch_size, slots
        numbers = range(len(self.cases))
        self.groups = [list(numbers[i : i + batch_size]) for i in range(0, len(numbers), batch_size)]
        longest = max(len(case.request.source or ()) for case in self.cases)
        self.source = max(-(-longest // 8) * 8, source if longest else 0)
        self._gaps: dict[tuple[int, ...], float] = {}

    def capacity(self, group: Sequence[int]) -> int:
        """Slots of a row."""
        return min(self._slots(self._longest(group) + self.max_new_tokens), self.model.context_length)

    def _longest(self, group: Sequence[int]) -> int:
        return max(len(self.cases[i].request.tokens) for i in group)

    def _slots(self, needed: int) -> int:
        return -(-needed // self.slots) * self.slots

    @property
    def fill(self) -> int:
        """Tokens that are cached half-way through an answer of full length, on average."""
        prompts = int(np.mean([len(case.request.tokens) for case in self.cases]))
        return prompts + self.max_new_tokens // 2

    def options(self, temperature: float, group: Sequence[int], repeat: int = 0) -> Options:
        """Sampling options of a group, filled up to the batch size."""
        first = self.seed + (repeat * len(self.cases) if temperature else 0)
        seeds = [(first + i) % 2**32 for i in group]
        seeds += seeds[:1] * (self.batch_size - len(group))
        return self._options({"temperature": temperature, "seed": seeds}, self.batch_size)

    def _options(self, sampling: SamplingOptions, prompts: int) -> Options:
        """The model's own limits with them, as in `jspec.generate`."""
        return resolve(
            sampling,
            prompts=prompts,
            samples=1,
            width=self.model.lm.config.vocab_size,
            vocab=self.model.vocab_size,
            ends=self.model.eos,
            special_id=None,
            banned=self.model.banned,
        )

    def decode(
        self,
        group: Sequence[int],
        setting: Setting,
        temperature: float,
        repeat: int = 0,
        max_new_tokens: int | None = None,
    ) -> list[Trial]:
        """The prompts of a group, decoded together."""
        chosen, rows = self.options(temperature, group, repeat), range(self.batch_size)
        missing = self.batch_size - len(group)
        requests = [self.cases[i].request for i in [*group, *[group[0]] * missing]]
        limit = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        trials = measure.decode_together(
            self.model.params,
            requests,
            chosen.keys(rows),
            target=self.model.lm,
            drafter=setting.drafter,
            verify=setting.verify,
            sampler=chosen.sampler(rows),
            stops=chosen.stops(),
            max_new_tokens=[limit] * len(group) + [0] * missing,
            capacity=self.capacity(group),
            source=self.source,
            widths=setting.widths,
        )
        return trials[: len(group)]

    def compile(self, settings: Sequence[Setting], advance: Advance = lambda: None) -> None:
        """One short run of every setting for each shape that a group has: capacity and chunk width."""
        shapes = {self._shape(group): group for group in self.groups}
        for setting in settings:
            for group in shapes.values():
                self.decode(group, setting, 0.0, max_new_tokens=2)
                environment.check_room()
            advance()

    def _shape(self, group: Sequence[int]) -> tuple[int, int]:
        return self.capacity(group), engine.chunk_width(self._longest(group) - 1)

    # --- costs --------------------------------------------------------------------------------------

    def curve(self, widths: Sequence[int], advance: Advance = lambda: None) -> tuple[CostCurve, int]:
        """t(n) behind `fill` cached tokens (returned, too), in a cache as large as decoding has."""
        most = max(widths)
        fill = max(min(self.fill, self.model.context_length - most), 0)
        capacity = max(self.capacity(self.groups[0]), engine.bucket(fill + most) if self.source == 0 else 0)
        fill = min(fill, capacity - most)
        curve = measure.measure_curve(
            self.model.lm,
            self.model.params,
            widths,
            fill=fill,
            capacity=capacity,
            source=self.source,
            batch=self.batch_size,
            advance=advance,
        )
        return curve, fill

    def draft_seconds(
        self, setting: Setting, temperature: float, rounds: int = DRAFTING_ROUND
    ) -> cost.Drafting:
        """A round's drafting, in the state that the first group is in after so many rounds (0 for a drafter
        whose cost does not depend on them: the target's loop need not be compiled then)."""
        environment.check_room()
        group = self.groups[0]
        chosen, rows = self.options(temperature, group), range(self.batch_size)
        requests = [self.cases[i].request for i in group]
        requests += requests[:1] * (self.batch_size - len(group))
        shared: dict[str, Any] = {
            "target": self.model.lm,
            "drafter": setting.drafter,
            "sampler": chosen.sampler(rows),
        }
        record = engine.records(statistics=engine.statistics, nodes=measure.nodes)
        # Room for whole drafts to the end: a row that nears its budget drafts less.
        room = (rounds + 2) * (setting.drafter.method.depth + 1)
        state = engine.start(
            self.model.params,
            jax.tree.map(jnp.asarray, pad(requests, self.source)),
            chosen.keys(rows),
            max_new_tokens=max(room, self.max_new_tokens),
            capacity=max(self.capacity(group), self._slots(self._longest(group) + room)),
            record=record,
            **shared,
        )
        if rounds:
            state = engine.run(
                self.model.params,
                state,
                verify=setting.verify,
                stops=engine.no_stops(),
                widths=setting.widths,
                record=record,
                max_rounds=rounds,
                **shared,
            )
        return cost.measure_drafting(self.model.params, state, **shared)

    # --- decoding -----------------------------------------------------------------------------------

    def trials(
        self, settings: Sequence[Setting], temperature: float, advance: Advance = lambda: None
    ) -> Trials:
        """Every prompt by every setting in every repeat. A repeat takes the groups in order, and for each
        group all settings in turn, so that a machine that is busy for a while slows every setting."""
        repeats: Trials = []
        for repeat in range(self.repeats):
            repeats.append([[] for _ in settings])
            for group in self.groups:
                for mine, setting in zip(repeats[-1], settings, strict=True):
                    mine += self.decode(group, setting, temperature, repeat)
                    advance()
        return repeats

    def rates(self, trials: Trials, seconds: Callable[[Trial], float]) -> np.ndarray:
        """[repeats, settings]: new tokens per second over all prompts."""
        first = [group[0] for group in self.groups]  # the time of a group is counted once
        return np.array(
            [
                [
                    sum(len(trial.tokens) for trial in mine) / sum(seconds(mine[i]) for i in first)
                    for mine in repeat
                ]
                for repeat in trials
            ]
        )

    def flips(
        self, outputs: Sequence[Sequence[int] | np.ndarray], plain: Sequence[Sequence[int] | np.ndarray]
    ) -> tuple[Flip, ...]:
        """Where greedy outputs, one a prompt, leave those of plain decoding."""
        flips = []
        for index, (mine, other) in enumerate(zip(outputs, plain, strict=True)):
            position = first_difference(np.asarray(mine), np.asarray(other))
            if position is not None:
                at = min(position, len(other) - 1)
                flips.append(Flip(self.cases[index].name, position, self._gap(index, other[:at])))
        return tuple(flips)

    def _gap(self, index: int, text: Sequence[int] | np.ndarray) -> float:
        """How far apart the target's two best logits are after a prompt and ``text``, whoever wrote it."""
        key = (index, *map(int, text))
        if key not in self._gaps:
            request = self.cases[index].request
            request = request._replace(tokens=[*request.tokens, *key[1:]])
            chosen = self._options({"seed": self.seed}, 1)
            state = engine.generate(
                self.model.params,
                jax.tree.map(jnp.asarray, pad([request], self.source)),
                chosen.keys([0]),
                target=alpha.served(self.model.lm, self.model.vocab_size, self.model.banned),
                drafter=PLAIN.drafter,
                verify=PLAIN.verify,
                sampler=chosen.sampler([0]),
                stops=chosen.stops(),
                max_new_tokens=1,
                capacity=self.capacity([index]),
                record=gap,
            )
            self._gaps[key] = float(state.record[0, int(state.starts[0])])
        return self._gaps[key]


def first_difference(tokens: np.ndarray, plain: np.ndarray) -> int | None:
    """The first index at which two outputs differ, or one ends; None if they are equal.

    >>> first_difference(np.array([1, 2, 3]), np.array([1, 5]))
    1
    """
    if np.array_equal(tokens, plain):
        return None
    common = min(len(tokens), len(plain))
    different = np.flatnonzero(tokens[:common] != plain[:common])
    return int(different[0]) if len(different) else common


def gap(info: Info) -> Float[Array, "B R"]:
    """Record: the target's best logit less its second, at the node that each token follows."""
    assert info.forward.logits is not None
    rows = jnp.take_along_axis(info.forward.logits, info.verdict.path[:, :, None], axis=1)
    best, _ = jax.lax.top_k(rows, 2)
    return best[:, :, 0] - best[:, :, 1]
