"""Measuring a trained study: its alphas, costs, speeds and scores, each of them a kept stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import rich.console

import jspec
from experiments import alpha, figures, progress, quality
from experiments.bench import PLAIN, Bench, Case, Setting
from experiments.pipeline import ANSWERS, Subject, Trained, encode_test
from experiments.report import Line
from experiments.results import Quality, packed, unpacked
from experiments.stages import Stages
from experiments.study import Study
from jspec import measure, verify
from jspec.batch import Request
from jspec.measure import CostCurve
from jspec.types import Verifier
from training import recipe
from training.data import Example, Record
from training.generation import generate_answers

SLOTS = 32  # capacities are multiples: a cache of 256 slots for answers of 30 tokens is slow to attend to
PROBE = 4  # draft length at which c is measured where the length is yet to be chosen


class Costs(NamedTuple):
    """t(n), the cached tokens behind which it was measured, and c by drafter and temperature."""

    curve: CostCurve
    fill: int
    c: dict[str, dict[float, float]]


class Timed(NamedTuple):
    """Lines of plain decoding, then of each setting; and every round of each prompt. The costs were measured
    just before the decoding, the curve among them."""

    lines: list[Line]
    rounds: dict[str, Any]
    curve: CostCurve


class Laboratory:
    """A study's trained models and its test set.

    Attributes:
      examples: the test set, references as targets.
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
    ) -> None:
        self.config, self.settings = config, config.measure
        self.target, self.all = trained.target, trained.subjects
        self.records, self.folder, self.stages, self.console = records, folder, stages, console
        self.examples = encode_test(config, self.target, records)
        chosen = self.settings.drafters
        self.subjects = [s for name, s in self.all.items() if chosen is None or name in chosen]
        self.fingerprints = {name: subject.fingerprint for name, subject in self.all.items()}
        device = jax.devices()[0]
        self._inputs: dict[str, Any] = {
            "target": recipe.model_fingerprint(self.target.lm.config, self.target.params),
            "test": recipe.text_fingerprint(self.examples),
            "max_new_tokens": config.max_new_tokens,
            "seed": self.settings.seed,
            "dtype": self.settings.dtype,
            "device": [device.platform, device.device_kind, jax.device_count()],
        }
        # One width of the encoder's input for all timed sentences, whichever of them a table takes.
        sweep = 0 if self.settings.sweep is None else self.settings.sweep.sentences
        timed = self.examples[: max(self.settings.sentences, sweep)]
        self.source = -(-max(len(example.source) for example in timed) // 8) * 8
        self.answers: dict[float, list[list[int]]] = {}
        self.plain: dict[float, Quality] = {}
        for temperature in self.settings.temperatures:
            self._write(temperature)

    def kept(self, name: str, kind: Any, inputs: Any, function: Callable[[], Any]) -> Any:
        """A measured value of type ``kind``, kept as a stage; the inputs of all measurements are added."""
        value = self.stages.kept(name, self._inputs | inputs, lambda: packed(kind, function()))
        return unpacked(kind, value)

    # --- plain decoding of the test set -------------------------------------------------------------------

    def _write(self, temperature: float) -> None:
        def write() -> Quality:
            return self._quality(self._answers(temperature), 1.0)

        inputs = {"temperature": temperature, "batch": self.settings.quality_batch}
        inputs["metric"] = self.config.task.metric
        self.plain[temperature] = self.kept(f"test, plain, T={temperature:g}", Quality, inputs, write)
        self.answers[temperature] = self._answers(temperature)

    def _answers(self, temperature: float) -> list[list[int]]:
        return generate_answers(
            self.target,
            [example.source for example in self.examples],
            temperature=temperature,
            seed=self.settings.seed,
            max_new_tokens=self.config.max_new_tokens,
            batch_size=self.settings.quality_batch,
            cache=self.folder / ANSWERS,
        )

    def _quality(self, answers: Sequence[Sequence[int]], tau: float) -> Quality:
        assert self.target.tokenizer is not None
        texts = [self.target.tokenizer.decode(answer) for answer in answers]
        references = [record.target for record in self.records]
        score = quality.score(self.config.task.metric, texts, references)
        return Quality(*score, sentences=len(texts), tokens=sum(map(len, answers)), tau=tau)

    def written(self, temperature: float) -> list[Example]:
        """The test sources with plain decoding's answers."""
        pairs = zip(self.examples, self.answers[temperature], strict=True)
        return [Example(example.source, answer) for example, answer in pairs]

    # --- alpha and costs ----------------------------------------------------------------------------------

    def alphas(self) -> dict[str, dict[float, float]]:
        """alpha of every drafter at every temperature, on the target's answers to the test set."""
        found: dict[str, dict[float, float]] = {name: {} for name in self.all}
        for temperature in self.settings.temperatures:
            text = self.written(temperature)
            for name, subject in self.all.items():
                found[name][temperature] = self.kept(
                    f"alpha, {name}, T={temperature:g}",
                    float,
                    {"drafter": self.fingerprints[name], "text": recipe.text_fingerprint(text)},
                    lambda subject=subject, text=text, temperature=temperature: alpha.alpha(
                        self.target, subject.laws, text, temperature
                    ),
                )
        return found

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

    def setting(self, subject: Subject, gamma: int, rule: Verifier | None = None, name: str = "") -> Setting:
        """A drafter at a draft length. Drafts always have that length, so one block width is enough."""
        rule = verify.named(self.settings.verify) if rule is None else rule
        return Setting(name or subject.name, subject.drafter(gamma), rule, (gamma + 1,))

    def costs(self, batch_size: int) -> Costs:
        """The cost curve, and c of every drafter and temperature."""
        settings = self.settings
        sweep = settings.sweep.gammas if settings.sweep is not None and batch_size == 1 else ()
        if settings.gamma == "best":
            probe, widths = min(PROBE, settings.max_gamma), {1, 2, 3, 5, settings.max_gamma + 1}
        else:
            probe, widths = settings.gamma, {1, settings.gamma + 1}
        wanted = sorted(widths | {gamma + 1 for gamma in sweep})

        def run() -> Costs:
            bench, found = self.bench(batch_size), {}
            with progress.bars(self.console) as bar:
                advance = bar("cost curve", len(wanted) * (measure.REPEATS + 1))
                curve, fill = bench.curve(wanted, advance)
                advance = bar("drafting", len(self.subjects) * len(settings.temperatures))
                for subject in self.subjects:
                    found[subject.name] = {}
                    for temperature in settings.temperatures:
                        seconds = bench.draft_seconds(self.setting(subject, probe), temperature, rounds=0)
                        found[subject.name][temperature] = seconds / probe / curve.seconds[0]
                        advance()
            return Costs(curve, fill, found)

        inputs = {"batch": batch_size, "widths": wanted, "probe": probe, "sentences": settings.sentences}
        inputs["drafters"] = self.prints(self.subjects)
        return self.kept(f"costs, batch {batch_size}", Costs, inputs, run)

    def prints(self, subjects: Sequence[Subject]) -> dict[str, str]:
        """Fingerprints by name."""
        return {subject.name: self.fingerprints[subject.name] for subject in subjects}

    # --- speed --------------------------------------------------------------------------------------------

    def speed(
        self,
        title: str,
        settings: Sequence[Setting],
        temperature: float,
        inputs: dict[str, Any],
        *,
        batch_size: int,
        sentences: int | None = None,
    ) -> Timed:
        """Settings in turn with plain decoding on the first sentences. ``inputs`` say which they are."""
        sentences = self.settings.sentences if sentences is None else sentences

        def run() -> Timed:
            bench, every = self.bench(batch_size, sentences), [PLAIN, *settings]
            drafting: list[float | None] = [None]
            with progress.bars(self.console) as bar:
                bench.compile(every, bar(f"{title}: compiling", len(every)))
                widths = {1, *(setting.widths[-1] for setting in settings)}
                advance = bar(f"{title}: cost curve", len(widths) * (measure.REPEATS + 1))
                curve, _ = bench.curve(sorted(widths), advance)
                advance = bar(f"{title}: drafting", len(settings))
                for setting in settings:
                    drafting.append(bench.draft_seconds(setting, temperature, rounds=0))
                    advance()
                steps = bench.repeats * len(bench.groups) * len(every)
                trials = bench.trials(every, temperature, bar(f"{title}: decoding", steps))
            lines = figures.lines(bench, every, trials, drafting, curve, temperature)
            return Timed(lines, figures.content(bench, every, trials), curve)

        shared = {"sentences": sentences, "repeats": self.settings.repeats}
        return self.kept(title, Timed, shared | inputs, run)

    # --- quality ------------------------------------------------------------------------------------------

    def quality(self, setting: Setting, subject: Subject, gamma: int, temperature: float) -> Quality:
        """The whole test set, speculatively and in batches."""

        def run() -> Quality:
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
            tau = output.stats.mean_accepted_length or 1.0
            found = self._quality(output.tokens, tau)
            if temperature > 0:
                return found
            flips = self.bench(1, len(self.examples)).flips(output.tokens, self.answers[temperature])
            return found._replace(flips=flips)

        inputs = {
            "drafter": self.fingerprints[subject.name],
            "gamma": gamma,
            "verify": [setting.verify.name, setting.name],
            "batch": self.settings.quality_batch,
            "metric": self.config.task.metric,
        }
        name = f"test, {setting.name}, gamma {gamma}, T={temperature:g}"
        return self.kept(name, Quality, inputs, run)
