"""A finished measurement as Markdown, as a table on the terminal, as a picture and as JSON."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rich.box
import rich.console
import rich.table

from experiments import environment, sheets
from experiments.cost import CostCurve
from experiments.sheets import Sheet


class Speed(NamedTuple):
    """A rate or ratio over the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Any) -> Speed:
        """Median, least and greatest.

        >>> Speed.of([1.0, 3.0, 2.0])
        Speed(median=2.0, low=1.0, high=3.0)
        """
        return cls(float(np.median(values)), float(np.min(values)), float(np.max(values)))

    def text(self, digits: int = 2) -> str:
        """``median (low-high)``."""
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


class Flip(NamedTuple):
    """The first token at which a prompt's output leaves that of plain decoding."""

    prompt: str
    position: int  # index of the new token
    gap: float  # top logit less the second, of plain decoding at that position


class Section(NamedTuple):
    """What was measured at one temperature and batch size."""

    title: str
    lines: list[Line]
    curve: CostCurve  # of this batch size
    fill: int  # cached tokens behind which the curve was measured
    rounds: dict[str, Any]  # row -> prompt -> lists


class Report(NamedTuple):
    """Everything a table run measured."""

    sections: list[Section]
    near_tie: float  # the gap below which `equality` excuses another token


class Rounds(NamedTuple):
    """The rounds of all batches of a setting: their new tokens, and the width of each forward."""

    tokens: int
    widths: np.ndarray

    @property
    def tokens_a_round(self) -> float:
        """New tokens of a whole batch in a round; tau where a batch is one row."""
        return self.tokens / len(self.widths)


class Round(NamedTuple):
    """Where the time of a round goes, in seconds: all of it as decoding ran, and the parts that were measured
    in loops of their own."""

    seconds: float
    forward: float
    drafting: float

    @property
    def rest(self) -> float:
        """What neither explains: verifying, committing, bookkeeping, and the parts' own errors."""
        return self.seconds - self.forward - self.drafting


class Line(NamedTuple):
    """One drafter's results at one temperature."""

    name: str
    tau: float
    accepted_by_position: tuple[float, ...]  # share of all rounds
    alpha: float | None
    c: float | None  # None: nothing is drafted
    theory: float | None  # Theorem 3.8
    predicted: float | None  # from tau and the cost curve
    decode: Speed  # new tokens per second, without the prompt
    overall: Speed  # new tokens per second, prompt included
    speedup: Speed  # of decode over plain decoding, repeat by repeat
    overall_speedup: Speed
    flips: tuple[Flip, ...] | None  # None: sampled, so that tokens say nothing
    num_prompts: int
    predicted_overall: float | None = None  # the same with the measured time of reading prompts
    round: Round | None = None
    best_length: tuple[int, float] | None = None  # of a chain, by its acceptance and the curve; its speed-up
    lossless: bool = True
    baseline: bool = False
    note: str = ""


#: By dtype: logits of plain decoding that are less apart may change places in a block of another shape. In
#: bfloat16 numbers between 16 and 32 are 0.125 apart.
NEAR_TIE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.25}
HEADINGS = (
    "drafter",
    "tau",
    "accepted by position",
    "alpha",
    "c",
    "by Thm 3.8",
    "by curve",
    "tokens/s",
    "speed-up",
    "tokens/s with prompt",
    "speed-up with prompt",
    "equals plain",
)
LEFT = (0, len(HEADINGS) - 1)  # columns of words


def equality(line: Line, gap: float = NEAR_TIE["float32"]) -> str:
    """Whether the tokens are those of plain decoding.

    A prompt that differs counts as equal only where plain decoding itself was undecided: the difference of
    its two best logits is below ``gap``.

    >>> line = Line("x", 1, (), 0, None, None, None, *[Speed(1, 1, 1)] * 4, (Flip("a", 7, 2e-4),), 12)
    >>> equality(line)
    'yes (1 near-tie)'
    """
    if line.flips is None:
        return "in law" if line.lossless else "no: a lossy rule"
    ties = sum(flip.gap < gap for flip in line.flips)
    wrong = len(line.flips) - ties
    if wrong:
        return f"NO ({wrong} of {line.num_prompts} prompts)"
    return f"yes ({ties} near-tie{'s' if ties > 1 else ''})" if ties else "yes"


def verdict(speedup: Speed) -> str:
    """The speed-up in words where it is none.

    >>> verdict(Speed(0.8, 0.7, 0.9)), verdict(Speed(1.2, 1.1, 1.3)), verdict(Speed(1.02, 0.98, 1.1))
    (' slower', '', ' ~')
    >>> verdict(Speed(0.95, 0.9, 1.1))
    ' slower ~'
    """
    slower = " slower" if speedup.median < 1 else ""
    return slower + (" ~" if speedup.low < 1 < speedup.high else "")


def cells(line: Line, gap: float = NEAR_TIE["float32"]) -> tuple[str, ...]:
    """A line under `HEADINGS`; ``gap`` as for `equality`."""

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        line.name + (f" ({line.note})" if line.note else ""),
        number(line.tau),
        " ".join(f"{share:.2f}" for share in line.accepted_by_position) or "-",
        number(line.alpha),
        number(line.c, 3),
        number(line.theory),
        number(line.predicted),
        line.decode.text(1),
        "1" if line.baseline else line.speedup.text() + verdict(line.speedup),
        line.overall.text(1),
        "1" if line.baseline else line.overall_speedup.text() + verdict(line.overall_speedup),
        "-" if line.baseline else equality(line, gap),
    )


def legend(gap: float) -> str:
    """What the columns are."""
    return f"""\
* Every row decodes every prompt in every repeat, in turn with plain decoding on the same prompts. Speeds are
  new tokens per second, median (least-greatest) of the repeats; a speed-up is the ratio of one repeat.
  "slower": the median is below plain decoding; "~": the repeats disagree on which is faster. Without "with
  prompt" the time starts when the prompt has been read. Compilation is never timed. Above temperature 0 every
  repeat draws with seeds of its own, the same for all rows, so that spreads hold the chance of sampling.
* tau: tokens a round, the one of the target included. Accepted by position: share of all rounds in which the
  drafted token at that depth was accepted. Both over the rounds of all repeats.
* alpha: accepted over judged depths (a refused depth is judged, the depths behind it are not). c: the
  drafter's time of a round (propose and update) over its depth, over the time of a one-token forward of the
  target, where the round before accepted nothing; "by curve" adds what catching up with a whole draft costs.
* By Thm 3.8, predicted: Leviathan et al. (arXiv 2211.17192) with this alpha and c and each round's own draft
  length; it takes a forward over several tokens to cost as much as over one. By curve, predicted: tau over
  the mean cost of the rounds, drafting plus t(n)/t(1) of the block widths they ran. Both rest on costs that
  were measured before the decoding, in loops of their own: on a busy machine they may not hold for it.
* Equals plain: a prompt that differs counts as equal only if plain decoding's two best logits there are less
  than {gap:g} apart."""


def curve_text(curve: CostCurve, fill: int) -> str:
    """The cost curve as one Markdown table."""
    heads = " | ".join(str(width) for width in curve.widths)
    relative = " | ".join(f"{curve.relative(width):.2f}" for width in curve.widths)
    seconds = " | ".join(f"{1e3 * value:.1f}" for value in curve.seconds)
    return "\n".join(
        [
            f"t(n), the target's forward over n tokens behind {fill} cached ones, medians, measured in turn:",
            "",
            f"| n | {heads} |",
            "|---" + "|---:" * len(curve.widths) + "|",
            f"| t(n) / t(1) | {relative} |",
            f"| t(n) in ms | {seconds} |",
        ]
    )


def markdown(measured: Report, setup: dict[str, str]) -> str:
    """The whole report."""
    parts = []
    for number, section in enumerate(measured.sections):
        rows = [cells(line, measured.near_tie) for line in section.lines]
        parts.append(sheets.markdown(Sheet(section.title, HEADINGS, rows, tuple(notes(section.lines)), LEFT)))
        following = measured.sections[number + 1 :]
        if not following or following[0].curve is not section.curve:
            parts += [curve_text(section.curve, section.fill), ""]
    parts += [legend(measured.near_tie), "", environment.listing(setup), ""]
    return "\n".join(parts)


def notes(lines: list[Line]) -> list[str]:
    """What does not fit into a table: the draft length that would have paid best, and every flip."""
    found = [
        f"{line.name}: by its acceptance and t(n) the best length of at most "
        f"{len(line.accepted_by_position)} is {line.best_length[0]} ({line.best_length[1]:.2f}x)"
        for line in lines
        if line.best_length is not None
    ]
    found += [
        f"{line.name}: prompt {flip.prompt} differs from new token {flip.position} on, "
        f"where plain decoding's two best logits are {flip.gap:.2g} apart"
        for line in lines
        for flip in line.flips or ()
    ]
    return found


def show(console: rich.console.Console, title: str, lines: list[Line], gap: float) -> None:
    """One table on the terminal: spreads below their medians, fewer columns where it is narrow. ``gap`` as
    for `equality`."""
    table = rich.table.Table(
        title=title, title_justify="left", box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False
    )
    hidden = ["prompt"] * (console.width < 110) + ["position"] * (console.width < 96)
    shown = [i for i, heading in enumerate(HEADINGS) if not any(word in heading for word in hidden)]
    for i in shown:
        side = "left" if i in LEFT else "right"
        table.add_column(HEADINGS[i], justify=side, overflow="fold", max_width=14)
    for line in lines:
        slower = not line.baseline and line.speedup.median < 1
        texts = [text.replace(" (", "\n").replace(")", "") for text in cells(line, gap)]
        table.add_row(*(texts[i] for i in shown), style="red" if slower else None)
    console.print(table)


def chart(path: Path, title: str, lines: list[Line]) -> None:
    """Measured speed-ups as bars with their spread, and both predictions, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [line for line in lines if not line.baseline]
    if not drawn:
        return
    figure, axes = pyplot.subplots(figsize=(8, 1.6 + 0.5 * len(drawn)), layout="constrained")
    rows = list(range(len(drawn)))
    medians = np.array([line.speedup.median for line in drawn])
    spread = np.array([[s.median - s.low, s.high - s.median] for s in (line.speedup for line in drawn)]).T
    colors = [_color(line.speedup) for line in drawn]
    axes.barh(rows, medians, 0.6, color=colors, xerr=spread, error_kw={"capsize": 4, "ecolor": "#333333"})
    axes.plot(
        [_or_nan(line.predicted) for line in drawn],
        rows,
        "D",
        color="#222222",
        ms=5,
        label="predicted: tau and t(n)/t(1)",
    )
    axes.plot(
        [_or_nan(line.theory) for line in drawn],
        rows,
        "o",
        mfc="none",
        mec="#222222",
        ms=7,
        label="predicted: Theorem 3.8",
    )
    right = max(line.speedup.high for line in drawn)
    for row, line in zip(rows, drawn, strict=True):
        axes.text(
            0.02,
            row,
            f"{line.speedup.median:.2f}x, tau {line.tau:.2f}",
            va="center",
            color="white",
            fontsize=9,
        )
        right = max(right, line.predicted or 0, line.theory or 0)
    axes.axvline(1, color="#222222", lw=1, ls="--")
    axes.set_xlim(0, 1.08 * max(right, 1))
    axes.set_yticks(rows, [line.name for line in drawn])
    axes.invert_yaxis()
    axes.set_xlabel("speed-up over plain decoding (bars: measured, median and range of the repeats)")
    figure.suptitle(textwrap.fill(title, 90), x=0.02, ha="left", fontsize=10)  # of the figure: names are long
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", fontsize=8, ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _color(speedup: Speed) -> str:
    """Blue above plain decoding in every repeat, red below it in the median, grey between."""
    if speedup.median < 1:
        return "#c9584b"
    return "#8a8f98" if speedup.low < 1 else "#3b7dd8"


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def write(folder: Path, console: rich.console.Console, measured: Report, config: dict[str, Any]) -> None:
    """The tables on the terminal, and table.md, rounds.json and speedup.png in ``folder``."""
    setup = environment.current()
    for number, (title, lines, curve, fill, _) in enumerate(measured.sections):
        show(console, title, lines, measured.near_tie)
        for note in notes(lines):
            console.print(f"* {note}", markup=False, highlight=False)
        console.print("\n" + curve_text(curve, fill), markup=False, highlight=False, soft_wrap=True)
        chart(folder / f"speedup{number or ''}.png", title, lines)
    for text in (legend(measured.near_tie), environment.listing(setup)):
        console.print("\n" + text, markup=False, highlight=False, soft_wrap=True)
    (folder / "table.md").write_text(markdown(measured, setup), encoding="utf-8")
    content = {
        "config": config,
        "setup": setup,
        "curves": {section.title: section.curve._asdict() for section in measured.sections},
        "rows": {section.title: section.rounds for section in measured.sections},
    }
    (folder / "rounds.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    console.print(f"\nwritten: {folder}/table.md, rounds.json, speedup.png", markup=False, highlight=False)
