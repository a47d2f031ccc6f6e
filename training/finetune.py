"""Fine-tuning: a model learns the answers in a corpus, from a checkpoint or from scratch."""

from __future__ import annotations

import dataclasses
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
from training import acceptance, forward, hosts, init, losses, recipe
from training.config import Batching, Count, Strict, Training
from training.data import Limits, Record
from training.lock import alone
from training.loop import fit
from training.tokenizer import FILE as TOKENIZER
from training.tokenizer import TokenizerConfig
from training.tokenizer import train as train_tokenizer

Token = Annotated[int, pydantic.Field(ge=0)]


class Finetune(Strict):
    """A model (``checkpoint``: a Hub id or folder; or ``architecture``, from scratch), a corpus, a loop.

    ``architecture`` holds ``kind`` (encoder-decoder or decoder) and the fields of `Seq2SeqConfig` or
    `DecoderConfig`; its ``vocab_size`` may be left to the tokenizer, which is trained on the corpus. Without
    tokenizer it takes ``eos``, the token that ends an answer, and beside an encoder ``decoder_start``, which
    the decoder begins with (default: the tokenizer's padding, as for T5).
    """

    checkpoint: str | None = None
    architecture: dict[str, Any] | None = None
    eos: Token | None = None
    decoder_start: Token | None = None
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
        for name in ("tokenizer", "eos", "decoder_start"):
            if self.checkpoint is not None and getattr(self, name) is not None:
                raise ValueError(f"{name}: expected none with a checkpoint, which has its own")
        decoder = (self.architecture or {}).get("kind") == "decoder"
        if decoder and self.tokenizer is not None and self.tokenizer.append_end:
            raise ValueError(
                "tokenizer.append_end: expected false for a decoder, whose answer goes on from its prompt"
            )
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


@alone
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
      mesh: see `jspec.parallel`. It is no part of the run: another one may take over, with ``max_tokens`` one
        whose `data` is as large.

    Raises:
      ValueError: a wrong configuration, corpus or folder.
      OSError, FloatingPointError: see `training.loop.fit`.
    """
    output = Path(output)
    inputs = {
        **recipe.origin("finetune", corpus),
        "tokenizer": tokenizer and recipe.text_fingerprint(tokenizer.vocabulary.tokens),
        **recipe.shape_inputs(config.batching, config.training, mesh),
    }
    model = None
    if config.checkpoint is not None:
        with parallel.on_host(mesh):
            model = load(config.checkpoint)
            inputs["checkpoint"] = recipe.model_fingerprint(model.lm.config, model.params)
    if recipe.open_folder(output, config, inputs):
        return load(output, mesh=mesh)
    if model is None:
        with parallel.on_host(mesh):
            model = _from_scratch(config, corpus, output, tokenizer)
    recipe.describe(output, model)
    settings = config.training
    shapes = (config.batching, settings, model.decoder_start)
    training = recipe.encoded(config, model, corpus.train, "train")
    validation = recipe.encoded(config, model, corpus.validation[: config.validation_examples], "validation")
    for name, examples in (("train", training), ("validation", validation)):
        recipe.check_positions(name, examples, model)
    train = recipe.batches(training, *shapes, mesh=mesh)
    held_out = recipe.held_out(validation, *shapes, mesh=mesh)
    fit(
        model.params,
        CrossEntropy(model.lm, config.label_smoothing, settings.dropout),
        lambda step, params: train[step],
        settings,
        output,
        evaluate=lambda params: acceptance.validate(
            model.lm,
            params,
            held_out,
            width=model.vocab_size,
            banned=model.banned,
            dtype=settings.dtype,
        ),
        shardings=recipe.shardings(mesh, model),
        console=console,
    )
    return load(output, mesh=mesh)


def _from_scratch(
    config: Finetune, corpus: recipe.Corpus, output: Path, tokenizer: Tokenizer | None
) -> Model:
    """The model before the first step."""
    if tokenizer is None and config.tokenizer is not None:
        settings, records = config.tokenizer, cast(Sequence[Record], corpus.train)

        def make() -> None:
            if not (output / TOKENIZER).is_file():  # it comes last, and a run that goes on has it
                train_tokenizer(records, settings, output)

        hosts.on_first(make)
        tokenizer = from_folder(output)
    values = dict(config.architecture or {})
    if tokenizer is not None:
        values.setdefault("vocab_size", len(tokenizer.vocabulary))
    architecture = orbax.architecture(values)
    encoder = isinstance(architecture, models.Seq2SeqConfig)
    eos, start = () if config.eos is None else (config.eos,), config.decoder_start
    if tokenizer is not None:
        if eos:
            raise ValueError(f"eos: expected none beside a tokenizer, which has its own, got {config.eos}")
        eos = tokenizer.eos
        start = tokenizer.backend.pad_token_id if encoder and start is None else start
    if not eos:
        raise ValueError("eos: expected the id of the token that ends an answer, got none")
    if encoder and start is None:
        raise ValueError("decoder_start: expected the id of the token that a decoder begins with, got none")
    return Model(
        models.language_model(architecture),
        init.random(architecture, jax.random.key(config.training.seed)),
        tokenizer,
        eos=eos,
        decoder_start=() if start is None else (start,),
        vocab_size=0 if tokenizer is None else len(tokenizer.vocabulary),
    )
