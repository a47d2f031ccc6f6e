"""The tables of a study: the paper's main table, lenience, and a sweep over draft lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich.console

from experiments import cost, paper
from experiments.laboratory import Costs, Entry, Laboratory
from experiments.pipeline import Subject, Texts, Trained
from experiments.results import Curve, LenientRow, Part, Results, Row, SweepPoint
from experiments.stages import Stages
from experiments.study import Lenience, Study, Sweep
from jspec import verify


def measure(
    config: Study,
    trained: Trained,
    texts: Texts,
    folder: Path,
    stages: Stages,
    console: rich.console.Console,
) -> Results:
    """Measure a trained study on its test set; what was measured before, with the same models, on the same
    kind of device (timings: on the same machine), is read."""
    lab = Laboratory(config, trained, texts.test, folder, stages, console)
    settings = config.measure
    alphas = {
        name: {t: lab.alpha(subject, t) for t in settings.temperatures} for name, subject in lab.all.items()
    }
    costs = {batch_size: lab.costs(batch_size) for batch_size in settings.batch_sizes}
    curves = {f"costs, batch {batch_size}": measured.curve for batch_size, measured in costs.items()}
    rows: list[Row] = []
    rounds: dict[str, Any] = {}
    for batch_size in settings.batch_sizes:
        for temperature in settings.temperatures:
            stage = f"speed, batch {batch_size}, T={temperature:g}"
            more, rounds[stage], curves[stage] = table(
                lab, stage, alphas, costs[batch_size], batch_size, temperature
            )
            rows += more
    lenient: list[LenientRow] = []
    lenient_alphas: dict[str, list[float]] = {}
    if settings.lenience is not None:
        factors = settings.lenience.factors
        lenient_alphas = {name: lab.lenient_alphas(subject, factors) for name, subject in lab.all.items()}
        lenient, curves["lenience"] = lenience(
            lab, settings.lenience, lenient_alphas, costs[settings.batch_sizes[0]]
        )
    points: list[SweepPoint] = []
    if settings.sweep is not None:
        for temperature in settings.temperatures:
            more, curves[f"sweep, T={temperature:g}"] = sweep(lab, settings.sweep, temperature)
            points += more
    parts = {"train": texts.train, "validation": texts.validation, "test": texts.test}
    return Results(
        parts={
            name: Part(len(records), skipped, trained.cut[name])
            for (name, records), skipped in zip(parts.items(), texts.skipped, strict=True)
        },
        rows=rows,
        alphas=alphas,
        alpha_tokens={t: sum(map(len, answers)) for t, answers in lab.answers.items()},
        curves=curves,
        lenient=lenient,
        lenient_alphas=lenient_alphas,
        sweep=points,
        sweep_drafter=settings.sweep.drafter if settings.sweep is not None else "",
        rounds=rounds,
    )


def table(
    lab: Laboratory,
    stage: str,
    alphas: dict[str, dict[float, float]],
    costs: Costs,
    batch_size: int,
    temperature: float,
) -> tuple[list[Row], dict[str, Any], Curve]:
    """The rows of one batch size and temperature, all their rounds, and the cost curve."""
    settings, task = lab.settings, lab.config.task

    def choice(subject: Subject) -> tuple[int, float | None]:
        """gamma, and the alpha that it was chosen by: not that of the sentences that are timed."""
        if settings.gamma != "best":
            return settings.gamma, None
        alpha = lab.alpha(subject, temperature, validation=True)
        return lab.best_gamma(costs, alpha, subject, temperature), alpha

    choices = [choice(subject) for subject in lab.subjects]
    entries = [
        lab.entry(subject, gamma, temperature)
        for subject, (gamma, _) in zip(lab.subjects, choices, strict=True)
    ]
    timed = lab.speed(stage, entries, temperature, batch_size=batch_size)
    rows = []
    for entry, (gamma, choice_alpha) in zip(entries, choices, strict=True):
        name, line = entry.name, timed.line(entry)
        quality = None
        if settings.quality and batch_size == settings.batch_sizes[0]:
            quality = lab.quality(entry, temperature)
        # The paper decodes one sequence at a time.
        reference = paper.find(task.paper, entry.subject.paper, temperature) if batch_size == 1 else None
        rows.append(
            Row(
                task=task.name,
                drafter=name,
                paper=entry.subject.paper,
                temperature=temperature,
                batch_size=batch_size,
                gamma=gamma,
                choice_alpha=choice_alpha,
                alpha=alphas[name][temperature],
                c=line.c or 0.0,
                theory=cost.speedup(alphas[name][temperature], gamma, line.c or 0.0),
                line=line,
                plain=timed.plain,
                quality=quality,
                plain_quality=lab.plain[temperature],
                reference=reference,
            )
        )
    return rows, timed.rounds, timed.curve


def lenience(
    lab: Laboratory, wanted: Lenience, alphas: dict[str, list[float]], costs: Costs
) -> tuple[list[LenientRow], Curve]:
    """One drafter at temperature 1 for each lenience, and the cost curve. With ``gamma: best`` each lenience
    has the draft length that its own alpha makes the fastest, as in the paper."""
    settings, task = lab.settings, lab.config.task.paper
    subject, batch_size = lab.all[wanted.drafter], settings.batch_sizes[0]
    if settings.gamma == "best":
        chosen_by = lab.lenient_alphas(subject, wanted.factors, validation=True)
        gammas = [lab.best_gamma(costs, alpha, subject, 1.0) for alpha in chosen_by]
    else:
        gammas = [settings.gamma] * len(wanted.factors)
    entries = [
        Entry(f"{subject.name}, l={factor:g}", subject, gamma, verify.lenience(factor))
        for factor, gamma in zip(wanted.factors, gammas, strict=True)
    ]
    timed = lab.speed("lenience", entries, 1.0, batch_size=batch_size)
    comparable = settings.gamma == "best" and batch_size == 1
    rows = [
        LenientRow(
            factor=factor,
            alpha=alpha,
            gamma=entry.gamma,
            line=timed.line(entry),
            quality=lab.quality(entry, 1.0) if settings.quality else None,
            paper_alpha=paper.lenient_alpha(task, subject.paper, factor),
            paper_speedup=paper.lenient_speedup(task, subject.paper, factor) if comparable else None,
        )
        for factor, alpha, entry in zip(wanted.factors, alphas[subject.name], entries, strict=True)
    ]
    return rows, timed.curve


def sweep(lab: Laboratory, wanted: Sweep, temperature: float) -> tuple[list[SweepPoint], Curve]:
    """One drafter at several draft lengths, one sentence at a time, and the cost curve."""
    subject = lab.all[wanted.drafter]
    entries = [lab.entry(subject, gamma, temperature, f"gamma {gamma}") for gamma in wanted.gammas]
    timed = lab.speed(
        f"sweep, T={temperature:g}", entries, temperature, batch_size=1, sentences=wanted.sentences
    )
    lines = [timed.line(entry) for entry in entries]
    points = [
        SweepPoint(temperature, gamma, line.c or 0.0, line)
        for gamma, line in zip(wanted.gammas, lines, strict=True)
    ]
    return points, timed.curve
