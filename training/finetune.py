"""Fine-tuning: a model learns the answers in a corpus, from a checkpoint or from scratch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import jax
import pydantic
import rich.console
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jspec import models, parallel
from jspec.checkpoint import Model, load
from jspec.io import orbax
from jspec.io.tokenizer import Tokenizer, from_folder
from jspec.models.layers import Dropout
from jspec.types import LanguageModel, PyTree
from training import acceptance, forward, init, losses, recipe
from training.config import Batching, Count, Strict, Training
from training.data import Limits, Record
from training.loop import fit
from training.tokenizer import TokenizerConfig
from training.tokenizer import train as train_tokenizer


class Finetune(Strict):
    """A model (``checkpoint``: a Hub id or folder; or ``architecture``, from scratch), a corpus, a loop.

    ``architecture`` holds ``kind`` (encoder-decoder or decoder) and the fields of `Seq2SeqConfig` or
    `DecoderConfig`; its ``vocab_size`` may be left to the tokenizer, which is trained on the corpus.
    """

    checkpoint: str | None = None
    architecture: dict[str, Any] | None = None
    tokenizer: TokenizerConfig | None = None
    data: recipe.Data | None = None
    limits: Limits = Limits()
    chat: bool = False  # sources are user messages, put into the chat template (decoder-only)
    batching: Batching = Batching(batch_size=64)
    validation_examples: Count = 512  # the first so many
    label_smoothing: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0
    training: Training

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Finetune:
        if (self.checkpoint is None) == (self.architecture is None):
            raise ValueError("expected one of checkpoint and architecture")
        if self.checkpoint is not None and self.tokenizer is not None:
            raise ValueError("tokenizer: expected none with a checkpoint, which has its own")
        return self


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """The objective: -log q of the answers, smoothed, a mean of sequences' means."""

    lm: LanguageModel
    smoothing: float
    dropout: float

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """See `training.loop.Objective`."""
        noise = Dropout(key, self.dropout) if self.dropout else None
        logits = forward.logits(self.lm, params, batch, dropout=noise)
        loss = losses.cross_entropy(None, logits, batch.labels, smoothing=self.smoothing)
        return losses.sequence_mean(loss, batch.weights), {}


def run(
    config: Finetune,
    corpus: recipe.Corpus,
    output: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    console: rich.console.Console | None = None,
) -> Model:
    """The fine-tuned model: trained, or trained to the end, or read where that was done before.

    Args:
      corpus: texts; token ids for a model without tokenizer.
      output: the run's folder; ``jspec.load(output)`` reads it later.
      tokenizer: of a model from scratch, in place of one that is trained.
      mesh: see `jspec.parallel`. It is no part of the run: another one may take over.

    Raises:
      ValueError: a wrong configuration, corpus or folder.
      OSError, FloatingPointError: see `training.loop.fit`.
    """
    output = Path(output)
    inputs = {
        "recipe": "finetune",
        "train": recipe.text_fingerprint(corpus.train),
        "validation": recipe.text_fingerprint(corpus.validation),
        "tokenizer": tokenizer and recipe.text_fingerprint(tokenizer.vocabulary.tokens),
    }
    if recipe.open_folder(output, config, inputs):
        return load(output, mesh=mesh)
    with parallel.on_host(mesh):
        model = _start(config, corpus, output, tokenizer)
    recipe.describe(output, model)
    settings = config.training
    encode = functools.partial(
        recipe.encode,
        tokenizer=model.tokenizer,
        encoder=bool(model.decoder_start),
        limits=config.limits,
        chat=config.chat,
    )
    shapes = (config.batching, settings, model.decoder_start)
    train = recipe.batches(encode(corpus.train, name="train"), *shapes, mesh=mesh)
    validation = encode(corpus.validation[: config.validation_examples], name="validation")
    held_out = recipe.held_out(validation, *shapes, mesh=mesh)
    fit(
        model.params,
        CrossEntropy(model.lm, config.label_smoothing, settings.dropout),
        lambda step, params: train[step],
        settings,
        output,
        evaluate=lambda params: acceptance.validate(model.lm, params, held_out, dtype=settings.dtype),
        shardings=recipe.shardings(mesh, model),
        console=console,
    )
    return load(output, mesh=mesh)


def _start(config: Finetune, corpus: recipe.Corpus, output: Path, tokenizer: Tokenizer | None) -> Model:
    """The model before the first step."""
    if config.checkpoint is not None:
        return load(config.checkpoint)
    if tokenizer is None and config.tokenizer is not None:
        records = cast(Sequence[Record], corpus.train)
        tokenizer = from_folder(output) or train_tokenizer(records, config.tokenizer, output)
    values = dict(config.architecture or {})
    if tokenizer is not None:
        values.setdefault("vocab_size", len(tokenizer.vocabulary))
    architecture = orbax.architecture(values)
    encoder = isinstance(architecture, models.Seq2SeqConfig)
    start = 0 if tokenizer is None else tokenizer.backend.pad_token_id or 0
    return Model(
        models.language_model(architecture),
        init.random(architecture, jax.random.key(config.training.seed)),
        tokenizer,
        eos=(1,) if tokenizer is None else tokenizer.eos,
        decoder_start=(start,) if encoder else (),
        vocab_size=0 if tokenizer is None else len(tokenizer.vocabulary),
    )
