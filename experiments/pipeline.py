"""From texts to trained models: a study's target, its answers and its drafters, each a resumable stage."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.console

from experiments import study as studies
from experiments.alpha import Laws, table_model
from experiments.stages import Stages
from experiments.study import Study
from jspec import Model, drafters, load, models, parallel
from jspec.checkpoint import SMOLLM2
from jspec.drafters import stored
from jspec.drafters.stored import Stored
from jspec.io import hf, orbax
from jspec.io.tokenizer import Tokenizer, from_folder
from jspec.types import Drafter
from training import data, distill, finetune, ngram, readers, recipe, text
from training import tokenizer as tokenizers
from training.data import Example, Record
from training.features import Precision

ANSWERS = "answers"  # the folder of what the target writes, shared by all stages
TARGET = "target"  # the folder of a target that is trained
VALIDATION = 512  # sources to choose by: those of a distillation's evaluations, whose answers are there


class Texts(NamedTuple):
    """The records of a study; ``skipped``: how many pairs with an empty side each part was read without."""

    train: list[Record]
    validation: list[Record]
    test: list[Record]
    skipped: tuple[int, int, int] = (0, 0, 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A drafter of the table.

    Attributes:
      name: in tables: "small, distilled".
      paper: the paper's drafter beside it.
      laws: what teacher-forcing takes.
      model: None for an n-gram table, which ``laws.params`` is.
    """

    name: str
    paper: str | None
    laws: Laws
    model: Model | None

    def drafter(self, gamma: int, *, sample: bool = True) -> Drafter:
        """Drafting ``gamma`` tokens, sampled; without ``sample``, a model's likeliest."""
        if self.model is None:
            return drafters.ngram(self.laws.params, gamma)
        return drafters.model(self.model, gamma, sample=sample)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for equal weights."""
        return recipe.model_fingerprint(self.laws.lm.config, self.laws.params)


@dataclasses.dataclass(frozen=True, eq=False)
class Network:
    """A draft network, as a `Subject` of tables whose drafters are decoded with and not teacher-forced."""

    name: str
    stored: Stored
    paper: None = None

    def drafter(self, gamma: int, *, sample: bool = True) -> Drafter:
        """Drafting a chain of ``gamma`` tokens, sampled or the likeliest."""
        return stored.drafter(self.stored, gamma, sample=sample)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for equal weights."""
        return recipe.model_fingerprint(self.stored.network.config, self.stored.weights.net)


class Trained(NamedTuple):
    """The models of a study, in the dtype that they are measured in, and the texts to measure them on: the
    whole test set with its references, and validation sources to choose settings by.

    ``cut``: part of the data -> sources that were longer than allowed."""

    target: Model
    subjects: dict[str, Subject]
    test: list[Example]
    validation: list[Example]
    cut: dict[str, int]


def read(config: studies.Data, folder: Path, console: rich.console.Console) -> Texts:
    """All records; see `training.readers.read` for what may be wrong with them."""
    found = [readers.read(part, folder) for part in (config.train, config.validation, config.test)]
    for name, part in zip(("train", "validation", "test"), found, strict=True):
        if part.skipped:
            console.print(f"{name}: left out {part.skipped} pairs with an empty side", highlight=False)
    train, validation, test = found
    skipped = (train.skipped, validation.skipped, test.skipped)
    return Texts(train.records, validation.records, test.records, skipped)


def encode(
    name: str,
    records: Sequence[Record],
    target: Model,
    limits: data.Limits,
    console: rich.console.Console,
) -> tuple[list[Example], data.Counts]:
    """A part of the data as token ids; ``console`` is told of what was cut or left out."""
    if target.tokenizer is None:
        raise ValueError(f"target: {target.name} has no tokenizer, which the texts need")
    encoder = bool(target.decoder_start)
    examples, counts = data.encode(records, target.tokenizer, encoder=encoder, limits=limits)
    if counts.examples != len(records) or counts.truncated_sources or counts.truncated_targets:
        console.print(f"{name}: {counts}", highlight=False, soft_wrap=True)
    return examples, counts


def encode_test(
    config: Study, target: Model, records: Sequence[Record], console: rich.console.Console
) -> tuple[list[Example], data.Counts]:
    """The test set as token ids: long sources are cut as in training, and nothing is left out."""
    examples, counts = encode("test", records, target, data.Limits(source=config.limits.source), console)
    _check_whole(records, counts)
    return examples, counts


def _check_whole(test: Sequence[Record], counts: data.Counts) -> None:
    if counts.examples != len(test):
        raise ValueError(f"data.test: expected {len(test)} usable pairs, got {counts}")


def check_test(settings: finetune.Finetune, texts: Texts) -> None:
    """Refuse a test set with pairs that cannot be measured on, by the tokenizer that the target will have.

    `encode_test` does so as well, but when the target has been trained. A tokenizer that is to be trained is
    trained for this, too: that takes seconds, and the same text gives the same one.

    Raises:
      ValueError: naming how many pairs are unusable.
    """
    tokenizer = _tokenizer(settings, texts)
    if tokenizer is not None:
        # Right for a decoder, too: the end token that an encoder's source keeps, its prompts have not got.
        _check_whole(texts.test, data.encode(texts.test, tokenizer, encoder=True)[1])


def _tokenizer(settings: finetune.Finetune, texts: Texts) -> Tokenizer | None:
    if settings.tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            return tokenizers.train(texts.train, settings.tokenizer, folder)
    if settings.checkpoint is None:
        return None  # the training will say that it needs one
    path = Path(settings.checkpoint).expanduser()
    if settings.checkpoint == SMOLLM2 or path.suffix == ".gguf":
        return load(settings.checkpoint).tokenizer
    return from_folder(path if orbax.is_run(path) else hf.find_folder(settings.checkpoint))


def train(
    config: Study, texts: Texts, folder: Path, stages: Stages, console: rich.console.Console
) -> Trained:
    """Everything that is trained or counted; what is there already is read."""
    if config.target.finetune is not None and not finished(folder / TARGET):
        check_test(config.target.finetune, texts)
    workshop = Workshop(config, texts, folder, stages, console)
    test, counts = encode_test(config, workshop.target, texts.test, console)
    rows = config.rows()
    given = {row: workshop.given(name) for row, (name, how) in rows.items() if how is None}
    workshop.write_answers([source for how in config.recipes.values() for source in how.sources])
    workshop.write_answers([counted.source for counted in config.ngrams.values()])
    subjects: dict[str, Subject] = {}
    for row, (name, _) in rows.items():
        model = given[row] if row in given else workshop.train(row)
        laws = Laws(model.lm, model.params, config.measure.dtype)
        subjects[row] = Subject(row, config.drafters[name].paper, laws, model)
    for name in config.ngrams:
        subjects[name] = workshop.count(name)
    validation: list[Example] = list(workshop.corpus.validation[:VALIDATION])  # type: ignore[arg-type]
    cut = workshop.cut | {"test": counts.truncated_sources}
    return Trained(workshop.target, subjects, test, validation, cut)


class Workshop:
    """The target of a study, and the corpus as its token ids: what every drafter is trained from.

    To make one trains the target. It is in the dtype that it is measured in, and writes and teaches in it.
    """

    def __init__(
        self, config: Study, texts: Texts, folder: Path, stages: Stages, console: rich.console.Console
    ) -> None:
        self.config, self.folder, self.stages, self.console = config, folder, stages, console
        self.mesh = None if config.mesh is None else parallel.make_mesh(config.mesh.data, config.mesh.model)
        self.target = self._target(texts)
        # Encoded once: with its ids in hand, no recipe has to do it again.
        parts = {"train": texts.train, "validation": texts.validation}
        encoded = {
            name: encode(name, part, self.target, config.limits, console) for name, part in parts.items()
        }
        self.corpus = recipe.Corpus(*(examples for examples, _ in encoded.values()))
        self.cut = {name: counts.truncated_sources for name, (_, counts) in encoded.items()}

    def _target(self, texts: Texts) -> Model:
        settings = self.config.target
        if settings.model is not None:
            return load(settings.model, self.config.measure.dtype, mesh=self.mesh)
        assert settings.finetune is not None
        output = self.folder / TARGET
        with self.stages.timed("target", done=finished(output)):
            model = finetune.run(
                settings.finetune.model_copy(update={"limits": self.config.limits}),
                recipe.Corpus(texts.train, texts.validation),
                output,
                mesh=self.mesh,
                console=self.console,
            )
        return self.cast(model)

    # --- what the target writes -----------------------------------------------------------------------

    @property
    def writing(self) -> text.Writing:
        """How the target writes."""
        return writing(self.config, self.folder)

    def answered(self, source: text.Source) -> list[Example]:
        """The training sources with the answers that ``source`` names."""
        chosen: list[Example] = list(self.corpus.train[: source.examples])  # type: ignore[arg-type]
        if source.text == "references":
            return chosen
        return text.answered(
            self.target, chosen, self.writing, source.temperature, source.seed, console=self.console
        )

    @property
    def _inputs(self) -> dict[str, Any]:
        """What all text of the target depends on."""
        return {
            "target": recipe.model_fingerprint(self.target.lm.config, self.target.params),
            "train": recipe.text_fingerprint(self.corpus.train),
            "writing": [self.config.max_new_tokens, self.config.generation_batch],
        }

    def write_answers(self, wanted: Sequence[text.Source]) -> None:
        """Have the target answer the training sources, into the folder where all recipes look for that."""
        for source in _different(s for s in wanted if s.text == "target"):

            def write(source: text.Source = source) -> dict[str, int]:
                return _extent(self.answered(source))

            inputs = self._inputs | {"source": source.model_dump(mode="json")}
            self.stages.kept(f"answers, {_called(source)}", inputs, write)

    def keep_features(self, sources: Sequence[text.Source], precision: Precision) -> None:
        """Compute what the target shows of its answers and of references, into the same folder."""
        for source in _different(s for s in sources if s.text != "drafter"):

            def compute(source: text.Source = source) -> dict[str, int]:
                kept = text.features(
                    self.target, self.answered(source), self.writing, precision, console=self.console
                )
                return {"bytes": kept.nbytes}

            inputs = self._inputs | {"source": source.model_dump(mode="json"), "precision": precision}
            called = "references" if source.text == "references" else _called(source)
            self.stages.kept(f"features, {called}", inputs, compute)

    # --- drafters -------------------------------------------------------------------------------------

    def given(self, name: str) -> Model:
        """A drafter that is used as it is."""
        settings = self.config.drafters[name]
        assert settings.model is not None
        model = load(settings.model, self.config.measure.dtype, mesh=self.mesh)
        recipe.check_kind(f"drafters.{name}.model", self.target, model)
        recipe.check_vocabulary(f"drafters.{name}.model", self.target, model)
        return model

    def train(self, row: str) -> Model:
        """The drafter of a row, trained by its recipe."""
        name, how = self.config.rows()[row]
        settings = distillation(self.config, self.config.drafters[name], self.config.recipes[how or ""])
        return self.distil(row, settings, self.folder / f"{name}-{how}")

    def distil(self, stage: str, settings: distill.Distill, output: Path) -> Model:
        """A drafter by any settings; cross-entropy on references is plain fine-tuning."""
        if settings.features is not None and not finished(output):
            self.keep_features(settings.sources, settings.features)
        with self.stages.timed(stage, done=finished(output)):
            model = distill.run(
                settings,
                self.corpus,
                output,
                target=self.target,
                cache=self.folder / ANSWERS,
                mesh=self.mesh,
                console=self.console,
            )
        return self.cast(model)

    def count(self, name: str) -> Subject:
        """An n-gram drafter."""
        counted, output = self.config.ngrams[name], self.folder / name
        corpus = self.corpus._replace(train=self.answered(counted.source))
        with self.stages.timed(name, done=finished(output)):
            table = ngram.run(counted.recipe(), corpus, output, target=self.target)
        return Subject(name, counted.paper, Laws(table_model(table.vocab_size), table), None)

    def cast(self, model: Model) -> Model:
        """A trained model in the dtype that it is measured in."""
        return dataclasses.replace(model, params=models.cast(model.params, self.config.measure.dtype))


def writing(config: Study, folder: Path) -> text.Writing:
    """How the target of a study writes; the same for every stage, so that each text is written once."""
    return text.Writing(config.max_new_tokens, config.generation_batch, folder / ANSWERS)


def validated(
    config: Study,
    target: Model,
    examples: Sequence[Example],
    temperature: float,
    stages: Stages,
    console: rich.console.Console,
) -> list[Example]:
    """Validation sources with the target's answers, as a stage: those that distillation looks at during
    training, with its settings, so that they need not be written again."""
    how = writing(config, stages.folder)

    def answered() -> list[Example]:
        return text.answered(target, examples, how, temperature, distill.EVALUATION_SEED, console=console)

    inputs = {
        "target": recipe.model_fingerprint(target.lm.config, target.params),
        "validation": recipe.text_fingerprint(examples),
        "writing": [how.max_new_tokens, how.batch_size],
    }
    name = f"answers on validation, T={temperature:g}, {len(examples)}"
    stages.kept(name, inputs, lambda: _extent(answered()))
    return answered()


def _extent(written: Sequence[Example]) -> dict[str, int]:
    lengths = [len(example.target) for example in written]
    return {"answers": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}


def distillation(config: Study, drafter: studies.Drafter, how: studies.Recipe) -> distill.Distill:
    """The settings that train a drafter by a recipe."""
    assert drafter.start is not None
    assert drafter.batching is not None
    assert drafter.training is not None
    return distill.Distill(
        drafter=drafter.start,
        loss=how.loss,
        loss_arguments=how.loss_arguments,
        sources=how.sources,
        features=how.features,
        limits=config.limits,
        batching=drafter.batching,
        max_new_tokens=config.max_new_tokens,
        generation_batch=config.generation_batch,
        evaluation_text="target",
        training=drafter.training,
    )


def _different(sources: Iterable[text.Source]) -> list[text.Source]:
    """Without repetitions, whatever their shares."""
    return list(dict.fromkeys(source.model_copy(update={"weight": 1.0}) for source in sources))


def _called(source: text.Source) -> str:
    number = "all" if source.examples is None else source.examples
    return f"T={source.temperature:g}, seed {source.seed}, {number}"


def finished(folder: Path) -> bool:
    """Whether a run has come to its end."""
    return (folder / orbax.DONE).is_file()
