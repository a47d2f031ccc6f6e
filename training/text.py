"""The text a drafter is distilled on: references, what the target writes, what the drafter itself writes.

Whoever wrote an answer, its source comes from the corpus. A batch depends on the step and, for the drafter's
own text, on the params at the step where that text was written: it lies on the disk from then on, until no
checkpoint is left from which a run could go on with it, so that a run that is resumed learns from the same
text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
import pydantic
import rich.console
from jax.sharding import Mesh

from jspec import models, parallel
from jspec.checkpoint import Model
from jspec.io import orbax
from jspec.types import PyTree
from training import hosts, recipe
from training.buckets import choose_edges
from training.config import Batching, Count, Strict, Training
from training.data import Batch, Batches, Example, Mixture, permutation, widths
from training.features import Features, Precision, Shown
from training.generation import Progress, generate_answers
from training.laws import StoredLaws

STRIDE = 1_000_003  # between the seeds of texts that are written at different steps


class Source(Strict):
    """Whose answers, and how large their share of the steps is (``weight``, relative to the others').

    references: the corpus' own. target: written by the target before training, and kept on the disk.
    drafter: written every ``every`` steps by the drafter as it then is (on-policy; DistillSpec, arXiv
    2310.08461), to the next ``examples`` sources. Answers are drawn at ``temperature``; 0 is greedy.
    """

    text: Literal["references", "target", "drafter"]
    weight: Annotated[float, pydantic.Field(gt=0)] = 1.0
    temperature: Annotated[float, pydantic.Field(ge=0)] = 0.0
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
    examples: Count | None = None  # references, target: the first so many; None: all
    every: Count | None = None  # drafter only

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Source:
        own = self.text == "drafter"
        if own and (self.every is None or self.examples is None):
            raise ValueError("drafter text: expected every and examples with it")
        if not own and self.every is not None:
            raise ValueError(f"every: expected None for text of {self.text}, which does not change")
        return self


class Writing(NamedTuple):
    """Settings of all generated text, and the folder where the target's is kept."""

    max_new_tokens: int
    batch_size: int
    cache: Path


def answered(
    model: Model,
    examples: Sequence[Example],
    writing: Writing,
    temperature: float,
    seed: int,
    *,
    keep: bool = True,
    console: rich.console.Console | None = None,
) -> list[Example]:
    """The examples with the model's answers in place of their own; kept in ``writing.cache`` or not.
    ``console`` is told of every shard but the last."""

    def tell(progress: Progress) -> None:
        if console is not None and progress.tokens and progress.done < progress.total:
            console.print(
                f"answers, T={temperature:g}: {progress.done} of {progress.total}, {progress.tokens} tokens, "
                f"{progress.utilisation:.0%} of the slots busy",
                highlight=False,
            )

    answers = generate_answers(
        model,
        [example.source for example in examples],
        temperature=temperature,
        seed=seed,
        max_new_tokens=writing.max_new_tokens,
        batch_size=writing.batch_size,
        cache=writing.cache if keep else None,
        progress=tell,
    )
    return [Example(example.source, answer) for example, answer in zip(examples, answers, strict=True)]


def chosen(
    source: Source,
    examples: Sequence[Example],
    target: Model,
    writing: Writing,
    *,
    console: rich.console.Console | None = None,
) -> list[Example]:
    """The examples of a source that does not change: references, or what the target writes."""
    found = list(examples[: source.examples])
    if source.text == "target":
        found = answered(target, found, writing, source.temperature, source.seed, console=console)
    return found


def features(
    target: Model,
    examples: Sequence[Example],
    writing: Writing,
    precision: Precision,
    *,
    taps: tuple[int, ...] = (),
    console: rich.console.Console | None = None,
) -> Features:
    """The target's hidden states over the examples, and the inputs of its layers ``taps``, kept in
    ``writing.cache``."""

    def tell(done: int, total: int) -> None:
        if console is not None:
            console.print(f"features, {precision}: {done} of {total} texts", highlight=False)

    return Features(
        target, examples, writing.cache, taps=taps, hidden=True, precision=precision, progress=tell
    )


def laws(
    target: Model,
    features: Features,
    examples: Sequence[Example],
    writing: Writing,
    *,
    console: rich.console.Console | None = None,
) -> StoredLaws:
    """What is kept of the target's laws over the examples' answers, beside their features."""

    def tell(done: int, total: int) -> None:
        if console is not None:
            console.print(f"laws: {done} of {total} texts", highlight=False)

    return StoredLaws(target, features, examples, writing.cache, progress=tell)


class Texts:
    """The batches of a distillation: `batch` is the loop's source.

    All sources share their buckets, and with them the compiled steps: chosen for the references, the
    last one large enough for any answer of ``writing.max_new_tokens`` tokens where answers are written.

    Args:
      precision: batches come with the target's hidden states, rounded to it; None: without.
    Raises:
      ValueError: given buckets that would not hold every answer of the drafter.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        examples: Sequence[Example],
        target: Model,
        drafter: Model,
        folder: Path,
        *,
        writing: Writing,
        batching: Batching,
        training: Training,
        mesh: Mesh | None = None,
        precision: Precision | None = None,
        console: rich.console.Console | None = None,
    ) -> None:
        start = target.decoder_start
        longest = max(examples, key=lambda example: len(example.source)).source
        largest = widths([Example(longest, [0] * writing.max_new_tokens)], start)
        if isinstance(batching.buckets, int):
            needed = widths(examples, start)
            if any(source.text != "references" for source in sources):
                needed = np.concatenate([needed, largest])
            edges = choose_edges(needed, batching.buckets, batching.multiple)
            batching = batching.model_copy(update={"buckets": tuple(edges)})
        elif any(source.text == "drafter" for source in sources):  # written when training is under way
            last = batching.buckets[-1] if batching.buckets else (0, 0)
            if (largest[0] > np.array(last)).any():
                raise ValueError(
                    "buckets: expected the last one to hold the longest source with "
                    f"{writing.max_new_tokens} tokens (max_new_tokens) of the drafter, "
                    f"{tuple(largest[0].tolist())}, got {last}"
                )
        self._own: list[_Own] = []
        parts: list[Any] = []
        for index, source in enumerate(sources):
            if source.text == "drafter":
                shapes = batching, training, start
                part = _Own(source, examples, drafter, folder, f"drafter_{index}", writing, shapes, mesh)
                self._own.append(part)
            else:
                fixed = chosen(source, examples, target, writing, console=console)
                part = recipe.batches(fixed, batching, training, start, mesh=mesh)
                if precision is not None:
                    part = Shown(part, features(target, fixed, writing, precision, console=console))
            parts.append(part)
        self._mixture = Mixture(parts, [source.weight for source in sources])

    def batch(self, step: int, params: PyTree) -> Batch:
        """The batch of a step; the drafter writes first, where it is time to."""
        for part in self._own:
            part.refresh(step, params)
        return self._mixture[step]


class _Own:
    """Batches of the drafter's own text."""

    def __init__(
        self,
        source: Source,
        examples: Sequence[Example],
        drafter: Model,
        folder: Path,
        name: str,
        writing: Writing,
        shapes: tuple[Batching, Training, Sequence[int]],
        mesh: Mesh | None,
    ) -> None:
        self._every, self._number, self._source = source.every or 1, source.examples or 1, source
        self._examples, self._drafter, self._folder, self._name = examples, drafter, folder, name
        self._writing, self._shapes, self._mesh = writing, shapes, mesh
        self._order = permutation(len(examples), source.seed)
        self._written = -1  # the step whose text is at hand
        self._batches: Batches | None = None

    def __getitem__(self, step: int) -> Batch:
        assert self._batches is not None
        return self._batches[step]

    def refresh(self, step: int, params: PyTree) -> None:
        """Have the text of the phase that ``step`` belongs to.

        Raises:
          FileNotFoundError: a run is resumed within a phase whose text is gone.
          ValueError: what lies there is another text.
        """
        begun = step // self._every * self._every
        if begun == self._written:
            return
        path = self._folder / f"{self._name}_{begun:08d}.json"
        phase = begun // self._every
        rows = self._order.take(np.arange(phase * self._number, (phase + 1) * self._number), mode="wrap")
        examples = [self._examples[row] for row in rows]
        what = {
            "source": self._source.model_dump(mode="json"),
            "max_new_tokens": self._writing.max_new_tokens,
            "rows": rows.tolist(),
        }
        stored = hosts.on_first(lambda: json.loads(path.read_text("utf-8")) if path.is_file() else None)
        if stored is not None:
            answers = stored.pop("answers", [])
            if stored != what:
                raise ValueError(f"{path}: expected the drafter's text of {self._source}, got another")
            examples = [Example(e.source, answer) for e, answer in zip(examples, answers, strict=True)]
        elif step == begun:
            seed = (self._source.seed + begun * STRIDE) % 2**32
            writer = dataclasses.replace(self._drafter, params=self._placed(params))
            examples = answered(writer, examples, self._writing, self._source.temperature, seed, keep=False)
            answers = [example.target for example in examples]
            hosts.on_first(lambda: self._keep(path, what | {"answers": answers}))
        else:
            raise FileNotFoundError(f"{path}: the drafter's text, which training goes on with, is gone")
        self._batches = recipe.batches(examples, *self._shapes, mesh=self._mesh)
        self._written = begun

    def _placed(self, params: PyTree) -> PyTree:
        """The params as generation wants them: in the forward's dtype, and on a mesh whole along `data`."""
        params = models.cast(params, self._shapes[1].dtype)
        if self._mesh is None:
            return params
        placed = parallel.param_shardings(self._mesh, params, self._drafter.lm.config)
        return jax.device_put(params, placed)

    def _keep(self, path: Path, content: dict[str, Any]) -> None:
        """Write the text of a phase, and drop those that no checkpoint goes on with."""
        self._folder.mkdir(parents=True, exist_ok=True)
        orbax.write_text(path, json.dumps(content))
        oldest = min(orbax.complete_steps(self._folder.parent / orbax.CHECKPOINTS), default=0)
        for other in self._folder.glob(f"{self._name}_*.json"):
            if int(other.stem.rpartition("_")[2]) < oldest // self._every * self._every:
                other.unlink()
