"""A measured study as sheets and files: the paper's tables beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rich.console

from experiments import paper, plots, report, sheets
from experiments.results import OFF, Curve, Part, Results, Row, named
from experiments.sheets import Sheet
from experiments.stages import Stages, clock
from experiments.study import Data, Study
from training import readers

MARK = "†"
MEASUREMENTS = (
    "answers",
    "answers on validation",
    "features",
    "test",
    "alpha",
    "alpha on validation",
    "costs",
    "speed",
    "lenient alpha",
    "lenient alpha on validation",
    "sweep",
)  # first words of stages
NEAR_TIES = "{float32:g} apart ({bfloat16:g} in bfloat16)".format_map(report.NEAR_TIE)
LEGEND = f"""\
* Speed-up: of whole inference (headline; encoders of target and drafter, reading, decoding, and all that the
  host does between), and of decoding alone. Each setting decodes each sentence in turn with plain decoding;
  tokens per second over all sentences, median (least-greatest) of the repeats. Above temperature 0 every
  repeat draws with seeds of its own, the same for plain decoding and all settings, so that the spread holds
  the chance of sampling, and tau is that of all repeats. Compilation is never timed.
* alpha: mean of sum min(p, q) over the target's own answers to the test set at that temperature. c: time of a
  drafter step over t(1), the target's forward over one token; both measured in loops on the device, just
  before the decoding.
* At temperature 0 models draft their likeliest tokens, which are compared with the target's: the verdict of
  every lossless rule there.
* gamma: given, or the draft length that alpha on the target's answers to *validation* sources, c and t(n)
  make the fastest.
* Thm 3.8: (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)), where a forward over gamma + 1 tokens costs
  as much as over one. Expected: from the tau of this decoding and the measured costs, tau over
  (t(gamma + 1) / t(1) + gamma c), with the drafter's extra forward in rounds that follow a draft accepted
  whole; for whole inference with the measured time before the first round, too. A row marked {MARK} is more
  than {OFF:.0%} off that, and explained below the table; what is left of a round is verifying, committing,
  bookkeeping, and what the loops that measure the parts do not see.
* Same tokens: the whole test set against plain decoding, at T = 0; where a number of sentences is given, the
  timed ones. A sentence that differs counts as equal only where the target's two best logits, after what
  plain decoding wrote up to there, are less than {NEAR_TIES}: a near-tie.
  "In law": sampled.
* The paper's figures: {paper.SOURCE}, at batch size 1; rows from Tables 2 and 4. Another model and machine
  (T5-XXL, one TPU v4), and other data ({paper.TASKS["ende"]} or {paper.TASKS["cnndm"]}) unless the table
  "data" names the same. Its appendix A.5 prints the lenient rule for argmax decoding with "<=" where ">="
  is meant."""


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _same(row: Row, dtype: str) -> str:
    """Whether speculation gave plain decoding's tokens; of how many sentences, where not of all."""
    if row.quality is not None:
        line = row.line._replace(flips=row.quality.flips, num_prompts=row.quality.sentences)
        return report.equality(line, report.NEAR_TIE[dtype])
    found = report.equality(row.line, report.NEAR_TIE[dtype])
    return f"{found} ({row.line.num_prompts} sentences)" if found.startswith("yes") else found


def _reference(row: Row) -> str:
    found = row.reference
    if found is None:
        return "-"
    figures = (found.gamma, f"{found.alpha:.2f}", f"{found.c:.2f}", found.expected, found.measured)
    return f"{paper.TASKS[found.task]}, {found.drafter}: " + " / ".join(map(str, figures))


def main_sheet(results: Results, title: str, config: Study) -> Sheet:
    """The rows task x Mq x temperature (x batch size)."""
    batches = len({row.batch_size for row in results.rows}) > 1
    metric = results.rows[0].plain_quality.metric
    headings = (
        "task",
        "Mq",
        "T",
        *(("B",) if batches else ()),
        "gamma",
        "alpha",
        "c",
        "Thm 3.8",
        "expected",
        "speed-up",
        "decoding: expected",
        "decoding: speed-up",
        "tau",
        f"{metric} plain",
        f"{metric} speculative",
        "same tokens",
        "paper: gamma / alpha / c / Thm 3.8 / speed-up",
    )
    rows = []
    for row in results.rows:
        mark = MARK if explanation(row) else ""
        rows.append(
            (
                row.task,
                row.drafter,
                f"{row.temperature:g}",
                *((str(row.batch_size),) if batches else ()),
                str(row.gamma),
                _number(row.alpha),
                _number(row.c, 3),
                _number(row.theory),
                _number(row.line.predicted_overall),
                row.line.overall_speedup.text() + mark,
                _number(row.line.predicted),
                row.line.speedup.text() + mark,
                _number(row.line.tau),
                _number(row.plain_quality.score),
                _number(row.quality.score if row.quality else None),
                _same(row, config.measure.dtype),
                _reference(row),
            )
        )
    left = (0, 1, len(headings) - 2, len(headings) - 1)
    notes = [note for row in results.rows if (note := explanation(row))]
    notes += [
        f"{row.drafter}, T={row.temperature:g}, B={row.batch_size}: gamma is the greatest allowed, a longer "
        "draft may be faster"
        for row in results.rows
        if row.choice_alpha is not None and row.gamma == config.measure.max_gamma
    ]
    stated = [paper.bigram_speedup(config.task.paper, row.paper) for row in results.rows]
    if (speedup := next(filter(None, stated), None)) is not None:
        where = paper.TASKS[paper.ONLY]
        notes.append(f"the paper has a speed-up of {speedup} for its bigram model on {where}, gamma 3, c = 0")
    return Sheet(title, headings, rows, tuple(notes), left)


def explanation(row: Row) -> str:
    """What is left where a speed-up is not what tau and the costs let one expect; "" where it is."""
    if abs(row.off) <= OFF and abs(row.overall_off) <= OFF:
        return ""
    mine, plain = row.line.round, row.plain.round
    assert mine is not None
    assert plain is not None

    def parts(round: report.Round) -> str:
        return (
            f"{1e3 * round.seconds:.2f} ms (forward {1e3 * round.forward:.2f}, drafting "
            f"{1e3 * round.drafting:.2f}, left {1e3 * round.rest:.2f})"
        )

    return (
        f"{row.drafter}, T={row.temperature:g}, B={row.batch_size}: {row.off:+.0%} (decoding) and "
        f"{row.overall_off:+.0%} (whole inference) off the expectation. A round takes {parts(mine)}, a plain "
        f"step {parts(plain)}"
    )


def _beside(table: str, task: str | None) -> str:
    """For titles: which figures of the paper stand in a table, if any."""
    return "" if task is None else f" (the paper's {table}, {paper.TASKS[task]}, beside it)"


def alpha_sheet(results: Results, task: str | None, subjects: dict[str, str | None]) -> Sheet:
    """Table 3. ``subjects``: the paper's drafter beside each of ours."""
    temperatures = sorted(results.alpha_tokens)
    headings = ("Mq", *(part for t in temperatures for part in (f"alpha T={t:g}", f"paper T={t:g}")))
    rows = []
    for name, alphas in results.alphas.items():
        cells = [(_number(alphas[t]), _number(paper.alpha(task, subjects[name], t))) for t in temperatures]
        rows.append((name, *(cell for pair in cells for cell in pair)))
    tokens = ", ".join(f"{results.alpha_tokens[t]} tokens at T={t:g}" for t in temperatures)
    return Sheet(
        "alpha of every drafter" + _beside("Table 3", task),
        headings,
        rows,
        (f"mean of sum min(p, q) over text that the target wrote: {tokens}; the paper has 10,000",),
    )


def lenience_sheets(results: Results, config: Study, subjects: dict[str, str | None]) -> list[Sheet]:
    """Table 5: one drafter decoded, and the alphas of all."""
    if not results.lenient:
        return []
    task, settings = config.task.paper, config.measure
    name = results.lenient[0].line.name.rpartition(", l=")[0]
    headings = (
        "l",
        "law",
        "gamma",
        "alpha",
        "tau",
        "expected",
        "speed-up",
        results.rows[0].plain_quality.metric,
        "paper alpha",
        "paper says",
    )
    rows = [
        (
            f"{row.factor:g}",
            "exact" if row.factor == 1 else "lossy",
            str(row.gamma),
            _number(row.alpha),
            _number(row.line.tau),
            _number(row.line.predicted_overall),
            row.line.overall_speedup.text(),
            _number(row.quality.score if row.quality else None),
            _number(row.paper_alpha),
            _number(row.paper_speedup, 1),
        )
        for row in results.lenient
    ]
    notes = [
        "a drafted token is accepted with probability min(1, p / (l q)); no token comes out with more than "
        "p / l"
    ]
    if settings.gamma == "best":
        most = settings.max_gamma
        notes.append(f"gamma: for each l what its alpha, on validation, makes the fastest, of at most {most}")
    else:
        notes.append(f"gamma is {settings.gamma} for every l; the paper's speed-ups are at the best gamma")
    if any(row.paper_speedup is not None for row in results.lenient):
        notes.append("the paper says: for c = 0.015, in the text of appendix A.5")
    decoded = Sheet(f"lenience at T=1, LOSSY below l = 1: {name}", headings, rows, tuple(notes), (1,))
    factors = [row.factor for row in results.lenient]
    rows = []
    for subject, alphas in results.lenient_alphas.items():
        pairs = zip(factors, alphas, strict=True)
        cells = [(_number(a), _number(paper.lenient_alpha(task, subjects[subject], f))) for f, a in pairs]
        rows.append((subject, *(cell for pair in cells for cell in pair)))
    headings = ("Mq", *(part for f in factors for part in (f"alpha l={f:g}", f"paper l={f:g}")))
    beside = _beside("Table 5", task if task == paper.ONLY else None)
    return [decoded, Sheet("alpha by lenience at T=1" + beside, headings, rows)]


def curve_sheet(curves: dict[str, Curve]) -> Sheet:
    """t(n) as each stage measured it, just before it decoded: what its expectations rest on."""
    rows = [
        (
            stage,
            str(curve.fill),
            _number(1e3 * curve.cost.seconds[0]),
            ", ".join(f"{width}: {curve.cost.relative(width):.2f}" for width in curve.cost.widths[1:]),
        )
        for stage, curve in curves.items()
    ]
    return Sheet(
        "t(n), the target's forward over n tokens of each row",
        ("measured for", "cached tokens", "t(1) in ms", "n: t(n) / t(1)"),
        rows,
        ("costs: what draft lengths are chosen by; the others: what is expected of the rows of that stage",),
        (0, 3),
    )


def data_sheet(data: Data, parts: dict[str, Part]) -> Sheet:
    """Which texts these are, and what became of others."""

    def place(part: readers.DataConfig) -> str:
        if isinstance(part, readers.Several):
            return "; ".join(map(place, part.parts))
        if isinstance(part, readers.Hub):
            return " ".join(filter(None, (part.id, part.config, part.split)))
        return f"{part.source}, {part.target}" if isinstance(part, readers.Parallel) else part.file

    rows = [(name, place(getattr(data, name)), *map(str, part)) for name, part in parts.items()]
    headings = ("part", "from", "pairs", "left out: a side is empty", "sources cut")
    return Sheet("data", headings, rows, left=(0, 1))


def _kind(stage: str) -> str:
    """Measurements of one kind have one name."""
    kind = stage.partition(", ")[0]
    return kind if kind in MEASUREMENTS else stage


def times_sheet(stages: Stages) -> Sheet:
    """What every stage took, all attempts together; measurements of one kind are summed."""
    times: dict[str, list[float]] = {}
    for name, entry in stages.times.items():
        mine = times.setdefault(_kind(name), [0.0, 0])
        mine[0] += entry["seconds"]
        mine[1] += entry["attempts"]
    rows = [(name, clock(seconds), str(attempts)) for name, (seconds, attempts) in times.items()]
    return Sheet("time", ("stage", "time", "runs"), [*rows, ("total", clock(stages.total), "")])


def write(
    folder: Path,
    config: Study,
    results: Results,
    subjects: dict[str, str | None],
    stages: Stages,
    console: rich.console.Console,
) -> None:
    """The tables on the terminal; table.md, table.tex, table.json and the pictures in ``folder``."""
    first = results.rows[0]
    title = (
        f"{config.task.name}, {config.measure.dtype}, first {first.line.num_prompts} test sentences, "
        f"{config.measure.repeats} repeats, {config.measure.verify} rule"
        + _beside("Tables 2 and 4", config.task.paper)
    )
    all_sheets = [
        main_sheet(results, title, config),
        alpha_sheet(results, config.task.paper, subjects),
        *lenience_sheets(results, config, subjects),
        curve_sheet(results.curves),
        data_sheet(config.data, results.parts),
        times_sheet(stages),
    ]
    for sheet in all_sheets:
        sheets.show(console, sheet)
    score = f"Scored with: {first.plain_quality.signature}"
    closing = [LEGEND, score, stages.origins(_kind)]
    for text in closing:
        console.print("\n" + text, markup=False, highlight=False, soft_wrap=True)
    pictures = plots.write(folder, results)
    shown = [f"![{path.stem}]({path.name})" for path in pictures]
    parts = [*map(sheets.markdown, all_sheets), *(f"{text}\n" for text in closing), *shown, ""]
    (folder / "table.md").write_text("\n".join(parts), encoding="utf-8")
    (folder / "table.tex").write_text(
        sheets.document([sheets.latex(sheet) for sheet in all_sheets[:-1]]), encoding="utf-8"
    )
    content: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "score": first.plain_quality.signature,
        "environments": stages.environments,
        "stages": stages.times,
        "results": named(results),
    }
    (folder / "table.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    names = ", ".join(["table.md", "table.tex", "table.json", *(path.name for path in pictures)])
    console.print(f"\nwritten: {folder}/{names}", markup=False, highlight=False, soft_wrap=True)
