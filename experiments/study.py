"""What a study is: a target that is trained, drafters that are trained for it, and the paper's table.

`load` reads every kind of experiment; the key ``kind`` of a file says which one it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from experiments import paper
from experiments.config import Blockwise, Drafters, Table, overlaid
from jspec import verify
from training import config as configs
from training import distill, losses, readers
from training.config import Batching, Count, Strict, Training
from training.data import Limits
from training.features import Precision
from training.finetune import Finetune
from training.ngram import Ngram
from training.text import Source

TaskOfPaper = Literal["ende", "cnndm"]
DrafterOfPaper = Literal["unigram", "bigram", "small", "base", "large"]


class Task(Strict):
    """What is learned: its name in tables, how answers are scored, and the paper's task to compare with."""

    name: str
    metric: Literal["bleu", "rouge2"] = "bleu"
    paper: TaskOfPaper | None = None


class Data(Strict):
    """Pairs to train on, to look at during training, and to measure on; paths are relative to --data."""

    train: readers.DataConfig
    validation: readers.DataConfig
    test: readers.DataConfig


class Target(Strict):
    """The model that is to be accelerated: used as it is, or fine-tuned (from scratch or a checkpoint)."""

    model: str | None = None
    finetune: Finetune | None = None

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Target:
        if (self.model is None) == (self.finetune is None):
            raise ValueError("expected one of model and finetune")
        if self.finetune is not None and (self.finetune.data is not None or self.finetune.limits != Limits()):
            raise ValueError("finetune: expected no data and no limits, which belong to the study")
        return self


class Recipe(Strict):
    """How drafters are trained: a loss (`training.losses.NAMES`) on text (`training.text.Source`), with the
    target's features kept or not (`training.distill.Distill`)."""

    loss: str
    loss_arguments: dict[str, float] = pydantic.Field(default={})
    sources: Annotated[tuple[Source, ...], pydantic.Field(min_length=1)]
    features: Precision | None = None

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Recipe:
        losses.named(self.loss, **self.loss_arguments)
        _check_features(self.features, self.sources)
        return self


def _check_features(features: Precision | None, sources: tuple[Source, ...]) -> None:
    """As `training.distill.Distill` does, which is made when the target is trained already."""
    if features is not None and any(source.text == "drafter" for source in sources):
        raise ValueError("features: expected none with text of the drafter, which is new all the time")


class Drafter(Strict):
    """A smaller model, once for each recipe: same start, data, batches and steps; or a model as it is.

    ``paper`` is the drafter of the paper that stands beside it.
    """

    paper: DrafterOfPaper | None = None
    model: str | None = None
    start: distill.Drafter | None = None
    batching: Batching | None = None
    training: Training | None = None
    recipes: tuple[str, ...] | None = None  # None: all of the study's

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Drafter:
        trained = (self.start, self.batching, self.training)
        if self.model is not None and any(part is not None for part in trained):
            raise ValueError("expected either model, or start, batching and training")
        if self.model is None and any(part is None for part in trained):
            raise ValueError("expected start, batching and training, or model")
        return self


class Counted(Strict):
    """An n-gram drafter, counted on text of the training set; see `training.ngram`."""

    paper: DrafterOfPaper | None = None
    order: Literal[1, 2]
    successors: Count = 64
    source: Source = Source(text="references")

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Counted:
        if self.source.text == "drafter":
            raise ValueError("source.text: expected references or target, got drafter")
        return self

    def recipe(self) -> Ngram:
        """The settings of the recipe that counts."""
        return Ngram(target="", order=self.order, successors=self.successors)


class Sweep(Strict):
    """Acceptance and speed against the draft length, of one drafter, at batch size 1."""

    drafter: str
    gammas: Annotated[tuple[Count, ...], pydantic.Field(min_length=1)] = (1, 2, 3, 4, 5, 7, 10)
    sentences: Count = 50


class Lenience(Strict):
    """Table 5: lossy decoding at temperature 1, accepting with probability min(1, p / (l q))."""

    drafter: str
    factors: Annotated[tuple[float, ...], pydantic.Field(min_length=1)] = paper.LENIENCE


class Measure(Strict):
    """How the table is measured.

    ``gamma``: one draft length for all rows, or "best": for each row the one that its alpha, its c and the
    cost curve t(n) make the fastest, of at most ``max_gamma``.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    temperatures: Annotated[tuple[Annotated[float, pydantic.Field(ge=0)], ...], pydantic.Field(min_length=1)]
    batch_sizes: Annotated[tuple[Count, ...], pydantic.Field(min_length=1)] = (1,)
    drafters: tuple[str, ...] | None = None  # rows of the table, as "small, distilled"; None: all
    gamma: Literal["best"] | Count = "best"
    max_gamma: Count = 8
    verify: str = "token"  # the rule of the paper
    sentences: Count = 100  # of the test set, for speed
    repeats: Count = 3
    seed: Annotated[int, pydantic.Field(ge=0, lt=2**32)] = 0
    quality: bool = True  # decode the whole test set with every row, too
    quality_batch: Count = 64
    sweep: Sweep | None = None
    lenience: Lenience | None = None

    @pydantic.field_validator("verify")
    @classmethod
    def _known(cls, name: str) -> str:
        verify.named(name)
        return name


class Mesh(Strict):
    """Devices along the two axes of `jspec.parallel.make_mesh`; ``data: null``: as many as there are."""

    data: Count | None = None
    model: Count = 1


class Study(Strict):
    """A target, drafters trained for it in several ways, and how all of them are measured."""

    kind: Literal["study"]
    task: Task
    data: Data
    limits: Limits = Limits()
    max_new_tokens: Count  # of every answer that is written
    generation_batch: Count = 64  # answers written at a time
    target: Target
    recipes: dict[str, Recipe] = pydantic.Field(default={})
    drafters: dict[str, Drafter]
    ngrams: dict[str, Counted] = pydantic.Field(default={})
    mesh: Mesh | None = None
    measure: Measure

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Study:
        for name, drafter in self.drafters.items():
            if unknown := set(drafter.recipes or ()) - self.recipes.keys():
                raise ValueError(
                    f"drafters.{name}.recipes: expected among {list(self.recipes)}, got {unknown}"
                )
        rows = [*self.rows(), *self.ngrams]
        if len(set(rows)) != len(rows):
            raise ValueError(f"drafters, ngrams: expected different names, got {rows}")
        if not rows:
            raise ValueError("drafters: expected at least one, or an n-gram, got none")
        wanted = [*(self.measure.drafters or ())]
        wanted += [part.drafter for part in (self.measure.sweep, self.measure.lenience) if part is not None]
        for name in wanted:
            if name not in rows:
                raise ValueError(f"measure: expected a drafter among {rows}, got {name!r}")
        self._check_extras()
        return self

    def _check_extras(self) -> None:
        measure, shown = self.measure, self.measure.drafters
        if measure.sweep is not None and 1 not in measure.batch_sizes:
            raise ValueError("measure.sweep: expected 1 among batch_sizes with it")
        if measure.lenience is None:
            return
        if 1.0 not in measure.temperatures:
            raise ValueError("measure.lenience: expected 1 among temperatures with it")
        if shown is not None and measure.lenience.drafter not in shown:
            raise ValueError(f"measure.lenience.drafter: expected one of measure.drafters, got {shown}")

    def rows(self) -> dict[str, tuple[str, str | None]]:
        """The name of each trained or given drafter -> (drafter, recipe; None for one that is used as it is).

        A name in a table is that of the drafter, with the recipe where there is one: "small, distilled".
        """
        found: dict[str, tuple[str, str | None]] = {}
        for name, drafter in self.drafters.items():
            if drafter.model is not None:
                found[name] = (name, None)
                continue
            for recipe in self.recipes if drafter.recipes is None else drafter.recipes:
                found[f"{name}, {recipe}"] = (name, recipe)
        return found


class Loss(Strict):
    """A loss of `training.losses` with its arguments."""

    loss: str
    arguments: dict[str, float] = pydantic.Field(default={})

    @pydantic.model_validator(mode="after")
    def _known(self) -> Loss:
        losses.named(self.loss, **self.arguments)
        return self


class Losses(Strict):
    """The losses of `training.losses`, compared: one small drafter, once for each loss and seed."""

    kind: Literal["losses"]
    study: str  # the study that has the target, a file beside this one
    drafter: str  # of that study: start, batches and training
    steps: Count  # in place of that drafter's
    sources: Annotated[tuple[Source, ...], pydantic.Field(min_length=1)]
    features: Precision | None = None
    losses: Annotated[dict[str, Loss], pydantic.Field(min_length=1)]  # by the name in the table
    seeds: Annotated[tuple[Count, ...], pydantic.Field(min_length=1)] = (1, 2)
    validation_examples: Count = 512

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Losses:
        _check_features(self.features, self.sources)
        return self


KINDS: dict[str, type[Strict]] = {
    "speed": Table,
    "study": Study,
    "losses": Losses,
    "drafters": Drafters,
    "blockwise": Blockwise,
}


def load(path: str | Path, *, smoke: bool = False) -> Any:
    """Read and check an experiment, one of `KINDS` by its key ``kind`` (default: speed).

    Args:
      smoke: lay the values under the key ``smoke`` over the others. They are checked in any case.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not YAML, not an experiment, or has no ``smoke`` where that is wanted; one line that
        names the key.
    """
    content = configs.read(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected keys and values, got {type(content).__name__}")
    overlay = content.pop("smoke", None)
    kind = content.get("kind", "speed")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{path}: kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    plain = configs.check(content, KINDS[kind], str(path))
    if overlay is None:
        if smoke:
            raise ValueError(f"{path}: smoke: expected the values of a short run under this key, got none")
        return plain
    short = configs.check(overlaid(content, overlay), KINDS[kind], f"{path}: with smoke")
    return short if smoke else plain
