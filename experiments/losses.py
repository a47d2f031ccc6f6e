"""Losses compared: one small drafter, the same text of the target, as many steps, several seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console

from experiments import pipeline, plots, report, sheets
from experiments.alpha import Laws, alpha, batches
from experiments.report import Speed
from experiments.results import named, packed, unpacked
from experiments.sheets import Sheet
from experiments.stages import Stages, clock
from experiments.study import Losses, Recipe, Study
from jspec import Model
from training import acceptance, recipe, text
from training.data import Example


class Outcome(NamedTuple):
    """A drafter that was trained with one loss and one seed, on the validation set."""

    alpha_0: float  # on what the target writes greedily
    alpha_1: float  # on what it writes at temperature 1
    greedy_agreement: float  # on the references
    validation_loss: float  # cross-entropy of the references


def compare(
    config: Losses,
    base: Study,
    texts: pipeline.Texts,
    folder: Path,
    stages: Stages,
    console: rich.console.Console,
) -> dict[str, list[Outcome]]:
    """Outcomes by loss, one a seed. The target and its text are those of the study in ``folder``, or made."""
    workshop = pipeline.Workshop(base, texts, folder, stages, console)
    workshop.write_answers(config.sources)
    references: list[Example] = list(workshop.corpus.validation[: config.validation_examples])  # type: ignore[arg-type]
    written = {
        temperature: text.answered(workshop.target, references, workshop.writing, temperature, 0)
        for temperature in (0.0, 1.0)
    }
    drafter = base.drafters[config.drafter]
    found: dict[str, list[Outcome]] = {}
    for name, chosen in config.losses.items():
        how = Recipe(loss=chosen.loss, loss_arguments=chosen.arguments, sources=config.sources)
        settings = pipeline.distillation(base, drafter, how)
        for seed in config.seeds:
            training = settings.training.model_copy(update={"steps": config.steps, "seed": seed})
            stage = f"loss {name}, seed {seed}"
            model = workshop.distil(
                stage,
                settings.model_copy(update={"training": training}),
                folder / "losses" / f"{name}-{config.steps}-seed{seed}",
            )
            value = stages.kept(
                f"{stage}, outcome",
                {
                    "model": recipe.model_fingerprint(model.lm.config, model.params),
                    "text": [recipe.text_fingerprint(part) for part in (references, *written.values())],
                },
                lambda model=model: packed(Outcome, judge(workshop.target, model, references, written)),
            )
            found.setdefault(name, []).append(unpacked(Outcome, value))
    return found


def judge(
    target: Model, drafter: Model, references: Sequence[Example], written: dict[float, list[Example]]
) -> Outcome:
    """One drafter on validation examples, and on the same with the target's answers."""
    laws = Laws(drafter.lm, drafter.params)
    on_references = acceptance.simulate(
        target.lm, target.params, drafter.lm, drafter.params, batches(target, references), temperatures=()
    )
    return Outcome(
        alpha(target, laws, written[0.0], 0.0),
        alpha(target, laws, written[1.0], 1.0),
        on_references["greedy_agreement"],
        on_references["validation_loss"],
    )


def sheet(config: Losses, outcomes: dict[str, list[Outcome]]) -> Sheet:
    """Means over the seeds with the range, best alpha at temperature 1 first, and what won."""

    def cell(values: list[Outcome], field: str) -> str:
        numbers = [getattr(value, field) for value in values]
        mean = sum(numbers) / len(numbers)
        return f"{mean:.3f} ({min(numbers):.3f}-{max(numbers):.3f})"

    def mean(name: str, field: str) -> float:
        return sum(getattr(value, field) for value in outcomes[name]) / len(outcomes[name])

    order = sorted(outcomes, key=lambda name: -mean(name, "alpha_1"))
    rows = [(name, *(cell(outcomes[name], field) for field in Outcome._fields)) for name in order]
    greedy = max(outcomes, key=lambda name: mean(name, "alpha_0"))
    headings = (
        "loss",
        "alpha T=1",
        "alpha T=0",
        "greedy agreement on references",
        "cross-entropy of references",
    )
    rows = [(row[0], row[2], row[1], *row[3:]) for row in rows]
    title = f"losses: {config.drafter}, {config.steps} steps, {len(config.seeds)} seeds"
    notes = (
        f"won at T=1: {order[0]}; won at T=0: {greedy}",
        "mean over the seeds (least-greatest), validation set; alphas on what the target wrote at that "
        "temperature",
    )
    return Sheet(title, headings, rows, notes)


def write(
    folder: Path,
    config: Losses,
    outcomes: dict[str, list[Outcome]],
    stages: Stages,
    console: rich.console.Console,
) -> None:
    """losses.md, losses.json and losses.png in ``folder``, and the table on the terminal."""
    table, setup = sheet(config, outcomes), report.environment()
    sheets.show(console, table)
    mine = sum(entry["seconds"] for name, entry in stages.times.items() if name.startswith("loss "))
    setup["time of the comparison"] = clock(mine)
    plots.losses(
        folder / "losses.png",
        {
            name: (
                Speed.of([value.alpha_0 for value in values]),
                Speed.of([value.alpha_1 for value in values]),
            )
            for name, values in outcomes.items()
        },
    )
    lines = [sheets.markdown(table), *(f"* {name}: {value}" for name, value in setup.items())]
    lines += ["", "![losses](losses.png)", ""]
    (folder / "losses.md").write_text("\n".join(lines), encoding="utf-8")
    content: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "setup": setup,
        "outcomes": named(outcomes),
    }
    (folder / "losses.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    console.print(f"\nwritten: {folder}/losses.md, losses.json, losses.png", markup=False, highlight=False)
