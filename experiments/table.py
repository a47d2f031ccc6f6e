"""The speed table: every drafter on every prompt, in turn with plain decoding, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress
from jaxtyping import Array, Float

import jspec
from experiments import cost, report
from experiments.config import Row, Table
from experiments.prompts import Question
from jspec import auto, drafters, engine, measure, options, verify
from jspec.io.tokenizer import check_vocabularies
from jspec.measure import CostCurve, Rounds, Trial
from jspec.text import named_drafter
from jspec.types import Drafter, Info, Prompt, Verifier

DRAFTING_ROUND = 4  # drafting is timed in the state after so many rounds


class Setting(NamedTuple):
    """A row of the configuration, built."""

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
    tokens: list[int]


PLAIN = Setting("plain", drafters.plain(), verify.target_only(), (1,))


def build(row: Row, model: jspec.Model, dtype: str = "float32") -> Setting:
    """The drafter, verifier and widths that a row names.

    Raises:
        ValueError: an argument, rule or width that does not exist or does not fit; it names the row.
    """
    note = ""
    try:
        if row.drafter == "none":
            drafter = drafters.plain()
        elif row.drafter == "auto":
            choice = auto.choice(model)
            drafter, note = choice.build(model) or drafters.plain(), choice.title
        elif row.drafter == "model":
            arguments = dict(row.arguments)
            draft_model = jspec.load(str(arguments.pop("draft_model")), dtype=dtype)
            drafter = drafters.model(draft_model, **arguments)
            if model.vocabulary is not None:
                check_vocabularies(model.vocabulary, drafter.params)
        else:
            drafter = named_drafter(row.drafter, model, **row.arguments)
        rule = verify.resolve(drafter.method, None if row.verify is None else verify.named(row.verify))
        return Setting(row.name, drafter, rule, engine.block_widths(drafter, row.widths), note)
    except (TypeError, ValueError) as error:
        raise ValueError(f"drafters: {row.name!r}: {error}") from None
    except KeyError as error:
        raise ValueError(f"drafters: {row.name!r}: the argument {error} is missing") from None


def tokenize(
    model: jspec.Model, questions: Sequence[Question], chat: bool, max_new_tokens: int
) -> list[Case]:
    """Every question as tokens; refused where it and its answer do not fit into the model's positions."""
    if model.tokenizer is None:
        raise ValueError(f"target: {model.name} has no tokenizer, which the prompts need")
    cases = []
    for question in questions:
        messages = [{"role": "user", "content": question.text}]
        tokens = model.tokenizer.chat(messages) if chat else model.tokenizer.encode(question.text)
        if len(tokens) + max_new_tokens > model.context_length:
            raise ValueError(
                f"prompts: {question.id} has {len(tokens)} tokens, with max_new_tokens={max_new_tokens} "
                f"it needs more than the {model.context_length} positions of {model.name}"
            )
        cases.append(Case(str(question.id), question.category, tokens))
    return cases


def run(
    config: Table,
    model: jspec.Model,
    cases: Sequence[Case],
    settings: Sequence[Setting],
    console: rich.console.Console,
) -> report.Report:
    """Measure. ``settings`` are the rows in order; plain decoding is put first where it is missing.

    Compilation is done before anything is timed. A repeat takes the prompts in order, and for each prompt
    all rows in turn, so that a machine that is busy for a while slows every row.
    """
    if all(setting.drafts or setting.note for setting in settings):
        settings = [PLAIN, *settings]
    bench = _Bench(config, model, cases, settings)
    buckets = len({bench.capacity(case) for case in cases})
    trials = len(config.temperatures) * config.repeats * len(cases) * len(settings)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as progress:

        def bar(name: str, total: int) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        bench.compile(bar("compiling", len(settings) * buckets))
        curve, fill = bench.curve(bar("cost curve", len({1, *config.curve}) * (measure.REPEATS + 1)))
        costs = bench.draft_costs(curve, bar("drafting", len(settings)))
        advance = bar("decoding", trials)
        sections, rounds = {}, {}
        for temperature in config.temperatures:
            title = _title(config, model, len(cases), temperature)
            all_trials = bench.trials(temperature, advance)
            flips = bench.flips(all_trials[-1]) if temperature == 0 else None
            sections[title] = bench.lines(all_trials, flips, costs, curve)
            rounds[title] = bench.content(all_trials)
    return report.Report(sections, curve, fill, rounds)


def _title(config: Table, model: jspec.Model, num_prompts: int, temperature: float) -> str:
    law = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return (
        f"{model.name}, {config.dtype}, {law}, {num_prompts} prompts, {config.max_new_tokens} new tokens, "
        f"one row at a time, {config.repeats} repeats"
    )


Trials = list[list[list[Trial]]]  # [repeat][setting][prompt]


class _Bench:
    """What every measurement of a table shares."""

    def __init__(
        self, config: Table, model: jspec.Model, cases: Sequence[Case], settings: Sequence[Setting]
    ) -> None:
        self.config, self.model, self.cases, self.settings = config, model, cases, settings
        self.baseline = next(i for i, s in enumerate(settings) if not s.drafts and not s.note)

    def capacity(self, case: Case) -> int:
        return min(engine.bucket(len(case.tokens) + self.config.max_new_tokens), self.model.context_length)

    def options(self, temperature: float) -> options.Options:
        return options.resolve(
            {"temperature": temperature, "seed": self.config.seed},
            prompts=1,
            samples=1,
            width=self.model.lm.config.vocab_size,
            vocab=self.model.vocab_size,
            ends=self.model.eos,
            special_id=None,
        )

    def decode(self, case: Case, setting: Setting, temperature: float, max_new_tokens: int) -> Trial:
        chosen = self.options(temperature)
        return measure.decode(
            self.model.params,
            case.tokens,
            chosen.keys([0]),
            target=self.model.lm,
            drafter=setting.drafter,
            verify=setting.verify,
            sampler=chosen.sampler([0]),
            stops=chosen.stops(),
            max_new_tokens=max_new_tokens,
            capacity=self.capacity(case),
            widths=setting.widths,
        )

    def compile(self, advance: Callable[[], None]) -> None:
        """One short run of every row for each shape that a prompt has: its capacity and its chunk width."""
        for setting in self.settings:
            for capacity in sorted({self.capacity(case) for case in self.cases}):
                mine = [case for case in self.cases if self.capacity(case) == capacity]
                for case in {engine.chunk_width(len(case.tokens) - 1): case for case in mine}.values():
                    self.decode(case, setting, 0.0, 2)
                advance()

    def curve(self, advance: Callable[[], None]) -> tuple[CostCurve, int]:
        """t(n) behind as many cached tokens as the decoding has on average."""
        most = max(self.config.curve)
        fill = int(np.mean([len(case.tokens) for case in self.cases])) + self.config.max_new_tokens // 2
        fill = max(min(fill, self.model.context_length - most), 0)
        capacity = engine.bucket(fill + most)
        curve = measure.measure_curve(
            self.model.lm, self.model.params, self.config.curve, fill=fill, capacity=capacity, advance=advance
        )
        return curve, fill

    def draft_costs(self, curve: CostCurve, advance: Callable[[], None]) -> list[float | None]:
        """A round's drafting over t(1), for every row; None where nothing is drafted."""
        costs = []
        for setting in self.settings:
            costs.append(self._draft_seconds(setting) / curve.seconds[0] if setting.drafts else None)
            advance()
        return costs

    def _draft_seconds(self, setting: Setting) -> float:
        chosen = self.options(self.config.temperatures[0])
        case = self.cases[0]
        shared: dict[str, Any] = {
            "target": self.model.lm,
            "drafter": setting.drafter,
            "sampler": chosen.sampler([0]),
        }
        record = engine.records(statistics=engine.statistics, nodes=measure.nodes)
        state = engine.start(
            self.model.params,
            Prompt(jnp.asarray(case.tokens, jnp.int32)[None], jnp.asarray([len(case.tokens)], jnp.int32)),
            chosen.keys([0]),
            # Room for whole drafts to the end: a row that nears its budget drafts less.
            max_new_tokens=(DRAFTING_ROUND + 2) * (setting.drafter.method.depth + 1),
            record=record,
            **shared,
        )
        state = engine.run(
            self.model.params,
            state,
            verify=setting.verify,
            stops=engine.no_stops(),
            widths=setting.widths,
            record=record,
            max_rounds=DRAFTING_ROUND,
            **shared,
        )
        return cost.measure_drafting(self.model.params, state, **shared)

    def trials(self, temperature: float, advance: Callable[[], None]) -> Trials:
        repeats: Trials = []
        for _ in range(self.config.repeats):
            repeats.append([[] for _ in self.settings])
            for case in self.cases:
                for mine, setting in zip(repeats[-1], self.settings, strict=True):
                    mine.append(self.decode(case, setting, temperature, self.config.max_new_tokens))
                    advance()
        return repeats

    def flips(self, trials: list[list[Trial]]) -> list[tuple[report.Flip, ...]]:
        """For every row, where its greedy tokens leave those of plain decoding."""
        gaps: dict[int, np.ndarray] = {}
        found = []
        for mine in trials:
            flips = []
            for index, (trial, plain) in enumerate(zip(mine, trials[self.baseline], strict=True)):
                position = first_difference(trial.tokens, plain.tokens)
                if position is not None:
                    if index not in gaps:
                        gaps[index] = self._plain_gaps(self.cases[index])
                    flips.append(
                        report.Flip(
                            self.cases[index].name,
                            position,
                            float(gaps[index][min(position, len(plain.tokens) - 1)]),
                        )
                    )
            found.append(tuple(flips))
        return found

    def _plain_gaps(self, case: Case) -> np.ndarray:
        """The gap of the two best logits at every token of plain greedy decoding."""
        chosen = self.options(0.0)
        state = engine.generate(
            self.model.params,
            Prompt(jnp.asarray(case.tokens, jnp.int32)[None], jnp.asarray([len(case.tokens)], jnp.int32)),
            chosen.keys([0]),
            target=self.model.lm,
            drafter=PLAIN.drafter,
            verify=PLAIN.verify,
            sampler=chosen.sampler([0]),
            stops=chosen.stops(),
            max_new_tokens=self.config.max_new_tokens,
            capacity=self.capacity(case),
            record=gap,
        )
        return np.asarray(state.record)[0, int(state.starts[0]) : int(state.lengths[0])]

    def lines(
        self,
        trials: Trials,
        flips: list[tuple[report.Flip, ...]] | None,
        costs: list[float | None],
        curve: CostCurve,
    ) -> list[report.Line]:
        decode = _rates(trials, lambda trial: trial.decode_seconds)
        overall = _rates(trials, lambda trial: trial.prompt_seconds + trial.decode_seconds)
        lines = []
        for i, setting in enumerate(self.settings):
            rounds = Rounds.join([trial.rounds for trial in trials[-1][i]])
            tau = float(rounds.emitted.sum() / len(rounds.emitted))
            alpha = cost.estimate_alpha(rounds.accepted, rounds.judged)
            depth, draft_cost = setting.drafter.method.depth, costs[i]
            c = theory = predicted = best = None
            if draft_cost is not None:
                c = draft_cost / depth
                theory = cost.predict_from_theory(alpha, rounds.proposed.tolist(), c)
                predicted = cost.predict_from_curve(
                    tau, setting.executed(rounds.nodes).tolist(), draft_cost, curve
                )
                if self._is_chain(setting):
                    best = cost.best_length(
                        rounds.survival(depth).tolist(),
                        curve,
                        draft_cost=c,
                        drafting=float((rounds.proposed > 0).mean()),
                    )
            lines.append(
                report.Line(
                    name=setting.name,
                    note=setting.note,
                    baseline=i == self.baseline,
                    tau=tau,
                    accepted_by_position=tuple(float(share) for share in rounds.survival(depth)),
                    alpha=alpha if setting.drafts else None,
                    c=c,
                    theory=theory,
                    predicted=predicted,
                    best_length=best,
                    decode=report.Speed.of(decode[:, i]),
                    overall=report.Speed.of(overall[:, i]),
                    speedup=report.Speed.of(decode[:, i] / decode[:, self.baseline]),
                    overall_speedup=report.Speed.of(overall[:, i] / overall[:, self.baseline]),
                    flips=None if flips is None else flips[i],
                    lossless=setting.verify.lossless,
                    num_prompts=len(self.cases),
                )
            )
        return lines

    @staticmethod
    def _is_chain(setting: Setting) -> bool:
        method = setting.drafter.method
        return method.width == method.depth + 1 and not method.side

    def content(self, trials: Trials) -> dict[str, Any]:
        """Every round and every timing of every prompt, for JSON."""
        content: dict[str, Any] = {}
        for i, setting in enumerate(self.settings):
            content[setting.name] = {}
            for j, case in enumerate(self.cases):
                last = trials[-1][i][j]
                content[setting.name][case.name] = {
                    "category": case.category,
                    "prompt_tokens": len(case.tokens),
                    "tokens": last.tokens.tolist(),
                    "emitted": last.rounds.emitted.tolist(),
                    "accepted": last.rounds.accepted.tolist(),
                    "proposed": last.rounds.proposed.tolist(),
                    "width": setting.executed(last.rounds.nodes).tolist(),
                    "prompt_seconds": [repeat[i][j].prompt_seconds for repeat in trials],
                    "decode_seconds": [repeat[i][j].decode_seconds for repeat in trials],
                }
        return content


def _rates(trials: Trials, seconds: Callable[[Trial], float]) -> np.ndarray:
    """[repeats, settings]: new tokens per second over all prompts."""
    return np.array(
        [
            [
                sum(len(trial.tokens) for trial in mine) / sum(seconds(trial) for trial in mine)
                for mine in repeat
            ]
            for repeat in trials
        ]
    )


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
