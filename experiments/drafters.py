"""Draft networks compared: trained on the same text of one target, then measured in one speed table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console

from experiments import plots, sheets
from experiments.config import Drafters, Row, Table
from experiments.pipeline import finished
from experiments.sheets import Sheet
from experiments.stages import Stages, clock
from jspec.drafters import stored
from jspec.drafters.nets import Weights
from training import drafter, metrics, recipe

TEXT = "text"  # the folder of what the target writes and shows, for all methods
WRITTEN = (
    Path(__file__).parent / "text"
)  # answers that come with the project, as `training.generation` keeps them


class Point(NamedTuple):
    """An evaluation during training (`training.teaching.simulate`)."""

    tokens: float  # answer tokens trained on, repeats counted
    tau_0: float
    tau_1: float


class Trained(NamedTuple):
    """What a training came to."""

    parameters: int
    seconds: float
    epochs: float
    curve: list[Point]
    accepted: list[float]  # at the end, by depth, greedy

    def at_ten_times(self) -> float:
        """tau_0 at ten times the tokens, on the line through the last three points against their logarithm:
        an extrapolation and no bound, for curves bend, and the learning rate has come to its end there."""
        tokens, taus = np.array([(point.tokens, point.tau_0) for point in self.curve[-3:]]).T
        if len(tokens) < 2:
            return float(taus[-1])
        slope, _ = np.polyfit(np.log10(tokens), taus, 1)
        return float(taus[-1] + slope)


def train(
    config: Drafters, data: Path, folder: Path, stages: Stages, console: rich.console.Console
) -> dict[str, Trained]:
    """Train every method that is not trained yet, each in a folder of its own."""
    for answers in WRITTEN.iterdir():  # named by a fingerprint of model, prompts and settings
        if answers.is_dir() and not (folder / TEXT / answers.name).exists():
            shutil.copytree(answers, folder / TEXT / answers.name)
    found = {}
    for name, settings in config.recipes().items():
        run = folder / name
        corpus = recipe.read(settings.data, data)
        if not run.exists():  # its folder was removed, and with it what is told of its time
            stages.times.pop(name, None)
        with stages.timed(name, done=finished(run) and name in stages.times):
            trained = drafter.run(settings, corpus, run, cache=folder / TEXT, console=console)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(trained.weights.net))
        found[name] = outcome(run, parameters, stages.times[name]["seconds"])
        del trained
        jax.clear_caches()
    return found


def outcome(run: Path, parameters: int, seconds: float) -> Trained:
    """What the metrics of a run say."""
    lines = [line for line in metrics.read(run / metrics.FILE) if "tau_0" in line]
    curve = [Point(line["tokens_seen"], line["tau_0"], line["tau_1"]) for line in lines]
    accepted = [lines[-1][key] for key in lines[-1] if key.startswith("accepted_")]
    return Trained(parameters, seconds, lines[-1]["epochs"], curve, accepted)


def sheet(found: dict[str, Trained]) -> Sheet:
    """The ends of the learning curves."""
    headings = ("method", "parameters", "tokens", "epochs", "time", "accepted by position", "tau T=0")
    headings += ("tau T=1", "tau T=0 at ten times")
    rows = [
        (
            name,
            f"{one.parameters / 1e6:.1f}M",
            f"{one.curve[-1].tokens / 1e3:.0f}k",
            f"{one.epochs:.1f}",
            clock(one.seconds),
            " ".join(f"{share:.2f}" for share in one.accepted),
            f"{one.curve[-1].tau_0:.2f}",
            f"{one.curve[-1].tau_1:.2f}",
            f"{one.at_ten_times():.2f}",
        )
        for name, one in found.items()
    ]
    notes = (
        "simulated on what the target wrote to held-out prompts of the kinds that were trained on: chains of "
        "the trained length, from places drawn at random (training.teaching.simulate)",
        "time: text and features, which the first method makes for all, included with it",
        "at ten times: the line through the last three points of the curve over log tokens, continued; "
        "curves bend, and the learning rate has fallen to its end: read it as what more text might give",
    )
    return Sheet("learning", headings, rows, notes)


def write(
    folder: Path, config: Drafters, found: dict[str, Trained], stages: Stages, console: rich.console.Console
) -> None:
    """drafters.md, drafters.json and curves.png in ``folder``, and the table on the terminal."""
    table = sheet(found)
    sheets.show(console, table)
    curves = {name: [(point.tokens, point.tau_0) for point in one.curve] for name, one in found.items()}
    plots.learning(folder / "curves.png", curves)
    origins = stages.origins(lambda name: name if name in found else None)
    parts = [sheets.markdown(table), "![learning curves](curves.png)", "", origins, ""]
    (folder / "drafters.md").write_text("\n".join(parts), encoding="utf-8")
    content = {
        "config": config.model_dump(mode="json"),
        "environments": stages.environments,
        "methods": {name: one._asdict() for name, one in found.items()},
    }
    (folder / "drafters.json").write_text(json.dumps(content) + "\n", encoding="utf-8")


def rehearsed(config: Drafters, folder: Path) -> Table:
    """The speed table without calibration, and with random networks, written to ``folder``, in place of those
    that wait for the training: what can be found wrong with any of them is found before it."""
    for name, settings in config.recipes().items():
        target = recipe.given("target", None, settings.target, settings.training.dtype)
        network = drafter.network_of(settings, target, drafter.model_of(settings, target))
        columns = settings.draft_vocab
        ids = None if columns is None else jnp.arange(columns, dtype=jnp.int32)
        weights = Weights(network.init(jax.random.key(0)), None, ids)
        told = {"num_tokens": settings.num_tokens, "accuracies": [[0.5, 0.2]] * settings.num_tokens}
        stored.save(folder / name, settings.kind, network.config, weights, **told)
    table = rows(config, folder)
    kept = tuple(row for row in table.drafters if row.drafter != "auto")
    return table.model_copy(update={"drafters": kept})


def _own(row: Row, config: Drafters) -> bool:
    return row.drafter == "trained" and row.arguments.get("folder") in config.methods


def rows(config: Drafters, folder: Path) -> Table:
    """The speed table, its trained rows with the folders of this experiment."""
    changed = [
        row.model_copy(
            update={"arguments": {**row.arguments, "folder": str(folder / row.arguments["folder"])}}
        )
        if _own(row, config)
        else row
        for row in config.table.drafters
    ]
    return config.table.model_copy(update={"drafters": tuple(changed)})
