"""The text a drafter is distilled on: references, what the target writes, what the drafter itself writes.

Whoever wrote an answer, its source comes from the corpus. A batch depends on the step and, for the drafter's
own text, on the params at the step where that text was written: it lies on the disk from then on, named by
that step, so that a run that is resumed learns from the same text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import pydantic
from jax.sharding import Mesh

from jspec import models
from jspec.checkpoint import Model
from jspec.io import orbax
from jspec.types import PyTree
from training import recipe
from training.buckets import choose_edges
from training.config import Batching, Count, Strict, Training
from training.data import Batch, Batches, Example, Mixture, widths
from training.generation import generate_answers

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
) -> list[Example]:
    """The examples with the model's answers in place of their own; kept in ``writing.cache`` or not."""
    answers = generate_answers(
        model,
        [example.source for example in examples],
        temperature=temperature,
        seed=seed,
        max_new_tokens=writing.max_new_tokens,
        batch_size=writing.batch_size,
        cache=writing.cache if keep else None,
    )
    return [Example(example.source, answer) for example, answer in zip(examples, answers, strict=True)]


class Texts:
    """The batches of a distillation: `batch` is the loop's source.

    All sources share their buckets, and with them the compiled steps: chosen for the references, the
    last one large enough for any answer of ``writing.max_new_tokens`` tokens where answers are written.
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
    ) -> None:
        start = target.decoder_start
        if isinstance(batching.buckets, int):
            needed = widths(examples, start)
            if any(source.text != "references" for source in sources):
                longest = max(examples, key=lambda example: len(example.source)).source
                largest = widths([Example(longest, [0] * writing.max_new_tokens)], start)
                needed = np.concatenate([needed, largest])
            edges = choose_edges(needed, batching.buckets, batching.multiple)
            batching = batching.model_copy(update={"buckets": tuple(edges)})
        self._own: list[_Own] = []
        parts: list[Any] = []
        for source in sources:
            if source.text == "drafter":
                part = _Own(source, examples, drafter, folder, writing, (batching, training, start), mesh)
                self._own.append(part)
            else:
                chosen = examples[: source.examples]
                if source.text == "target":
                    chosen = answered(target, chosen, writing, source.temperature, source.seed)
                part = recipe.batches(chosen, batching, training, start, mesh=mesh)
            parts.append(part)
        self._mixture = Mixture(parts, [source.weight for source in sources])

    def batch(self, step: int, params: PyTree) -> Batch:
        """The batch of a step; the drafter writes first, where it is time to."""
        for part in self._own:
            part.refresh(step, params)
        return self._mixture[step]


class _Own:
    """Batches of the drafter's own text."""

    steps_per_epoch = 1  # of no text yet

    def __init__(
        self,
        source: Source,
        examples: Sequence[Example],
        drafter: Model,
        folder: Path,
        writing: Writing,
        shapes: tuple[Batching, Training, Sequence[int]],
        mesh: Mesh | None,
    ) -> None:
        self._every, self._number, self._source = source.every or 1, source.examples or 1, source
        self._examples, self._drafter, self._folder = examples, drafter, folder
        self._writing, self._shapes, self._mesh = writing, shapes, mesh
        self._order = np.random.default_rng(source.seed).permutation(len(examples))
        self._written = -1  # the step whose text is at hand
        self._batches: Batches | None = None

    def __getitem__(self, step: int) -> Batch:
        assert self._batches is not None
        return self._batches[step]

    def refresh(self, step: int, params: PyTree) -> None:
        """Have the text of the phase that ``step`` belongs to.

        Raises:
          FileNotFoundError: a run is resumed within a phase whose text is gone.
        """
        begun = step // self._every * self._every
        if begun == self._written:
            return
        path = self._folder / f"drafter_{self._source.seed}_{begun:08d}.json"
        phase = begun // self._every
        rows = self._order.take(np.arange(phase * self._number, (phase + 1) * self._number), mode="wrap")
        examples = [self._examples[row] for row in rows]
        if path.is_file():
            answers = json.loads(path.read_text(encoding="utf-8"))
            examples = [Example(e.source, answer) for e, answer in zip(examples, answers, strict=True)]
        elif step == begun:
            dtype = jnp.dtype(self._shapes[1].dtype)
            model = dataclasses.replace(self._drafter, params=models.cast(params, dtype))
            seed = (self._source.seed + begun * STRIDE) % 2**32
            examples = answered(model, examples, self._writing, self._source.temperature, seed, keep=False)
            self._folder.mkdir(parents=True, exist_ok=True)
            orbax.write_text(path, json.dumps([example.target for example in examples]))
        else:
            raise FileNotFoundError(f"{path}: the drafter's text, which training goes on with, is gone")
        self._batches = recipe.batches(examples, *self._shapes, mesh=self._mesh)
        self._written = begun
