"""Distillation: a smaller model learns a target's laws on given text, the target's text, or its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import pydantic
import rich.console
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jspec import models, parallel
from jspec.checkpoint import Model, load
from jspec.io import orbax
from jspec.models.layers import Dropout
from jspec.types import LanguageModel, PyTree
from training import acceptance, forward, init, losses, recipe
from training.config import Batching, Count, Strict, Training
from training.data import Example, Limits
from training.features import Precision
from training.lock import alone
from training.loop import fit
from training.text import Source, Texts, Writing, answered

EVALUATION_SEED = 2**31


class Drafter(Strict):
    """The drafter before the first step: a checkpoint (Hub id, folder or run), a random architecture (see
    `training.finetune.Finetune`; ``vocab_size`` is the target's), or some of the target's layers."""

    checkpoint: str | None = None
    architecture: dict[str, Any] | None = None
    layers: tuple[int, ...] | None = None
    encoder_layers: tuple[int, ...] | None = None  # with ``layers``; None: all

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Drafter:
        given = [name for name in ("checkpoint", "architecture", "layers") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"expected one of checkpoint, architecture and layers, got {given or 'none'}")
        if self.encoder_layers is not None and self.layers is None:
            raise ValueError("encoder_layers: expected layers with them")
        return self


class Filter(Strict):
    """AdaSPEC's token filter: learn only from the share ``keep`` of the tokens where most is to be gained on
    ``reference``, a copy of the drafter that was distilled before (a run's folder)."""

    reference: str
    keep: Annotated[float, pydantic.Field(gt=0, le=1)] = 0.4


class Distill(Strict):
    """A target, a drafter, a loss by name (`training.losses.NAMES`) with its arguments, text, and a loop.

    With ``features`` the target's hidden states of all training text are computed once, rounded and kept on
    the disk, 2 * width bytes a token (`training.features`), instead of at every step.

    Evaluations simulate acceptance with ``gamma`` drafted tokens: on the validation answers, or, with
    ``evaluation_text: target``, on what the target itself writes (greedily for temperature 0, sampled for 1).
    """

    target: str | None = None  # for the command line
    drafter: Drafter
    loss: str = "forward_kl"
    loss_arguments: dict[str, float] = pydantic.Field(default={})
    token_filter: Filter | None = None
    sources: Annotated[tuple[Source, ...], pydantic.Field(min_length=1)] = (Source(text="references"),)
    features: Precision | None = None
    data: recipe.Data | None = None
    limits: Limits = Limits()
    chat: bool = False  # sources are user messages, put into the chat template (decoder-only)
    batching: Batching = Batching(batch_size=64)
    max_new_tokens: Count = 128  # of answers that are written
    generation_batch: Count = 64  # answers written at a time
    evaluation_text: Literal["references", "target"] = "references"
    validation_examples: Count = 512
    gamma: Count = 5
    training: Training

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Distill:
        losses.named(self.loss, **self.loss_arguments)
        if self.token_filter is not None and self.training.accumulate > 1:
            # The filter's share is one of the whole batch, of which a micro-batch knows nothing.
            got = self.training.accumulate
            raise ValueError(f"training.accumulate: expected 1 with a token_filter, got {got}")
        if self.features is not None and any(source.text == "drafter" for source in self.sources):
            raise ValueError("features: expected none with text of the drafter, which is new all the time")
        return self


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The objective: a loss between target and drafter, a mean of sequences' means.

    The target's forward, or its head alone where batches come with features, is part of the step and its
    params are arguments; where the loss does not look at them (cross-entropy) the compiler leaves it out.
    """

    target: LanguageModel
    drafter: LanguageModel
    loss: losses.Loss
    dropout: float
    width: int  # logits beyond the common vocabulary are padding
    reference: LanguageModel | None = None
    keep: float = 1.0
    banned: tuple[int, ...] = ()  # what the target never emits is no part of the laws either

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """See `training.loop.Objective`; ``frozen`` holds the params of target and reference."""

        possible = functools.partial(forward.possible, width=self.width, banned=self.banned)

        def teacher(lm: LanguageModel, params: PyTree) -> Float[Array, "B T V"]:
            return jax.lax.stop_gradient(possible(forward.logits(lm, params, batch)))

        if batch.features is None:
            p = teacher(self.target, frozen["target"])
        else:
            dtype = jax.tree.leaves(frozen["target"])[0].dtype
            p = possible(self.target.head(frozen["target"], batch.features.astype(dtype)))
        noise = Dropout(key, self.dropout) if self.dropout else None
        q = possible(forward.logits(self.drafter, params, batch, dropout=noise))
        weights = batch.weights
        if self.reference is not None:
            r = teacher(self.reference, frozen["reference"])
            weights = losses.token_filter(p, q, r, weights, keep=self.keep)
        return losses.sequence_mean(self.loss(p, q, batch.labels), weights), {}


@alone
def run(
    config: Distill,
    corpus: recipe.Corpus,
    output: str | Path,
    *,
    target: Model | None = None,
    cache: str | Path | None = None,
    mesh: Mesh | None = None,
    console: rich.console.Console | None = None,
) -> Model:
    """The distilled drafter: trained, or trained to the end, or read where that was done before.

    Args:
      corpus: sources and reference answers; token ids for a target without tokenizer.
      output: the run's folder; ``jspec.load(output)`` reads it later.
      target: None: the one that ``config`` names. Its forward computes in the dtype of its params.
      cache: a folder for what the target writes, which several runs may share; None: within ``output``.
      mesh: see `jspec.parallel`. It is no part of the run: another one may take over, with ``max_tokens`` one
        whose `data` is as large.

    Raises:
      ValueError: a wrong configuration, corpus or folder, or another vocabulary than the target's.
      OSError, FloatingPointError: see `training.loop.fit`.
    """
    output = Path(output)
    settings = config.training
    drafter = reference = None
    with parallel.on_host(mesh):
        target = recipe.given("target", target, config.target, settings.dtype)
        if config.drafter.checkpoint is not None:
            drafter = load(config.drafter.checkpoint)
        if config.token_filter is not None:
            reference = load(config.token_filter.reference)
        given = (("target", target), ("drafter", drafter), ("reference", reference))
        fingerprints = {
            name: recipe.model_fingerprint(model.lm.config, model.params)
            for name, model in given
            if model is not None
        }
    inputs = {
        **recipe.origin("distill", corpus),
        **fingerprints,
        **recipe.shape_inputs(config.batching, settings, mesh),
    }
    for name, model in (("drafter.checkpoint", drafter), ("token_filter.reference", reference)):
        if model is not None:
            recipe.check_kind(name, target, model)
            recipe.check_vocabulary(name, target, model)
    if recipe.open_folder(output, config, inputs):
        return load(output, mesh=mesh)
    with parallel.on_host(mesh):
        drafter = begin(config.drafter, target, settings.seed, drafter)
    recipe.describe(output, drafter)
    target = recipe.on_mesh(mesh, target)
    training = recipe.encoded(config, target, corpus.train, "train")
    validation = recipe.encoded(config, target, corpus.validation[: config.validation_examples], "validation")
    if any(source.text == "references" for source in config.sources):  # what is written fits
        recipe.check_positions("train", training, target, drafter)
    if config.evaluation_text == "references":
        recipe.check_positions("validation", validation, target, drafter)
    writing = Writing(
        config.max_new_tokens, config.generation_batch, output / "text" if cache is None else Path(cache)
    )
    texts = Texts(
        config.sources,
        training,
        target,
        drafter,
        output / "text",
        writing=writing,
        batching=config.batching,
        training=settings,
        mesh=mesh,
        precision=config.features,
        console=console,
    )
    frozen = {"target": target.params}
    if reference is not None:
        frozen["reference"] = recipe.on_mesh(mesh, reference).params
    objective = Divergence(
        target.lm,
        drafter.lm,
        losses.named(config.loss, **config.loss_arguments),
        settings.dropout,
        min(target.vocab_size, drafter.vocab_size),
        None if reference is None else reference.lm,
        1.0 if config.token_filter is None else config.token_filter.keep,
        target.banned,
    )
    fit(
        drafter.params,
        objective,
        texts.batch,
        settings,
        output,
        frozen=frozen,
        evaluate=_evaluation(config, target, drafter, validation, writing, mesh, console),
        shardings=recipe.shardings(mesh, drafter),
        console=console,
    )
    return load(output, mesh=mesh)


def begin(
    config: Drafter, target: Model, seed: int, loaded: Model | None = None, name: str = "drafter"
) -> Model:
    """The drafter before the first step, ``loaded`` where it is a checkpoint; it begins and ends answers as
    the target does, and never emits what the target does not: it does not learn about that.

    Raises:
      ValueError: a wrong architecture, layers that the target lacks; ``name`` is the setting's.
    """
    if loaded is not None:
        return dataclasses.replace(
            loaded,
            tokenizer=loaded.tokenizer or target.tokenizer,
            eos=target.eos,
            decoder_start=target.decoder_start,
            banned=tuple(token for token in target.banned if token < loaded.vocab_size),
        )
    if config.layers is not None:
        architecture, params = init.subset(
            target.lm.config, target.params, config.layers, config.encoder_layers
        )
    else:
        values = {"vocab_size": target.lm.config.vocab_size} | (config.architecture or {})
        architecture = orbax.architecture(values, f"{name}.architecture")
        params = init.random(architecture, jax.random.key(seed))
    if isinstance(architecture, models.Seq2SeqConfig) != bool(target.decoder_start):
        raise ValueError(f"{name}.architecture.kind: expected the target's, got another")
    return dataclasses.replace(target, lm=models.language_model(architecture), params=params, name="drafter")


def _evaluation(
    config: Distill,
    target: Model,
    drafter: Model,
    validation: list[Example],
    writing: Writing,
    mesh: Mesh | None,
    console: rich.console.Console | None,
) -> Callable[[PyTree], dict[str, float]]:
    """Acceptance as it would be, from params."""
    written = config.evaluation_text == "target"
    if written:  # a seed of its own: training may see the same sources
        sets = [
            answered(target, validation, writing, temperature, EVALUATION_SEED, console=console)
            for temperature in (0.0, 1.0)
        ]
    else:
        sets = [validation]
    shapes = (config.batching, config.training, target.decoder_start)
    held_out = [recipe.held_out(examples, *shapes, mesh) for examples in sets]

    def evaluate(params: PyTree) -> dict[str, float]:
        results = [
            acceptance.simulate(
                target.lm,
                target.params,
                drafter.lm,
                params,
                batches,
                width=min(target.vocab_size, drafter.vocab_size),
                banned=target.banned,
                gamma=config.gamma,
                dtype=config.training.dtype,
            )
            for batches in held_out
        ]
        greedy = {name: results[0][name] for name in ("greedy_agreement", "tau_0")}
        return results[-1] | greedy

    return evaluate
