"""Losses compared: one small drafter, the same text of the target, as many steps, several seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console

from experiments import pipeline, plots, sheets
from experiments.alpha import Laws, alpha, batches, together
from experiments.report import Speed
from experiments.results import fields, named, unpacked
from experiments.sheets import Sheet
from experiments.stages import Stages, clock
from experiments.study import Losses, Recipe, Study
from jspec import Model
from training import acceptance, recipe
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
        temperature: pipeline.validated(base, workshop.target, references, temperature, stages, console)
        for temperature in (0.0, 1.0)
    }
    drafter = base.drafters[config.drafter]
    found: dict[str, list[Outcome]] = {}
    for name, chosen in config.losses.items():
        how = Recipe(
            loss=chosen.loss,
            loss_arguments=chosen.arguments,
            sources=config.sources,
            features=config.features,
        )
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
                    "dtype": base.measure.dtype,
                    "fields": fields(Outcome),
                },
                lambda model=model: named(
                    judge(workshop.target, model, references, written, base.measure.dtype)
                ),
            )
            found.setdefault(name, []).append(unpacked(Outcome, value))
    return found


def judge(
    target: Model,
    drafter: Model,
    references: Sequence[Example],
    written: dict[float, list[Example]],
    dtype: str,
) -> Outcome:
    """One drafter, computing in ``dtype``, on validation examples and on the target's answers to them."""
    laws = Laws(drafter.lm, drafter.params, dtype)
    p, q = together(target, laws)
    on_references = acceptance.simulate(
        p,
        target.params,
        q,
        drafter.params,
        batches(target, references),
        width=target.vocab_size,
        temperatures=(),
        dtype=dtype,
    )
    return Outcome(
        alpha(target, laws, written[0.0], 0.0),
        alpha(target, laws, written[1.0], 1.0),
        on_references["greedy_agreement"],
        on_references["validation_loss"],
    )


def spread(outcomes: Sequence[Outcome], field: str) -> Speed:
    """Median and range over the seeds: what the table and the picture show."""
    return Speed.of([getattr(outcome, field) for outcome in outcomes])


def standing(outcomes: dict[str, list[Outcome]], field: str) -> str:
    """The loss of the highest median, and the others whose range overlaps its own."""
    ranges = {name: spread(values, field) for name, values in outcomes.items()}
    first = max(ranges, key=lambda name: ranges[name].median)
    near = [name for name in ranges if name != first and ranges[name].high >= ranges[first].low]
    return first + (f", not separated from {', '.join(near)}" if near else "")


def sheet(config: Losses, outcomes: dict[str, list[Outcome]]) -> Sheet:
    """Medians over the seeds with the range, best alpha at temperature 1 first, and what stands out."""
    columns = {
        "alpha T=1": "alpha_1",
        "alpha T=0": "alpha_0",
        "greedy agreement on references": "greedy_agreement",
        "cross-entropy of references": "validation_loss",
    }
    order = sorted(outcomes, key=lambda name: -spread(outcomes[name], "alpha_1").median)
    rows = [(name, *(spread(outcomes[name], field).text(3) for field in columns.values())) for name in order]
    title = f"losses: {config.drafter}, {config.steps} steps, {len(config.seeds)} seeds"
    notes = (
        f"highest at T=1: {standing(outcomes, 'alpha_1')}; at T=0: {standing(outcomes, 'alpha_0')}",
        "median over the seeds (least-greatest), validation set; alphas on what the target wrote at that "
        "temperature; losses whose ranges overlap are not separated",
    )
    return Sheet(title, ("loss", *columns), rows, notes)


def write(
    folder: Path,
    config: Losses,
    outcomes: dict[str, list[Outcome]],
    stages: Stages,
    console: rich.console.Console,
) -> None:
    """losses.md, losses.json and losses.png in ``folder``, and the table on the terminal."""
    table = sheet(config, outcomes)
    sheets.show(console, table)
    mine = sum(entry["seconds"] for name, entry in stages.times.items() if name.startswith("loss "))
    alphas = {
        name: (spread(values, "alpha_0"), spread(values, "alpha_1")) for name, values in outcomes.items()
    }
    plots.losses(folder / "losses.png", alphas)
    origins = stages.origins(lambda name: name.partition(",")[0] if name.startswith("loss ") else None)
    parts = [sheets.markdown(table), f"Time of the comparison: {clock(mine)}", "", origins]
    parts += ["", "![losses](losses.png)", ""]
    (folder / "losses.md").write_text("\n".join(parts), encoding="utf-8")
    content: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "environments": stages.environments,
        "stages": {name: entry for name, entry in stages.times.items() if name.startswith("loss ")},
        "outcomes": named(outcomes),
    }
    (folder / "losses.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    console.print(f"\nwritten: {folder}/losses.md, losses.json, losses.png", markup=False, highlight=False)
