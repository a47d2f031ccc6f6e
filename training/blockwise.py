"""Blockwise parallel decoding: a base model and the heads that draft for it learn together ("fine tuning" in
Stern, Shazeer, Uszkoreit 2018, arXiv 1811.03115). Beside a frozen base the heads are a draft network like
others (`training.drafter`, kind ``blockwise``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import pydantic
import rich.console
from jaxtyping import Array, Float

from jspec import models
from jspec.checkpoint import Model, load
from jspec.drafters import kinds, stored
from jspec.drafters.head_nets import HeadsConfig, binder
from jspec.drafters.nets import Network, Weights
from jspec.drafters.stored import Stored
from jspec.io import orbax
from jspec.models.layers import Dropout
from jspec.types import LanguageModel, PyTree
from training import acceptance, forward, init, losses, recipe, text
from training.checkpoint import Checkpoints
from training.config import Batching, Count, Strict, Training
from training.data import Example, Limits
from training.draft_loss import DraftLoss
from training.lock import alone
from training.loop import fit
from training.teaching import Teaching, simulate

BASE = "base"  # the folder of the trained base, within the run's
EVALUATION_SEED = 2**31


class Blockwise(Strict):
    """A base model, the heads p_1 ... p_k, text, and a loop.

    p_1 is the base's own head; each other is an output of one hidden layer over the hidden state that this
    one reads, through the same projection onto the vocabulary (`jspec.drafters.HeadsConfig`, kind
    ``blockwise``). Head p_i learns the i-th token ahead, the base with all of them. At every step the loss of
    one head is taken, drawn uniformly as a function of seed and step: an unbiased estimate of the mean of all
    k in the time and memory of one. ``init`` names stored heads to go on from, such as those that learned
    beside the base as it is (`training.drafter`).

    Evaluations are on validation answers (``validation_loss``, ``accuracy``: of the base) and on what the
    base wrote greedily before the first step (``accepted_i``, ``tau_0``: `training.teaching.simulate`).
    """

    target: str | None = None  # the base before the first step, for the command line
    block_size: Annotated[int, pydantic.Field(ge=2)]  # k
    mlp_width: Count | None = None  # units of the hidden layer for each of k - 1 heads; None: 4 E
    init: str | None = None
    sources: Annotated[tuple[text.Source, ...], pydantic.Field(min_length=1)] = (
        text.Source(text="references"),
    )
    data: recipe.Data | None = None
    limits: Limits = Limits()
    chat: bool = False  # sources are user messages, put into the chat template (decoder-only)
    batching: Batching = Batching(batch_size=64)
    max_new_tokens: Count = 128  # of answers that are written
    generation_batch: Count = 64  # answers written at a time
    validation_examples: Count = 64
    training: Training

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Blockwise:
        if any(source.text == "drafter" for source in self.sources):
            raise ValueError("sources: expected text of references or target, got drafter")
        if self.training.accumulate > 1:
            got = self.training.accumulate
            raise ValueError(f"training.accumulate: expected 1, for a step learns one head, got {got}")
        return self


class Trained(NamedTuple):
    """A base and the heads that belong to it alone."""

    base: Model
    heads: Stored


@dataclasses.dataclass(frozen=True)
class OneHead:
    """The objective: -log p_i of the i-th token ahead, a mean of sequences' means, for one i of 1 ... k.

    The params are ``base`` and ``heads``; nothing is frozen.
    """

    lm: LanguageModel
    config: HeadsConfig
    vocab_size: int  # logits from there on are padding
    dropout: float  # of the base
    banned: tuple[int, ...] = ()  # tokens that the base never emits: no part of any law

    def __call__(
        self, params: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """See `training.loop.Objective`; ``head`` among the numbers is i."""
        draw, noise = jax.random.split(key)
        head = jax.random.randint(draw, (), 1, self.config.num_heads + 2)
        dropout = Dropout(noise, self.dropout) if self.dropout else None
        hidden = forward.hidden(self.lm, params["base"], batch, dropout=dropout).hidden
        # As in drafting: the state before a root (zeros before the first token) says what follows the root.
        #   index      0    1    2          label of p_1:   labels[t]          from hidden[t]
        #   before     0    h_0  h_1        label of p_i:   labels[t + i - 2]  from before[t]
        before = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0)))
        own, ahead = head == 1, jnp.maximum(head - 2, 0)
        net = binder(self.config)(Weights(params["heads"]), self.lm, params["base"])
        read = jnp.where(own, hidden, net.module.one(before, ahead))
        width = hidden.shape[1]
        at = jnp.arange(width, dtype=jnp.int32) + ahead
        inside = (at < width).astype(jnp.float32)[None]
        labels, later = (jnp.take(x, at, axis=1, mode="clip") for x in (batch.labels, batch.weights))
        weights = batch.weights * later * inside  # answers have no gaps: all between belongs to them, too
        logits = forward.possible(self.lm.head(params["base"], read), self.vocab_size, self.banned)
        loss = losses.cross_entropy(None, logits, labels)
        return losses.sequence_mean(loss, weights), {"head": head.astype(jnp.float32)}


@alone
def run(
    config: Blockwise,
    corpus: recipe.Corpus,
    output: str | Path,
    *,
    target: Model | None = None,
    cache: str | Path | None = None,
    console: rich.console.Console | None = None,
) -> Trained:
    """The trained base with its heads: trained, or trained to the end, or read where that was done before.

    Args:
      corpus: sources and reference answers; token ids for a base without tokenizer.
      output: the run's folder. ``jspec.load(output / "base")`` reads the base, and with it
        ``jspec.drafters.load(output, base)`` the heads.
      target: the base before the first step; None: the one that ``config`` names.
      cache: a folder for what that one writes, which several runs may share; None: within ``output``.

    Raises:
      ValueError: a wrong configuration, corpus or folder.
      OSError, FloatingPointError: see `training.loop.fit`.
    """
    output, settings = Path(output), config.training
    target = recipe.given("target", target, config.target, "float32")
    target = dataclasses.replace(target, params=models.cast(target.params, "float32"))
    network = network_of(config, target)
    before = init.stored_network(config.init, target, network)
    inputs = {
        **recipe.origin("blockwise", corpus),
        "target": recipe.model_fingerprint(target.lm.config, target.params),
        "speech": recipe.speech_fingerprint(target),
    }
    if before is not None:
        inputs["init"] = recipe.model_fingerprint(before.network.config, before.weights.net)
    if recipe.open_folder(output, config, inputs) and (output / stored.CONFIG).is_file():
        base = load(output / BASE)
        return Trained(base, stored.load(output, base))
    writing = text.Writing(
        config.max_new_tokens, config.generation_batch, output / "text" if cache is None else Path(cache)
    )
    training = recipe.encoded(config, target, corpus.train, "train")
    validation = recipe.encoded(config, target, corpus.validation[: config.validation_examples], "validation")
    if any(source.text == "references" for source in config.sources):  # what is written fits
        recipe.check_positions("train", training, target)
    recipe.check_positions("validation", validation, target)
    texts = text.Texts(
        config.sources,
        training,
        target,
        target,
        output / "text",
        writing=writing,
        batching=config.batching,
        training=settings,
        console=console,
    )
    written = text.answered(target, validation, writing, 0.0, EVALUATION_SEED, console=console)
    heads = network.init(jax.random.key(settings.seed)) if before is None else before.weights.net
    params = fit(
        {"base": target.params, "heads": models.cast(heads, "float32")},
        OneHead(target.lm, network.config, target.vocab_size, settings.dropout, target.banned),
        texts.batch,
        settings,
        output,
        evaluate=_evaluation(config, target, network, validation, written),
        console=console,
    )
    base = dataclasses.replace(target, params=params["base"])
    _keep(output / BASE, base)
    weights, num_tokens = Weights(params["heads"]), network.config.num_heads
    about = None if config.target is None else {"target": config.target}
    stored.save(output, "blockwise", network.config, weights, num_tokens=num_tokens, about=about)
    return Trained(base, Stored("blockwise", network, weights, num_tokens))


def network_of(config: Blockwise, target: Model) -> Network:
    """The heads p_2 ... p_k for a base."""
    settings = {"num_heads": config.block_size - 1, "mlp_width": config.mlp_width}
    return kinds.find("blockwise").network(kinds.configure("blockwise", settings, target.lm.config))


def _keep(folder: Path, base: Model) -> None:
    """Write a model as a finished run of its own."""
    folder.mkdir(exist_ok=True)
    recipe.describe(folder, base)
    checkpoints = Checkpoints(folder / orbax.CHECKPOINTS, keep=1, best=False)
    try:
        if checkpoints.latest() is None:  # it was killed here before
            checkpoints.save(1, base.params, {"step": jnp.ones((), jnp.int32)}, None)
    finally:
        checkpoints.close()
    orbax.write_json(folder / orbax.DONE, {"step": 1})


def _evaluation(
    config: Blockwise,
    target: Model,
    network: Network,
    references: Sequence[Example],
    written: Sequence[Example],
) -> Callable[[PyTree], dict[str, float]]:
    """How good the base is, and how far the heads foresee it, from params."""
    dtype = config.training.dtype
    answers, own = (
        recipe.held_out(part, config.batching, config.training, target.decoder_start)
        for part in (references, written)
    )
    longest = max(len(example.target) for example in written)
    loss = DraftLoss().static()  # none is taken
    sizes = (network.config.num_heads, None, target.vocab_size, longest)
    teaching = Teaching(target.lm, network, loss, *sizes, banned=target.banned)

    def evaluate(params: PyTree) -> dict[str, float]:
        frozen = {"target": models.cast(params["base"], dtype), "head": None, "ids": None, "columns": None}
        drafted = simulate(teaching, params["heads"], frozen, own, dtype=dtype)
        chain = {name: x for name, x in drafted.items() if name.startswith(("accepted", "tau_0"))}
        return chain | acceptance.validate(
            target.lm,
            params["base"],
            answers,
            width=target.vocab_size,
            banned=target.banned,
            dtype=dtype,
        )

    return evaluate
