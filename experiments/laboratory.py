"""Measuring a trained study: its alphas, costs, speeds and scores, each of them a kept stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import rich.console

import jspec
from experiments import alpha, cost, environment, figures, progress, quality
from experiments.bench import PLAIN, Bench, Case, Setting
from experiments.pipeline import ANSWERS, Network, Subject, Trained, validated
from experiments.report import Line
from experiments.results import Curve, Quality, fields, named, unpacked
from experiments.stages import Stages
from experiments.study import Study
from jspec import measure, verify
from jspec.batch import Request
from jspec.types import Verifier
from training import recipe, text
from training.data import Example, Record

SLOTS = 32  # capacities are multiples: a cache of 256 slots for answers of 30 tokens is slow to attend to
PROBE = 4  # draft length at which c is measured where the length is yet to be chosen


class Costs(NamedTuple):
    """The cost curve, and c by drafter and temperature: what draft lengths are chosen by."""

    curve: Curve
    c: dict[str, dict[float, float]]


class Timed(NamedTuple):
    """Lines of plain decoding, then of each entry; and every round of each prompt. The costs were measured
    just before the decoding, the curve among them."""

    lines: list[Line]
    rounds: dict[str, Any]
    curve: Curve

    @property
    def plain(self) -> Line:
        """Plain decoding's line."""
        return self.lines[0]

    def line(self, entry: Entry) -> Line:
        """The line of an entry, found by its name."""
        return next(line for line in self.lines[1:] if line.name == entry.name)


class Entry(NamedTuple):
    """What a line is about: a drafter at a draft length, with an acceptance rule. Names differ.

    ``sample``: drafts are drawn; else they are the likeliest tokens.
    """

    name: str
    subject: Subject | Network
    gamma: int
    rule: Verifier
    sample: bool = True

    @property
    def setting(self) -> Setting:
        """For the bench. Drafts always have that length, so one block width is enough."""
        drafter = self.subject.drafter(self.gamma, sample=self.sample)
        return Setting(self.name, drafter, self.rule, (self.gamma + 1,))


class Scored(NamedTuple):
    """The whole test set, decoded greedily and in batches: how good the answers are, and tokens a round."""

    quality: Quality
    tau: float


class Laboratory:
    """A study's trained models and its test set.

    Args:
      records: the test set's texts, whose targets are the references.
      label: what the names of stages begin with, where one folder has several targets.
    Attributes:
      examples: the test set.
      answers: temperature -> what plain decoding writes, and ``plain`` its quality.
    """

    def __init__(
        self,
        config: Study,
        trained: Trained,
        records: Sequence[Record],
        folder: Path,
        stages: Stages,
        console: rich.console.Console,
        label: str = "",
    ) -> None:
        self.config, self.settings, self.label = config, config.measure, label
        self.target, self.all = trained.target, trained.subjects
        self.records, self.folder, self.stages, self.console = records, folder, stages, console
        self.examples, self.validation = trained.test, trained.validation
        chosen = self.settings.drafters
        self.subjects = [s for name, s in self.all.items() if chosen is None or name in chosen]
        device = jax.devices()[0]
        self._inputs: dict[str, Any] = {
            "target": recipe.model_fingerprint(self.target.lm.config, self.target.params),
            "test": recipe.text_fingerprint(self.examples),
            "max_new_tokens": config.max_new_tokens,
            "seed": self.settings.seed,
            "dtype": self.settings.dtype,
            "device": [device.platform, device.device_kind, jax.device_count()],
        }
        if self.target.banned:
            self._inputs["banned"] = self.target.banned
        mesh = None if config.mesh is None else config.mesh.model_dump()
        # One width of the encoder's input for all timed sentences, whichever of them a table takes.
        sweep = 0 if self.settings.sweep is None else self.settings.sweep.sentences
        timed = self.examples[: max(self.settings.sentences, sweep)]
        self.source = -(-max(len(example.source) for example in timed) // 8) * 8
        self._timing = {"machine": environment.machine(), "mesh": mesh, "source": self.source}
        self.answers: dict[float, list[list[int]]] = {}
        self.plain: dict[float, Quality] = {}
        self._validated: dict[float, list[Example]] = {}
        for temperature in self.settings.temperatures:
            self._write(temperature)

    def kept(self, name: str, kind: Any, inputs: Any, function: Callable[[], Any]) -> Any:
        """A measured value of type ``kind``, kept as a stage; the inputs of all measurements are added, and
        the names of its fields, so that a value of another form is measured again."""
        inputs = self._inputs | inputs | {"fields": fields(kind)}
        return unpacked(kind, self.stages.kept(self.label + name, inputs, lambda: named(function())))

    # --- plain decoding of the test set -------------------------------------------------------------------

    def _write(self, temperature: float) -> None:
        def write() -> Quality:
            return self._quality(self._answers(temperature))

        inputs = {"temperature": temperature, "batch": self.settings.quality_batch}
        inputs["metric"] = self.config.task.metric
        self.plain[temperature] = self.kept(f"test, plain, T={temperature:g}", Quality, inputs, write)
        self.answers[temperature] = self._answers(temperature)

    def _answers(self, temperature: float) -> list[list[int]]:
        how = text.Writing(self.config.max_new_tokens, self.settings.quality_batch, self.folder / ANSWERS)
        found = text.answered(
            self.target, self.examples, how, temperature, self.settings.seed, console=self.console
        )
        return [example.target for example in found]

    def _quality(self, answers: Sequence[Sequence[int]]) -> Quality:
        assert self.target.tokenizer is not None
        texts = [self.target.tokenizer.decode(answer) for answer in answers]
        references = [record.target for record in self.records]
        score = quality.score(self.config.task.metric, texts, references)
        return Quality(*score, sentences=len(texts), tokens=sum(map(len, answers)))

    def written(self, temperature: float) -> list[Example]:
        """The test sources with plain decoding's answers."""
        pairs = zip(self.examples, self.answers[temperature], strict=True)
        return [Example(example.source, answer) for example, answer in pairs]

    def validated(self, temperature: float) -> list[Example]:
        """Validation sources with plain decoding's answers; see `pipeline.validated`."""
        if temperature not in self._validated:
            self._validated[temperature] = validated(
                self.config, self.target, self.validation, temperature, self.stages, self.console
            )
        return self._validated[temperature]

    # --- alpha and costs ----------------------------------------------------------------------------------

    def alpha(self, subject: Subject, temperature: float, validation: bool = False) -> float:
        """alpha of a drafter on the target's answers to the test set, or to the validation set."""
        examples = self.validated(temperature) if validation else self.written(temperature)
        return self.kept(
            f"alpha{' on validation' if validation else ''}, {subject.name}, T={temperature:g}",
            float,
            {"drafter": subject.fingerprint, "text": recipe.text_fingerprint(examples)},
            lambda: alpha.alpha(self.target, subject.laws, examples, temperature),
        )

    def lenient_alphas(
        self, subject: Subject, factors: Sequence[float], validation: bool = False
    ) -> list[float]:
        """alpha of a drafter for each lenience at temperature 1, on the same texts."""
        examples = self.validated(1.0) if validation else self.written(1.0)
        inputs = {"drafter": subject.fingerprint, "text": recipe.text_fingerprint(examples)}
        return self.kept(
            f"lenient alpha{' on validation' if validation else ''}, {subject.name}",
            list[float],
            inputs | {"factors": factors},
            lambda: alpha.lenient_alphas(self.target, subject.laws, examples, factors, 1.0),
        )

    def best_gamma(self, costs: Costs, alpha: float, subject: Subject, temperature: float) -> int:
        """The draft length that a drafter's alpha, its c and the cost curve make the fastest."""
        c = costs.c[subject.name][temperature]
        return cost.best_gamma_on(costs.curve.cost, alpha, c, self.settings.max_gamma)

    def bench(self, batch_size: int, sentences: int | None = None) -> Bench:
        """The first sentences of the test set; None: as many as the table is measured on."""
        start = list(self.target.decoder_start)
        count = self.settings.sentences if sentences is None else sentences
        cases = [
            Case(str(number), "", Request(start, e.source) if start else Request(e.source))
            for number, e in enumerate(self.examples[:count], 1)
        ]
        return Bench(
            self.target,
            cases,
            max_new_tokens=self.config.max_new_tokens,
            seed=self.settings.seed,
            repeats=self.settings.repeats,
            batch_size=batch_size,
            slots=SLOTS,
            source=self.source,
        )

    def entry(self, subject: Subject, gamma: int, temperature: float, name: str = "") -> Entry:
        """A drafter at a draft length, with the study's rule. At temperature 0 a model drafts its likeliest
        tokens, which `verify.target_only` compares with the target's: what any lossless rule makes of drawn
        ones there, without laws and coins."""
        rule = verify.named(self.settings.verify)
        if temperature == 0 and rule.lossless and subject.model is not None:
            return Entry(name or subject.name, subject, gamma, verify.target_only(), sample=False)
        return Entry(name or subject.name, subject, gamma, rule)

    def costs(self, batch_size: int) -> Costs:
        """The cost curve, and c of every drafter and temperature."""
        settings, temperatures = self.settings, self.settings.temperatures
        if settings.gamma == "best":
            probe, wanted = min(PROBE, settings.max_gamma), sorted({1, 2, 3, 5, settings.max_gamma + 1})
        else:
            probe, wanted = settings.gamma, [1, settings.gamma + 1]

        def run() -> Costs:
            bench, found = self.bench(batch_size), {}
            with progress.bars(self.console) as bar:
                advance = bar("cost curve", len(wanted) * (measure.REPEATS + 1))
                curve = Curve(*bench.curve(wanted, advance))
                advance = bar("drafting", len(self.subjects) * len(temperatures))
                for subject in self.subjects:
                    found[subject.name] = {}
                    for temperature in temperatures:
                        setting = self.entry(subject, probe, temperature).setting
                        drafting = bench.draft_seconds(setting, temperature, rounds=0)
                        seconds = drafting.after_nothing / probe
                        found[subject.name][temperature] = seconds / curve.cost.seconds[0]
                        advance()
            return Costs(curve, found)

        inputs = self._timing | {
            "batch": batch_size,
            "widths": wanted,
            "probe": probe,
            "sentences": settings.sentences,
            "temperatures": temperatures,
            "drafters": [[subject.name, subject.fingerprint] for subject in self.subjects],
            "sample": [[self.entry(s, probe, t).sample for t in temperatures] for s in self.subjects],
        }
        return self.kept(f"costs, batch {batch_size}", Costs, inputs, run)

    # --- speed --------------------------------------------------------------------------------------------

    def speed(
        self,
        title: str,
        entries: Sequence[Entry],
        temperature: float,
        *,
        batch_size: int,
        sentences: int | None = None,
    ) -> Timed:
        """Entries in turn with plain decoding on the first sentences."""
        sentences = self.settings.sentences if sentences is None else sentences

        def run() -> Timed:
            bench, every = self.bench(batch_size, sentences), [PLAIN, *(entry.setting for entry in entries)]
            drafting: list[cost.Drafting | None] = [None]
            with progress.bars(self.console) as bar:
                bench.compile(every, bar(f"{title}: compiling", len(every)))
                widths = sorted({setting.widths[-1] for setting in every})
                advance = bar(f"{title}: cost curve", len(widths) * (measure.REPEATS + 1))
                curve = Curve(*bench.curve(widths, advance))
                advance = bar(f"{title}: drafting", len(entries))
                for setting in every[1:]:
                    drafting.append(bench.draft_seconds(setting, temperature, rounds=0))
                    advance()
                steps = bench.repeats * len(bench.groups) * len(every)
                trials = bench.trials(every, temperature, bar(f"{title}: decoding", steps))
            lines = figures.lines(bench, every, trials, drafting, curve.cost, temperature)
            return Timed(lines, figures.content(bench, every, trials), curve)

        inputs = self._timing | {
            "batch": batch_size,
            "temperature": temperature,
            "sentences": sentences,
            "repeats": self.settings.repeats,
            # A list: they are decoded in this order, and the kept lines stand in it.
            "entries": [[e.name, e.subject.fingerprint, e.gamma, e.rule.name] for e in entries],
        }
        return self.kept(title, Timed, inputs, run)

    # --- quality ------------------------------------------------------------------------------------------

    def quality(self, entry: Entry, temperature: float) -> Quality:
        """The whole test set, speculatively and in batches."""
        name = f"test, {entry.name}, gamma {entry.gamma}, T={temperature:g}"
        return self.kept(name, Quality, self._told(entry), lambda: self._decoded(entry, temperature)[0])

    def scored(self, entry: Entry) -> Scored:
        """The same, greedily, with tau."""
        name = f"test, {entry.name}, T=0, tau"
        return self.kept(name, Scored, self._told(entry), lambda: Scored(*self._decoded(entry, 0.0)))

    def _told(self, entry: Entry) -> dict[str, Any]:
        """What decoding the test set with an entry depends on."""
        return {
            "drafter": entry.subject.fingerprint,
            "gamma": entry.gamma,
            "verify": [entry.rule.name, entry.name],
            "batch": self.settings.quality_batch,
            "metric": self.config.task.metric,
        }

    def _decoded(self, entry: Entry, temperature: float) -> tuple[Quality, float]:
        setting = entry.setting
        output = jspec.generate(
            self.target,
            [example.source for example in self.examples],
            drafter=setting.drafter,
            verify=setting.verify,
            widths=setting.widths,
            temperature=temperature,
            seed=[(self.settings.seed + i) % 2**32 for i in range(len(self.examples))],
            max_new_tokens=self.config.max_new_tokens,
            batch_size=self.settings.quality_batch,
        )
        found, tau = self._quality(output.tokens), output.stats.mean_accepted_length or 1.0
        if temperature > 0:
            return found, tau
        flips = self.bench(1, len(self.examples)).flips(output.tokens, self.answers[temperature])
        return found._replace(flips=flips), tau
