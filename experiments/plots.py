"""Pictures of a study: acceptance and speed against the draft length, rows of the table, lenience."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import cost, report
from experiments.results import LenientRow, Results, SweepPoint
from jspec.measure import CostCurve

COLOURS = ("#3b7dd8", "#c9584b", "#4a9e6b", "#8a5fb3")


def _figure(columns: int, rows: int = 1) -> tuple[Any, Any, Callable[[Path], None]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.8 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)

    def save(path: Path) -> None:
        figure.savefig(path, dpi=150)
        pyplot.close(figure)

    return figure, axes, save


def sweep(
    path: Path, points: Sequence[SweepPoint], alphas: dict[float, float], curves: dict[float, CostCurve]
) -> None:
    """Three panels over gamma: acceptance of judged tokens, tau, and speed-up of decoding; measured points,
    and lines by theory from ``alphas``, c and the cost ``curves`` (both by temperature)."""
    figure, axes, save = _figure(3)
    acceptance, tokens, speed = axes[0]
    for colour, temperature in zip(COLOURS, sorted({p.temperature for p in points}), strict=False):
        mine = [point for point in points if point.temperature == temperature]
        gammas, alpha = [point.gamma for point in mine], alphas[temperature]
        c = float(np.median([point.c for point in mine]))
        every = range(1, max(gammas) + 1)
        label = f"T={temperature:g}"
        acceptance.plot(gammas, [point.line.alpha for point in mine], "o", color=colour, label=label)
        acceptance.axhline(alpha, color=colour, lw=1, ls="--")
        tokens.plot(gammas, [point.line.tau for point in mine], "o", color=colour, label=label)
        tokens.plot(every, [cost.tau(alpha, g) for g in every], color=colour, lw=1, ls="--")
        measured = np.array([point.line.speedup for point in mine])
        spread = np.abs(measured[:, 1:] - measured[:, :1]).T
        speed.errorbar(gammas, measured[:, 0], spread, fmt="o", color=colour, capsize=3, label=label)
        theory = [cost.speedup(alpha, g, c) for g in every]
        speed.plot(every, theory, color=colour, lw=1, ls="--", label=f"{label}, Theorem 3.8")
        on_curve = [cost.speedup_on(curves[temperature], alpha, g, c) for g in every]
        speed.plot(every, on_curve, color=colour, lw=1, label=f"{label}, with measured t(n)")
    acceptance.set(title="acceptance", ylabel="accepted / judged (line: alpha, sum min(p, q))", ylim=(0, 1))
    tokens.set(title="tokens a round", ylabel="tau (line: equation 1 with alpha)")
    speed.set(title="speed", ylabel="speed-up of decoding")
    speed.axhline(1, color="#222222", lw=0.8)
    for axis in axes[0]:
        axis.set_xlabel("gamma")
        axis.xaxis.get_major_locator().set_params(integer=True)
    acceptance.legend(fontsize=8, frameon=False)
    figure.legend(
        *speed.get_legend_handles_labels(), loc="outside lower right", fontsize=8, ncols=3, frameon=False
    )
    save(path)


def lenience(path: Path, rows: Sequence[LenientRow]) -> None:
    """alpha and speed-up against lenience, and the score where answers were scored."""
    scored = [row.quality for row in rows if row.quality is not None]
    _, axes, save = _figure(3 if scored else 2)
    factors = [row.factor for row in rows]
    speeds = np.array([row.line.overall_speedup for row in rows])
    alphas, speed, *scores = axes[0]
    alphas.plot(factors, [row.alpha for row in rows], "o-", color=COLOURS[0], label="here")
    known = [(row.factor, row.paper_alpha) for row in rows if row.paper_alpha is not None]
    if known:
        alphas.plot(*zip(*known, strict=True), "s--", color="#8a8f98", label="paper")
    alphas.legend(fontsize=8, frameon=False)
    spread = np.abs(speeds[:, 1:] - speeds[:, :1]).T
    speed.errorbar(factors, speeds[:, 0], spread, fmt="o-", color=COLOURS[2], capsize=3)
    for axis in scores:
        axis.plot(factors, [quality.score for quality in scored], "o-", color=COLOURS[1])
    names = ("alpha", "speed-up of whole inference", *(quality.metric for quality in scored[:1]))
    for axis, name in zip(axes[0], names, strict=True):
        axis.set(xlabel="lenience l (1: exact, below: lossy)", ylabel=name)
        axis.invert_xaxis()
    save(path)


def learning(path: Path, curves: dict[str, list[tuple[float, float]]]) -> None:
    """tau of simulated greedy chains against the tokens trained on, a line a method."""
    import matplotlib

    colours = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    _, axes, save = _figure(1)
    (axis,) = axes[0]
    for number, (name, points) in enumerate(curves.items()):
        axis.plot(*zip(*points, strict=True), "o-", ms=3, color=colours[number % len(colours)], label=name)
    axis.set(xscale="log", xlabel="answer tokens trained on", ylabel="tau of a greedy chain, simulated")
    axis.legend(fontsize=8, frameon=False)
    save(path)


def write(folder: Path, results: Results) -> list[Path]:
    """All pictures that the results have something for; their paths."""
    written: list[Path] = []
    groups = dict.fromkeys((row.batch_size, row.temperature) for row in results.rows)
    for batch_size, temperature in groups:
        lines = [
            row.line._replace(theory=row.theory)
            for row in results.rows
            if (row.batch_size, row.temperature) == (batch_size, temperature)
        ]
        path = folder / f"speedup_B{batch_size}_T{temperature:g}.png"
        report.chart(path, f"speed-up of decoding, T={temperature:g}, batch {batch_size}", lines)
        written.append(path)
    if results.sweep:
        path = folder / "gamma.png"
        alphas = results.alphas[results.sweep_drafter]
        curves = {t: results.curves[f"sweep, T={t:g}"].cost for t in alphas}
        sweep(path, results.sweep, alphas, curves)
        written.append(path)
    if results.lenient:
        path = folder / "lenience.png"
        lenience(path, results.lenient)
        written.append(path)
    return written


def losses(path: Path, alphas: dict[str, tuple[report.Speed, report.Speed]]) -> None:
    """alpha at temperatures 0 and 1 of each loss, medians with the range over the seeds."""
    _, axes, save = _figure(1)
    axis = axes[0, 0]
    order = sorted(alphas, key=lambda name: alphas[name][1].median)
    rows = np.arange(len(order))
    for temperature, colour in ((0, COLOURS[0]), (1, COLOURS[1])):
        values = np.array([alphas[name][temperature] for name in order])
        spread = np.abs(values[:, 1:] - values[:, :1]).T
        place = rows + 0.1 * (1 - 2 * temperature)
        axis.errorbar(
            values[:, 0], place, xerr=spread, fmt="o", color=colour, capsize=3, label=f"T={temperature}"
        )
    axis.set_yticks(rows, order)
    axis.set_xlabel("alpha (median, range)")
    axis.legend(fontsize=8, frameon=False)
    save(path)


def blockwise(
    path: Path,
    taus: dict[str, dict[int, float]],
    paper: dict[str, dict[int, float]],
    speeds: dict[str, dict[int, report.Speed]],
) -> None:
    """Mean accepted block size, beside the paper's, and speed-up with its range against the block size."""
    _, axes, save = _figure(2)
    blocks, speed = axes[0]
    for colour, (name, row) in zip(COLOURS, taus.items(), strict=True):
        blocks.plot([*row], [*row.values()], "o-", color=colour, label=name)
        blocks.plot([*paper[name]], [*paper[name].values()], "s--", ms=3, lw=0.8, color=colour)
        if name in speeds:
            values = np.array([*speeds[name].values()])
            spread = np.abs(values[:, 1:] - values[:, :1]).T
            speed.errorbar([*row], values[:, 0], spread, fmt="o-", color=colour, capsize=3, label=name)
    blocks.set(xlabel="block size k", ylabel="mean accepted block size (dashed: Stern et al.)")
    speed.set(xlabel="block size k", ylabel="speed-up of decoding")
    speed.axhline(1, color="#222222", lw=0.8)
    for axis in axes[0]:
        axis.legend(fontsize=8, frameon=False)
    save(path)
