"""How long a draft network's text, features and training take on this device: a short measured burst."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jspec
from jspec.checkpoint import Model
from training import drafter, recipe
from training.buckets import choose_edges
from training.data import Example, widths
from training.drafter import Drafter
from training.features import STORED, columns_of, shown_of
from training.generation import SLOTS
from training.laws import laws_of
from training.loop import seconds_per_step

GOALS = (100_000, 500_000, 5_000_000)  # answer tokens
BURST = 16  # tokens that each row of the generation writes
EXAMPLES = 512  # at most, that the batches come from
BATCHES = 2  # that training is measured on


class Speeds(NamedTuple):
    """Answer tokens a second, each without compilation; ``step``: seconds of one, of ``step_tokens``."""

    device: str
    generation: float
    features: float | None  # None: they are computed in the step
    training: float
    step: float
    step_tokens: float
    feature_bytes: float  # on disk, an answer token, its share of the prompt included
    steps: int  # of the configuration


def measure(config: Drafter, corpus: recipe.Corpus, *, target: Model | None = None) -> Speeds:
    """Run each stage for a moment with the configuration's shapes.

    Generation is measured on the first training prompts and short answers; longer ones are slower by what the
    attention to them takes. Features and training are measured on the reference answers, cut to
    ``max_new_tokens``. Learning rates play no part, nor does what is on the disk.
    """
    target = recipe.given("target", target, config.target, config.training.dtype)
    model = drafter.model_of(config, target)
    network = drafter.network_of(config, target, model)
    examples = recipe.encoded(config, target, corpus.train[:EXAMPLES], "train")
    examples = [Example(e.source, e.target[: config.max_new_tokens]) for e in examples]
    generation = _generation(config, target, examples)

    tokens = _batches(config, target, examples)
    features = None
    kept = network.taps if config.kept_taps is None else config.kept_taps
    size = target.lm.config.width * (1 + len(kept))
    slots = sum(float(batch.lengths[batch.weights.any(1)].sum()) for batch in tokens)
    answers = [float(batch.weights.sum()) for batch in tokens]
    if config.features is not None:
        dtype = STORED[config.features]

        def show(batch: Any) -> Any:
            options = {"lm": target.lm, "taps": kept, "hidden": True, "dtype": dtype}
            return np.asarray(shown_of(target.params, batch, **options))

        found = [show(batch) for batch in tokens]
        begun = time.perf_counter()
        for batch in tokens:
            show(batch)
        features = sum(answers) / (time.perf_counter() - begun)
        columns = columns_of(network.taps, kept, target.lm.config.width)
        tokens = [
            batch._replace(features=shown[..., columns]) for batch, shown in zip(tokens, found, strict=True)
        ]

    begun = drafter.begin(config, target, network, [examples], model=model)
    taught = drafter.with_kernel(target)
    frozen = drafter.frozen_of(taught, begun.weights)
    if config.features is not None and frozen["columns"] is not None:
        dtype, width = jax.tree.leaves(target.params)[0].dtype, target.lm.config.width
        options = {"lm": taught.lm, "vocab_size": target.vocab_size, "banned": target.banned}
        tokens = [
            batch._replace(laws=laws_of(taught.params, batch.features[..., :width].astype(dtype), **options))
            for batch in tokens
        ]
    step = seconds_per_step(
        begun.weights.net,
        drafter.teaching(config, taught, network, [examples]),
        tokens,
        config.training,
        frozen=frozen,
    )
    mean = sum(answers) / len(answers)
    device = jax.local_devices()[0]
    return Speeds(
        f"{device.device_kind} ({device.platform})",
        generation,
        features,
        mean / step,
        step,
        mean,
        2 * size * slots / sum(answers) if config.features is not None else 0.0,
        config.training.steps,
    )


def _generation(config: Drafter, target: Model, examples: list[Example]) -> float:
    """Tokens a second of a full batch; no end token ends a row, so that none is short."""
    rows = config.generation_batch
    sources = [examples[i % len(examples)].source for i in range(rows)]
    number = min(BURST, config.max_new_tokens)
    longest = max(len(target.decoder_start) or len(source) for source in sources)
    capacity = min(-(-(longest + config.max_new_tokens) // SLOTS) * SLOTS, target.context_length)
    temperature = next((s.temperature for s in config.sources if s.text == "target"), 0.0)

    def write(count: int) -> float:
        begun = time.perf_counter()
        jspec.generate(
            dataclasses.replace(target, tokenizer=None, eos=()),
            sources,
            temperature=temperature,
            max_new_tokens=count,
            batch_size=rows,
            capacity=capacity,
        )
        return time.perf_counter() - begun

    write(number)
    # The prompts are read once an answer, whatever its length: the burst's share of that is too large.
    once, whole = write(1), write(number)
    a_token = max(whole - once, 1e-9) / max(number - 1, 1)
    return rows * config.max_new_tokens / (once + a_token * (config.max_new_tokens - 1))


def _batches(config: Drafter, target: Model, examples: Sequence[Example]) -> list[Any]:
    """Full batches from the middle of the order."""
    batching, start = config.batching, target.decoder_start
    if isinstance(batching.buckets, int):
        edges = choose_edges(widths(examples, start), batching.buckets, batching.multiple)
        batching = batching.model_copy(update={"buckets": tuple(edges)})
    batches = recipe.batches(examples, batching, config.training, start)
    found = [batches[step] for step in range(batches.steps_per_epoch)]
    full = [batch for batch in found if (batch.weights.sum(1) > 0).all()] or found
    middle = max((len(full) - BATCHES) // 2, 0)
    return full[middle : middle + BATCHES]


# --- what it comes to ---------------------------------------------------------------------------------


def seconds(speeds: Speeds, tokens: int, epochs: float = 1.0) -> dict[str, float]:
    """The time of each stage for so many answer tokens, and of all of them.

    >>> speeds = Speeds("cpu", 100.0, 200.0, 50.0, 1.0, 50.0, 10.0, 4)
    >>> seconds(speeds, 1000)
    {'generation': 10.0, 'features': 5.0, 'training': 20.0, 'all': 35.0}
    """
    found = {
        "generation": tokens / speeds.generation,
        "features": 0.0 if speeds.features is None else tokens / speeds.features,
        "training": epochs * tokens / speeds.training,
    }
    return found | {"all": sum(found.values())}


def duration(seconds: float) -> str:
    """In the unit that fits.

    >>> duration(42.3), duration(600.0), duration(90000.0)
    ('42 s', '10 min', '25 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def lines(speeds: Speeds) -> list[str]:
    """The plan as text."""
    shown = {
        "generation": speeds.generation,
        "features": speeds.features,
        "training": speeds.training,
    }
    table = [f"{speeds.device}: answer tokens a second, and the time for", ""]
    table.append(f"{'':12}{'tokens/s':>10}" + "".join(f"{goal:>12,}" for goal in GOALS))
    times = [seconds(speeds, goal) for goal in GOALS]
    for name in ("generation", "features", "training", "all"):
        speed = shown.get(name)
        cells = "".join(f"{duration(time[name]):>12}" for time in times)
        table.append(f"{name:12}{'' if speed is None else f'{speed:.0f}':>10}{cells}")
    table.append("")
    table.append(
        f"training: one epoch; a step of {speeds.step_tokens:.0f} answer tokens takes {speeds.step:.3g} s, "
        f"the {speeds.steps} steps of this configuration {duration(speeds.steps * speeds.step)} "
        f"({speeds.steps * speeds.step_tokens:.0f} tokens)"
    )
    if speeds.feature_bytes:
        sizes = ", ".join(f"{speeds.feature_bytes * goal / 1e9:.2g} GB" for goal in GOALS)
        table.append(f"features on disk: {speeds.feature_bytes:.0f} bytes an answer token: {sizes}")
    else:
        table.append("features: computed in every step, none on disk")
    return table
