"""A measured study as sheets and files: the paper's tables beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import rich.console

from experiments import paper, plots, report, sheets
from experiments.results import OFF, Quality, Results, Row, named
from experiments.sheets import Sheet
from experiments.stages import Stages, clock
from experiments.study import Study

MARK = "†"
MEASUREMENTS = (
    "answers",
    "test",
    "alpha",
    "costs",
    "speed",
    "lenient alpha",
    "sweep",
)  # first words of stages
#: By dtype: logits of plain decoding that are less apart may change places in a block of another shape. In
#: bfloat16 numbers between 16 and 32 are 0.125 apart.
NEAR_TIE = {"float32": report.FLIP_GAP, "bfloat16": 0.25}
LEGEND = f"""\
* Speed-up: of whole inference (headline; encoders of target and drafter, reading, decoding, and all that the
  host does between), and of decoding alone. Each setting decodes each sentence in turn with plain decoding;
  tokens per second over all sentences, median (least-greatest) of the repeats. Compilation is never timed.
* alpha: mean of sum min(p, q) over the target's own answers to the test set at that temperature. c: time of a
  drafter step over t(1), the target's forward over one token; both measured in loops on the device, just
  before the decoding.
* Thm 3.8: (1 - alpha^(gamma + 1)) / ((1 - alpha) (gamma c + 1)), where a forward over gamma + 1 tokens costs
  as much as over one. Expected: from the tau of this decoding and the measured costs, tau over
  (t(gamma + 1) / t(1) + gamma c); for whole inference with the measured time before the first round, too. A
  row marked {MARK} is more than {OFF:.0%} off that, and explained below the table; what is left of a round
  is verifying, committing, bookkeeping, and what the loops that measure the parts do not see.
* Same tokens: the whole test set against plain decoding, at T = 0. A sentence that differs counts as equal
  only where plain decoding's two best logits are less than {NEAR_TIE["float32"]:g} apart
  ({NEAR_TIE["bfloat16"]:g} in bfloat16): a near-tie. "In law": sampled.
* The paper's rows: {paper.SOURCE}, Tables 2 and 4: another model and machine (T5-XXL, one TPU v4). Its
  appendix A.5 prints the lenient rule for argmax decoding with "<=" where ">=" is meant."""


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _same(quality: Quality | None, row: Row, dtype: str) -> str:
    """Whether speculation gave plain decoding's tokens."""
    line = row.line
    if quality is not None:
        line = line._replace(flips=quality.flips, num_prompts=quality.sentences)
    return report.equality(line, NEAR_TIE[dtype])


def _reference(row: Row) -> str:
    found = row.reference
    if found is None:
        return "-"
    figures = (found.gamma, f"{found.alpha:.2f}", f"{found.c:.2f}", found.expected, found.measured)
    return f"{found.drafter}: " + " / ".join(map(str, figures))


def main_sheet(results: Results, title: str, dtype: str = "float32") -> Sheet:
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
                _same(row.quality, row, dtype),
                _reference(row),
            )
        )
    left = (0, 1, len(headings) - 2, len(headings) - 1)
    notes = [note for row in results.rows if (note := explanation(row))]
    if any(row.paper == "bigram" for row in results.rows):
        notes.append(
            f"the paper has a speed-up of {paper.BIGRAM_SPEEDUP} for its bigram model, gamma 3, c = 0"
        )
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
        "alpha of every drafter (the paper's Table 3 beside it)",
        headings,
        rows,
        (f"mean of sum min(p, q) over text that the target wrote: {tokens}; the paper has 10,000",),
    )


def lenience_sheets(results: Results, subjects: dict[str, str | None]) -> list[Sheet]:
    """Table 5: one drafter decoded, and the alphas of all."""
    if not results.lenient:
        return []
    metric = results.lenient[0].quality.metric
    name = results.lenient[0].line.name.rpartition(", l=")[0]
    stated = paper.LENIENT_SPEEDUP if subjects[name] == "small" else ()
    headings = (
        "l",
        "law",
        "gamma",
        "alpha",
        "tau",
        "expected",
        "speed-up",
        metric,
        "paper alpha",
        "paper says",
    )
    rows = []
    for row in results.lenient:
        index = paper.LENIENCE.index(row.factor) if row.factor in paper.LENIENCE else None
        rows.append(
            (
                f"{row.factor:g}",
                "exact" if row.factor == 1 else "lossy",
                str(row.gamma),
                _number(row.alpha),
                _number(row.line.tau),
                _number(row.line.predicted_overall),
                row.line.overall_speedup.text(),
                _number(row.quality.score),
                _number(row.paper_alpha),
                f"{stated[index]:g}" if stated and index is not None else "-",
            )
        )
    decoded = Sheet(
        f"lenience at T=1, LOSSY below l = 1: {name}",
        headings,
        rows,
        (
            "a drafted token is accepted with probability min(1, p / (l q)); no token comes out with more "
            "than p / l. The paper says: for c = 0.015, in the text of appendix A.5",
        ),
        (1,),
    )
    factors = [row.factor for row in results.lenient]
    rows = []
    for subject, alphas in results.lenient_alphas.items():
        pairs = zip(factors, alphas, strict=True)
        cells = [(_number(a), _number(paper.lenient_alpha(subjects[subject], f))) for f, a in pairs]
        rows.append((subject, *(cell for pair in cells for cell in pair)))
    headings = ("Mq", *(part for f in factors for part in (f"alpha l={f:g}", f"paper l={f:g}")))
    return [decoded, Sheet("alpha by lenience at T=1 (the paper's Table 5 beside it)", headings, rows)]


def times_sheet(stages: Stages) -> Sheet:
    """What every stage took, all attempts together; measurements of one kind are summed."""
    times: dict[str, list[float]] = {}
    for name, entry in stages.times.items():
        kind = name.partition(", ")[0]
        mine = times.setdefault(kind if kind in MEASUREMENTS else name, [0.0, 0])
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
    )
    all_sheets = [
        main_sheet(results, title, config.measure.dtype),
        alpha_sheet(results, config.task.paper, subjects),
        *lenience_sheets(results, subjects),
        times_sheet(stages),
    ]
    curves = [
        (f"Batch of {size}: " if size > 1 else "") + report.curve_text(curve, results.fill)
        for size, curve in results.curves.items()
    ]
    setup = report.environment() | {"score": first.plain_quality.signature}
    for sheet in all_sheets:
        sheets.show(console, sheet)
    closing = [*curves, LEGEND, "\n".join(f"* {name}: {value}" for name, value in setup.items())]
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
        "setup": setup,
        "stages": stages.times,
        "results": named(results),
    }
    (folder / "table.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    names = ", ".join(["table.md", "table.tex", "table.json", *(path.name for path in pictures)])
    console.print(f"\nwritten: {folder}/{names}", markup=False, highlight=False, soft_wrap=True)
