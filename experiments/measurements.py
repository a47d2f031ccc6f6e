"""The tables of a study: the paper's main table, lenience, and a sweep over draft lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console

from experiments import alpha, cost, paper
from experiments.laboratory import Costs, Laboratory
from experiments.pipeline import Trained
from experiments.results import LenientRow, Results, Row, SweepPoint
from experiments.stages import Stages
from experiments.study import Lenience, Study, Sweep
from jspec import verify
from training import recipe
from training.data import Record


def measure(
    config: Study,
    trained: Trained,
    records: Sequence[Record],
    folder: Path,
    stages: Stages,
    console: rich.console.Console,
) -> Results:
    """Measure a trained study on the test ``records``; what was measured before, with the same models, on the
    same kind of device, is read."""
    lab = Laboratory(config, trained, records, folder, stages, console)
    settings, alphas = config.measure, lab.alphas()
    costs = {batch_size: lab.costs(batch_size) for batch_size in settings.batch_sizes}
    rows: list[Row] = []
    rounds: dict[str, Any] = {}
    for batch_size in settings.batch_sizes:
        for temperature in settings.temperatures:
            more, everything = table(lab, alphas, costs[batch_size], batch_size, temperature)
            rows += more
            rounds[f"batch {batch_size}, T={temperature:g}"] = everything
    lenient: list[LenientRow] = []
    lenient_alphas: dict[str, list[float]] = {}
    if settings.lenience is not None:
        lenient_alphas = lenience_alphas(lab, settings.lenience)
        lenient = lenience(lab, settings.lenience, lenient_alphas, rows)
    points = sweep(lab, settings.sweep) if settings.sweep is not None else []
    return Results(
        rows=rows,
        alphas=alphas,
        alpha_tokens={t: sum(map(len, answers)) for t, answers in lab.answers.items()},
        curves={batch_size: costs[batch_size].curve for batch_size in costs},
        fill=costs[settings.batch_sizes[0]].fill,
        lenient=lenient,
        lenient_alphas=lenient_alphas,
        sweep=points,
        sweep_drafter=settings.sweep.drafter if settings.sweep is not None else "",
        rounds=rounds,
    )


def table(
    lab: Laboratory,
    alphas: dict[str, dict[float, float]],
    costs: Costs,
    batch_size: int,
    temperature: float,
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of one batch size and temperature, and all their rounds."""
    settings = lab.settings
    gammas = {
        subject.name: cost.best_gamma_on(
            costs.curve,
            alphas[subject.name][temperature],
            costs.c[subject.name][temperature],
            settings.max_gamma,
        )
        if settings.gamma == "best"
        else settings.gamma
        for subject in lab.subjects
    }
    timed = lab.speed(
        f"speed, batch {batch_size}, T={temperature:g}",
        [lab.setting(subject, gammas[subject.name]) for subject in lab.subjects],
        temperature,
        {"drafters": lab.prints(lab.subjects), "gammas": gammas, "verify": settings.verify},
        batch_size=batch_size,
    )
    rows = []
    for subject, line in zip(lab.subjects, timed.lines[1:], strict=True):
        name, gamma = subject.name, gammas[subject.name]
        quality = None
        if settings.quality and batch_size == settings.batch_sizes[0]:
            quality = lab.quality(lab.setting(subject, gamma), subject, gamma, temperature)
        rows.append(
            Row(
                task=lab.config.task.name,
                drafter=name,
                paper=subject.paper,
                temperature=temperature,
                batch_size=batch_size,
                gamma=gamma,
                alpha=alphas[name][temperature],
                c=line.c or 0.0,
                theory=cost.speedup(alphas[name][temperature], gamma, line.c or 0.0),
                line=line,
                plain=timed.lines[0],
                quality=quality,
                plain_quality=lab.plain[temperature],
                reference=paper.find(lab.config.task.paper, subject.paper, temperature),
            )
        )
    return rows, timed.rounds


def lenience_alphas(lab: Laboratory, wanted: Lenience) -> dict[str, list[float]]:
    """Table 5: alpha of every drafter for each lenience, at temperature 1."""
    text = lab.written(1.0)
    found = {}
    for name, subject in lab.all.items():
        inputs = {
            "drafter": lab.fingerprints[name],
            "text": recipe.text_fingerprint(text),
            "factors": wanted.factors,
        }
        found[name] = lab.kept(
            f"lenient alpha, {name}",
            list[float],
            inputs,
            lambda subject=subject: alpha.lenient_alphas(lab.target, subject.laws, text, wanted.factors, 1.0),
        )
    return found


def lenience(
    lab: Laboratory,
    wanted: Lenience,
    alphas: dict[str, list[float]],
    rows: Sequence[Row],
) -> list[LenientRow]:
    """One drafter at temperature 1 for each lenience, with the draft length that it has in the table."""
    subject, batch_size = lab.all[wanted.drafter], lab.settings.batch_sizes[0]
    gamma = next(
        row.gamma
        for row in rows
        if (row.drafter, row.temperature, row.batch_size) == (subject.name, 1.0, batch_size)
    )
    every = [
        lab.setting(subject, gamma, verify.lenience(factor), f"{subject.name}, l={factor:g}")
        for factor in wanted.factors
    ]
    timed = lab.speed(
        "lenience",
        every,
        1.0,
        {"drafters": lab.prints([subject]), "gamma": gamma, "factors": wanted.factors},
        batch_size=batch_size,
    )
    return [
        LenientRow(
            factor=factor,
            alpha=alphas[subject.name][i],
            gamma=gamma,
            line=timed.lines[i + 1],
            quality=lab.quality(every[i], subject, gamma, 1.0),
            paper_alpha=paper.lenient_alpha(subject.paper, factor),
        )
        for i, factor in enumerate(wanted.factors)
    ]


def sweep(lab: Laboratory, wanted: Sweep) -> list[SweepPoint]:
    """One drafter at several draft lengths, one sentence at a time."""
    subject, points = lab.all[wanted.drafter], []
    for temperature in lab.settings.temperatures:
        timed = lab.speed(
            f"sweep, T={temperature:g}",
            [lab.setting(subject, gamma, None, f"gamma {gamma}") for gamma in wanted.gammas],
            temperature,
            {
                "drafters": lab.prints([subject]),
                "gammas": wanted.gammas,
                "verify": lab.settings.verify,
            },
            batch_size=1,
            sentences=wanted.sentences,
        )
        points += [
            SweepPoint(temperature, gamma, line.c or 0.0, line)
            for gamma, line in zip(wanted.gammas, timed.lines[1:], strict=True)
        ]
    return points
