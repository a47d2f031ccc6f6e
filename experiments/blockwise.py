"""Blockwise parallel decoding (Stern, Shazeer, Uszkoreit 2018, arXiv 1811.03115): the paper's sweep over the
block size on the target of a study, and its heads beside a block drafter and a distilled small model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from experiments import pipeline, plots, sheets
from experiments.alpha import Laws
from experiments.config import Blockwise
from experiments.laboratory import Entry, Laboratory, Scored
from experiments.pipeline import ANSWERS, Network, Subject, Workshop, finished
from experiments.report import Line, equality
from experiments.results import Quality, named
from experiments.sheets import Sheet
from experiments.stages import Stages, clock
from experiments.study import Study
from jspec import Model, verify
from jspec.drafters.stored import Stored
from jspec.types import PyTree
from training import blockwise, drafter
from training.text import Source

Result = TypeVar("Result")

FOLDER = "blockwise"  # of all runs, within the study's
BLOCK = "masked"  # the block drafter's name


class Column(NamedTuple):
    """A way to train: on whose answers, and whether the base learns, too."""

    source: Source
    joint: bool


COLUMNS = {
    "regular": Column(Source(text="references"), joint=False),
    "distillation": Column(Source(text="target"), joint=False),
    "fine tuning": Column(Source(text="references"), joint=True),
    "both": Column(Source(text="target"), joint=True),
}
TIMED = ("distillation", "both")  # the best of either kind of base in the paper

#: Stern et al., Table 1: newstest2013 English-German, BLEU and mean accepted block size by k.
TABLE_1: dict[str, dict[int, tuple[float, float]]] = {
    "regular": {
        1: (26.00, 1.00),
        2: (25.81, 1.51),
        4: (25.84, 1.73),
        6: (26.08, 1.76),
        8: (25.82, 1.76),
        10: (25.69, 1.74),
    },
    "distillation": {
        1: (26.41, 1.00),
        2: (26.52, 1.55),
        4: (26.31, 1.85),
        6: (26.26, 1.90),
        8: (26.25, 1.91),
        10: (26.34, 1.90),
    },
    "fine tuning": {
        2: (25.74, 1.78),
        4: (25.05, 2.69),
        6: (24.69, 2.98),
        8: (24.27, 3.01),
        10: (23.51, 2.87),
    },
    "both": {2: (26.58, 1.88), 4: (26.36, 3.27), 6: (26.18, 4.18), 8: (26.11, 4.69), 10: (25.60, 4.95)},
}
#: Their Table 4: wall-clock speed-up of "both" on newstest2014, one sentence at a time.
TABLE_4 = {2: 1.72, 4: 2.69, 6: 3.10, 8: 3.31, 10: 3.04}


class Compared(NamedTuple):
    """A drafter of the comparing table."""

    name: str
    drafted: int  # tokens a round
    parameters: int
    line: Line
    scored: Scored


class Results(NamedTuple):
    """Everything that is measured."""

    plain: Quality  # the study's target
    cells: dict[str, dict[int, Scored]]  # column -> k
    speeds: dict[str, dict[int, Line]]  # column -> k
    compared: list[Compared]


class Trained(NamedTuple):
    """What is measured: the study's target, what drafts for it, and bases with heads of their own."""

    target: Model
    frozen: dict[str, dict[int, Stored]]  # column -> k
    joint: dict[str, dict[int, blockwise.Trained]]
    block: Stored
    small: Subject


# --- training -----------------------------------------------------------------------------------------


def train(config: Blockwise, workshop: Workshop) -> Trained:
    """Everything that is not trained yet; the target and its text are those of the study, or made."""
    workshop.write_answers([column.source for column in COLUMNS.values()])
    # First what may be found wrong only beside the target, such as layers that it lacks.
    output = workshop.folder / FOLDER / BLOCK
    block = _heads(config.block(Source(text="target")), workshop, f"blockwise, {BLOCK}", output)
    small = _small(config.drafter, workshop)
    frozen: dict[str, dict[int, Stored]] = {}
    joint: dict[str, dict[int, blockwise.Trained]] = {}
    for name, column in COLUMNS.items():
        for k in config.block_sizes:
            output = workshop.folder / FOLDER / f"k{k}-{name.replace(' ', '-')}"
            if column.joint:
                settings = config.joined(k, column.source)
                found = _trained(blockwise.run, settings, workshop, stage(k, name), output)
                joint.setdefault(name, {})[k] = found._replace(base=workshop.cast(found.base))
            else:
                heads = _heads(config.heads(k, column.source), workshop, stage(k, name), output)
                frozen.setdefault(name, {})[k] = heads
            jax.clear_caches()  # programs of one k are of no use to the next
    return Trained(workshop.target, frozen, joint, block, small)


def stage(k: int, column: str) -> str:
    """What training one entry of the table is called."""
    return f"blockwise, k={k}, {column}"


def _heads(settings: drafter.Drafter, workshop: Workshop, stage: str, output: Path) -> Stored:
    """A draft network; what it reads of the target is a stage of its own."""
    if settings.features is not None and not finished(output):
        workshop.keep_features(settings.sources, settings.features)
    return _trained(drafter.run, settings, workshop, stage, output)


def _trained(
    run: Callable[..., Result], settings: Any, workshop: Workshop, stage: str, output: Path
) -> Result:
    """What a recipe makes of the study's target and corpus."""
    names = ("limits", "max_new_tokens", "generation_batch")
    study = {name: getattr(workshop.config, name) for name in names}
    with workshop.stages.timed(stage, done=finished(output)):
        return run(
            settings.model_copy(update=study),
            workshop.corpus,
            output,
            target=workshop.target,
            cache=workshop.folder / ANSWERS,
            console=workshop.console,
        )


def _small(row: str, workshop: Workshop) -> Subject:
    """A drafter of the study, as its table has it."""
    study = workshop.config
    name, how = study.rows()[row]
    if how is None:
        model = workshop.given(name)
    else:
        workshop.write_answers(study.recipes[how].sources)
        model = workshop.train(row)
    laws = Laws(model.lm, model.params, study.measure.dtype)
    return Subject(row, study.drafters[name].paper, laws, model)


# --- measuring ----------------------------------------------------------------------------------------


def measure(config: Blockwise, workshop: Workshop, texts: pipeline.Texts, trained: Trained) -> Results:
    """Measure on the study's test set; what was measured before is read.

    Of all that drafts for the study's target the columns of `TIMED`, block drafter and small model are timed
    in turn; a base that was trained with its heads is timed in turn with its own plain decoding.
    """
    study, stages, console = _measured(config, workshop.config), workshop.stages, workshop.console
    test, _ = pipeline.encode_test(study, trained.target, texts.test, console)
    validation: Any = list(workshop.corpus.validation[: pipeline.VALIDATION])

    def laboratory(target: Model, label: str, subjects: dict[str, Subject]) -> Laboratory:
        given = pipeline.Trained(target, subjects, test, validation, {})
        return Laboratory(study, given, texts.test, workshop.folder, stages, console, label)

    lab = laboratory(trained.target, "blockwise, ", {trained.small.name: trained.small})
    cells: dict[str, dict[int, Scored]] = {name: {} for name in COLUMNS}
    speeds: dict[str, dict[int, Line]] = {name: {} for name in TIMED}
    heads = {
        (name, k): _entry(f"{name}, k={k}", stored, k - 1)
        for name, row in trained.frozen.items()
        for k, stored in row.items()
    }
    for (name, k), entry in heads.items():
        cells[name][k] = lab.scored(entry)
    block = _entry(BLOCK, trained.block, config.draft_length)
    small = lab.entry(trained.small, _gamma(lab, trained.small), 0.0)
    entries = [entry for (name, _), entry in heads.items() if name in TIMED] + [block, small]
    timed = lab.speed("speed", entries, 0.0, batch_size=1)
    for (name, k), entry in heads.items():
        if name in TIMED:
            speeds[name][k] = timed.line(entry)
    for name, row in trained.joint.items():
        for k, found in row.items():
            own = laboratory(found.base, f"{stage(k, name)}, ", {})
            entry = _entry(f"{name}, k={k}", found.heads, k - 1)
            cells[name][k] = own.scored(entry)
            if name in TIMED:
                speeds[name][k] = own.speed("speed", [entry], 0.0, batch_size=1).line(entry)
    compared = []
    for name, lines in speeds.items():
        k = best(lines)
        fastest = trained.joint[name][k].heads if COLUMNS[name].joint else trained.frozen[name][k]
        size = _size(fastest.weights.net)
        compared.append(Compared(f"BPD, k={k}, {name}", k - 1, size, lines[k], cells[name][k]))
    for entry, params in ((block, trained.block.weights.net), (small, trained.small.laws.params)):
        size, line = _size(params), timed.line(entry)
        compared.append(Compared(entry.name, entry.gamma, size, line, lab.scored(entry)))
    return Results(lab.plain[0.0], cells, speeds, compared)


def _measured(config: Blockwise, study: Study) -> Study:
    """The study, with what this table measures in place of its own."""
    changes = {"temperatures": (0.0,), "batch_sizes": (1,), "drafters": None, "sweep": None, "lenience": None}
    changes |= {"sentences": config.sentences, "repeats": config.repeats}
    return study.model_copy(update={"measure": study.measure.model_copy(update=changes)})


def _entry(name: str, stored: Stored, gamma: int) -> Entry:
    """A network's likeliest tokens, which greedy decoding compares with its target's."""
    return Entry(name, Network(name, stored), gamma, verify.target_only(), sample=False)


def _gamma(lab: Laboratory, subject: Subject) -> int:
    """The draft length of a model, chosen as the study's table does."""
    if lab.settings.gamma != "best":
        return lab.settings.gamma
    alpha = lab.alpha(subject, 0.0, validation=True)
    return lab.best_gamma(lab.costs(1), alpha, subject, 0.0)


def best(lines: dict[int, Line]) -> int:
    """The block size of the greatest median speed-up."""
    return max(lines, key=lambda k: lines[k].speedup.median)


def _size(params: PyTree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))


# --- tables -------------------------------------------------------------------------------------------


def table_1(study: Study, config: Blockwise, results: Results) -> Sheet:
    """BLEU and mean accepted block size by k, in the shape of the paper's Table 1."""
    metric = results.plain.metric
    columns = [*COLUMNS, *(f"Stern, {name}" for name in COLUMNS)]
    rows = []
    for k in (1, *config.block_sizes):
        mine = [_cell(_of(results, name, k)) for name in COLUMNS]
        theirs = [_cell(TABLE_1[name].get(k)) for name in COLUMNS]
        rows.append((str(k), *mine, *theirs))
    differ = [
        f"{name}, k={k}: {len(cell.quality.flips)} of {cell.quality.sentences} sentences differ from plain "
        f"decoding, where its two best logits are at most {max(flip.gap for flip in cell.quality.flips):.2g} "
        "apart"
        for name, row in results.cells.items()
        for k, cell in row.items()
        if cell.quality.flips
    ]
    notes = (
        f"{metric} / mean accepted block size (tau: tokens a forward) over {results.plain.sentences} test "
        "sentences, greedy and exact",
        "regular: heads beside the study's target, learned from references; distillation: from what the "
        "target writes greedily; fine tuning, both: the same two with the base learning, too, one random "
        "head's loss a step",
        f"p_1 is the base's own head, as it is: beside a frozen base {metric} is the base's whatever k is. "
        "Stern et al. transform p_1, too, and their distilled bases learned from another model's text, found "
        "by beam search",
        "Stern: Table 1 of arXiv 1811.03115, newstest2013 English-German, transformer_base, a million steps "
        "for the base and as many for the heads",
        *differ,
    )
    title = f"{study.task.name}: {metric} / mean accepted block size"
    return Sheet(title, ("k", *columns), rows, notes)


def _of(results: Results, column: str, k: int) -> tuple[float, float] | None:
    """Score and block size; k = 1 is plain decoding, which every column but those of joint training has."""
    if k == 1:
        return None if COLUMNS[column].joint else (results.plain.score, 1.0)
    cell = results.cells[column][k]
    return cell.quality.score, cell.tau


def _cell(value: tuple[float, float] | None) -> str:
    return "-" if value is None else f"{value[0]:.2f} / {value[1]:.2f}"


def speeds(config: Blockwise, results: Results) -> Sheet:
    """Measured speed-ups by k, beside the paper's Table 4."""
    rows = [
        (
            str(k),
            *(results.speeds[name][k].speedup.text() for name in TIMED),
            f"{TABLE_4[k]:.2f}" if k in TABLE_4 else "-",
        )
        for k in config.block_sizes
    ]
    notes = (
        f"speed-up of decoding over plain decoding of the same base, one sentence at a time, "
        f"{config.sentences} sentences, median (least-greatest) of {config.repeats} repeats",
        "Stern: Table 4 of arXiv 1811.03115, newstest2014 English-German",
    )
    return Sheet("speed-up by k", ("k", *TIMED, "Stern, both"), rows, notes)


def comparison(config: Blockwise, results: Results) -> Sheet:
    """Blockwise decoding, the block drafter and the small model in one table."""
    headings = ("drafter", "drafted", "parameters", "tau", "c", "tokens/s", "speed-up")
    headings += (results.plain.metric, "equals plain")
    rows = [
        (
            one.name,
            str(one.drafted),
            f"{one.parameters / 1e6:.1f}M",
            f"{one.line.tau:.2f}",
            f"{one.line.c or 0:.3f}",
            one.line.decode.text(1),
            one.line.speedup.text(),
            f"{one.scored.quality.score:.2f}",
            equality(one.line),
        )
        for one in results.compared
    ]
    notes = (
        f"greedy, one sentence at a time, the first {config.sentences} test sentences, {config.repeats} "
        "repeats in turn with plain decoding of the same base: median (least-greatest); "
        f"{results.plain.metric} of all {results.plain.sentences}, with plain decoding of the study's "
        f"target {results.plain.score:.2f}",
        "tau: tokens a forward of the target; c: the time of a round's drafting over the tokens drafted and "
        "the time of a forward on one token",
        "BPD: the k of the greatest speed-up on these sentences; both: with a base of its own, which wrote "
        "other answers",
        f"{BLOCK}: SpecDec's block drafter (arXiv 2203.16487), begun as layers of the target, with exact "
        "acceptance",
    )
    return Sheet("drafters of one target", headings, rows, notes, left=(0, len(headings) - 1))


def write(config: Blockwise, study: Study, results: Results, stages: Stages) -> None:
    """blockwise.md, .json and .png in the study's folder, and the tables on the terminal."""
    folder, console = stages.folder, stages.console
    found = (table_1(study, config, results), comparison(config, results), speeds(config, results))
    for sheet in found:
        sheets.show(console, sheet)
    mine = {name: entry for name, entry in stages.times.items() if name.startswith("blockwise")}
    plots.blockwise(
        folder / "blockwise.png",
        {name: {k: cell.tau for k, cell in row.items()} for name, row in results.cells.items()},
        {name: {k: tau for k, (_, tau) in row.items()} for name, row in TABLE_1.items()},
        {name: {k: line.speedup for k, line in row.items()} for name, row in results.speeds.items()},
    )
    parts = [sheets.markdown(sheet) for sheet in found]
    parts += [f"Time of the comparison: {clock(sum(entry['seconds'] for entry in mine.values()))}", ""]
    parts += [stages.origins(lambda name: _told(name) if name in mine else None)]
    parts += ["", "![blockwise](blockwise.png)", ""]
    (folder / "blockwise.md").write_text("\n".join(parts), encoding="utf-8")
    content = {
        "config": config.model_dump(mode="json"),
        "environments": stages.environments,
        "stages": mine,
        "results": named(results),
    }
    (folder / "blockwise.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    console.print(f"\nwritten: {folder}/blockwise.md, blockwise.json, blockwise.png", highlight=False)


def _told(stage: str) -> str:
    return ", ".join(stage.split(", ")[:3])
