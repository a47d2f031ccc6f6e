"""Online Speculative Decoding: a drafter learns from the requests it serves (Liu et al., arXiv 2310.07177).

Verification has computed the target's logits at every emitted position, rejected ones included, so they are
kept (`feedback`, through the engine's ``record``) and no second forward of the target is needed::

    repeat:  serve the next ``update_interval`` requests with the drafter as it is
             one gradient step on  loss(recorded target logits, drafter logits)  at the emitted positions
             (with ``only_rejected``: where a drafted token was rejected)

New params are arguments of compiled functions, so nothing is compiled again. Request i of the stream is
example i of the corpus (and again from its beginning), with a random stream of its own: what a step does is
a function of the step and the params, and an interrupted run resumes exactly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import pydantic
import rich.console
from jaxtyping import Array, Bool, Float, Int

from jspec import drafters, engine, models, options, verify
from jspec.batch import Request, pad, source_width
from jspec.checkpoint import Model, load
from jspec.records import Statistics
from jspec.types import Info, LanguageModel, PyTree
from training import acceptance, forward, losses, recipe
from training.config import Batching, Count, Strict, Training
from training.data import Limits
from training.lock import alone
from training.loop import fit


class Serving(Strict):
    """How requests are decoded."""

    max_new_tokens: Count = 128
    temperature: Annotated[float, pydantic.Field(ge=0)] = 1.0
    num_tokens: Count = 5  # the longest draft


class Online(Strict):
    """A target, a drafter to begin with, and a stream of requests: the sources of ``data.train``.

    Each of ``training.steps`` updates follows ``update_interval`` requests, which are decoded as one batch.
    The paper's code updates after 8 requests with a decoder-only pair and after 2 with a T5 pair, at a
    constant learning rate of 1e-4 and 2e-5. The loss is one of `training.losses.NAMES` with its arguments.
    """

    target: str | None = None  # for the command line: checkpoints or runs
    drafter: str | None = None
    data: recipe.Data | None = None
    limits: Limits = Limits()
    chat: bool = False  # requests are user messages, put into the chat template (decoder-only)
    serving: Serving = Serving()
    update_interval: Count = 8
    only_rejected: bool = False
    loss: str = "forward_kl"
    loss_arguments: dict[str, float] = pydantic.Field(default={})
    batching: Batching = Batching(batch_size=64)  # of evaluations
    validation_examples: Count = 512
    training: Training

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Online:
        losses.named(self.loss, **self.loss_arguments)
        if self.training.dropout:
            raise ValueError(f"training.dropout: expected 0, got {self.training.dropout}")
        if self.training.accumulate > 1:  # the numbers that are logged are of all positions of a batch
            raise ValueError(f"training.accumulate: expected 1, got {self.training.accumulate}")
        return self


# --- what verification knows ------------------------------------------------------------------------


class Feedback(NamedTuple):
    """Of every emitted token: the logits it was drawn from, and whether a drafted token was rejected there.
    Buffers of B rows of S tokens take 4 B S V bytes: 0.5 GB for 8 rows of 512 tokens of 32,000."""

    logits: Float[Array, "B R V"]  # the target's, before penalties and temperature
    rejected: Bool[Array, "B R"]
    statistics: Statistics


def feedback(info: Info) -> Feedback:
    """The record of online distillation."""
    path, draft = info.verdict.path, info.draft
    assert info.forward.logits is not None
    children = (draft.parents[:, None] == path[:, :, None]) & draft.valid[:, None]
    beyond = jnp.arange(path.shape[1])[None] >= info.verdict.num_accepted[:, None]
    logits = jnp.take_along_axis(info.forward.logits, path[:, :, None], axis=1)
    return Feedback(logits, beyond & children.any(2), engine.statistics(info))


class Served(NamedTuple):
    """Requests and their answers: a `training.data.Batch` of texts, and the feedback of each token."""

    tokens: Int[Array, "B S-1"]
    labels: Int[Array, "B S-1"]
    weights: Float[Array, "B S-1"]  # 1 where the label is a token of the answer
    lengths: Int[Array, " B"]
    source: Int[Array, "B Ts"] | None
    source_lengths: Int[Array, " B"] | None
    feedback: Feedback  # [B, S]


@jax.jit
def _served(
    state: engine.State, source: Int[Array, "B Ts"] | None, source_lengths: Int[Array, " B"] | None
) -> Served:
    index = jnp.arange(1, state.tokens.shape[1])[None]
    emitted = (index >= state.starts[:, None]) & (index < state.lengths[:, None])
    return Served(
        state.tokens[:, :-1],
        state.tokens[:, 1:],
        emitted.astype(jnp.float32),
        jnp.maximum(state.lengths - 1, 1),
        source,
        source_lengths,
        state.record,
    )


def requests(model: Model, sources: Sequence[Sequence[int]]) -> list[Request]:
    """What the engine reads: prompts, or sources and the decoder's start."""
    if model.decoder_start:
        return [Request(model.decoder_start, source) for source in sources]
    return [Request(source) for source in sources]


@dataclasses.dataclass(frozen=True, eq=False)
class Server:
    """A target, a drafter's architecture, and the stream of requests: the loop's source of batches."""

    target: Model
    drafter: Model
    stream: Sequence[Request]
    config: Online

    def __call__(self, step: int, params: PyTree) -> Served:
        """Decode requests ``step * update_interval`` and following with a drafter of these params."""
        target, serving, count = self.target, self.config.serving, self.config.update_interval
        numbers = range(step * count, (step + 1) * count)
        taken = [self.stream[i % len(self.stream)] for i in numbers]
        prompt = pad(taken, self.source_width)
        settings = options.resolve(
            {
                "temperature": serving.temperature,
                "seed": [(self.config.training.seed + i) % 2**32 for i in numbers],
            },
            prompts=count,
            samples=1,
            width=target.lm.config.vocab_size,
            vocab=target.vocab_size,
            ends=target.eos,
            special_id=None,
            banned=target.banned,
        )
        weights = models.cast(params, self.config.training.dtype)
        drafter = drafters.model(dataclasses.replace(self.drafter, params=weights), serving.num_tokens)
        state = engine.generate(
            target.params,
            prompt,
            settings.keys(range(count)),
            target=target.lm,
            drafter=drafter,
            verify=verify.resolve(drafter.method, None),
            sampler=settings.sampler(range(count)),
            stops=settings.stops(),
            max_new_tokens=serving.max_new_tokens,
            capacity=self.capacity,
            record=feedback,
        )
        # The prompts stay on the host: their width differs from batch to batch, and would be compiled anew.
        return _served(state, prompt.source, prompt.source_lengths)

    @functools.cached_property
    def capacity(self) -> int:
        """Slots of a row: the longest prompt of the stream and an answer."""
        return max(len(request.tokens) for request in self.stream) + self.config.serving.max_new_tokens

    @functools.cached_property
    def source_width(self) -> int:
        """Columns of an encoder's input."""
        return source_width(self.stream, self.target.source_length)


# --- learning from it -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The objective: the loss against recorded logits, a mean of the requests' means."""

    drafter: LanguageModel
    loss: losses.Loss
    only_rejected: bool
    width: int  # logits beyond the common vocabulary are padding
    banned: tuple[int, ...] = ()  # what the target never emits is no part of the laws either

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: Served, key: jax.Array
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """See `training.loop.Objective`. Besides the loss: ``alpha`` (sum of min(p, q) at temperature 1, mean
        over the answers' tokens), ``accepted`` (the share of drafted tokens that the target took) and ``tau``
        (tokens emitted per target forward); all of the drafter before the step."""
        q = forward.possible(forward.logits(self.drafter, params, batch), self.width, self.banned)
        p = forward.possible(batch.feedback.logits[:, 1:], self.width, self.banned)
        offset, accepted, proposed = (x[:, 1:] for x in batch.feedback.statistics)
        emitted, rejected = batch.weights > 0, batch.feedback.rejected[:, 1:]
        opens = emitted & (offset == 0)

        def share(part: Array, whole: Array) -> Array:
            return part.sum().astype(jnp.float32) / jnp.maximum(whole.sum(), 1).astype(jnp.float32)

        alpha = losses.acceptance(p, jax.lax.stop_gradient(q))
        numbers = {
            "alpha": share(jnp.where(emitted, alpha, 0), emitted),
            "accepted": share(accepted & emitted, jnp.where(opens, proposed, 0)),
            "tau": share(emitted, opens),
        }
        weights = batch.weights * rejected.astype(jnp.float32) if self.only_rejected else batch.weights
        return losses.sequence_mean(self.loss(p, q, batch.labels), weights), numbers


@alone
def run(
    config: Online,
    corpus: recipe.Corpus,
    output: str | Path,
    *,
    target: Model | None = None,
    drafter: Model | None = None,
    console: rich.console.Console | None = None,
) -> Model:
    """The drafter after all updates: trained, or trained to the end, or read where that was done before.

    ``metrics.jsonl`` has the acceptance of each update's requests, as they were served.

    Args:
      corpus: requests (their answers are not looked at), and text to simulate acceptance on.
      output: the run's folder; ``jspec.load(output)`` reads it later.
      target, drafter: None: those that ``config`` names.
    Raises:
      ValueError: a wrong configuration, corpus or folder; models of different vocabularies or kinds.
      OSError, FloatingPointError: see `training.loop.fit`.
    """
    output, settings = Path(output), config.training
    target = recipe.given("target", target, config.target, settings.dtype)
    drafter = recipe.given("drafter", drafter, config.drafter, "float32")
    recipe.check_kind("drafter", target, drafter)
    recipe.check_vocabulary("drafter", target, drafter)
    drafter = dataclasses.replace(drafter, params=models.cast(drafter.params, "float32"))  # it is trained
    inputs = {
        **recipe.origin("online", corpus),
        "target": recipe.model_fingerprint(target.lm.config, target.params),
        "drafter": recipe.model_fingerprint(drafter.lm.config, drafter.params),
    }
    if recipe.open_folder(output, config, inputs):
        return load(output)
    recipe.describe(output, drafter)
    stream, validation = (
        recipe.encoded(config, target, texts, name)
        for texts, name in zip(corpus, corpus._fields, strict=True)
    )
    for name, examples in (("train", stream), ("validation", validation)):
        recipe.check_positions(name, examples, target, drafter)
    held_out = recipe.held_out(
        validation[: config.validation_examples], config.batching, settings, target.decoder_start
    )
    server = Server(target, drafter, requests(target, [example.source for example in stream]), config)
    room = min(target.context_length, drafter.context_length)
    if server.capacity > room:
        raise ValueError(
            f"serving.max_new_tokens: prompts and answers need {server.capacity} positions, the models have "
            f"{room}"
        )
    width = min(target.vocab_size, drafter.vocab_size)
    loss = losses.named(config.loss, **config.loss_arguments)
    objective = Distillation(drafter.lm, loss, config.only_rejected, width, target.banned)
    fit(
        drafter.params,
        objective,
        server,
        settings,
        output,
        evaluate=lambda params: acceptance.simulate(
            target.lm,
            target.params,
            drafter.lm,
            params,
            held_out,
            width=width,
            banned=target.banned,
            gamma=config.serving.num_tokens,
            dtype=settings.dtype,
        ),
        console=console,
    )
    return load(output)
