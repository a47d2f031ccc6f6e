"""Draft networks: a network that reads the target learns to foresee it, on text that the target wrote."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import rich.console
from jaxtyping import Array, Int

from jspec import models
from jspec.checkpoint import Model, load
from jspec.drafters import kinds, nets, stored
from jspec.drafters.nets import HeadKind, Network, Text, Weights
from jspec.drafters.stored import Stored
from jspec.types import PyTree
from training import distill, init, recipe, text
from training.buckets import choose_edges
from training.config import Batching, Count, Strict, Training
from training.data import Batch, Example, Limits, Mixture, widths
from training.draft_loss import DraftLoss
from training.features import Precision, Shown
from training.lock import alone
from training.loop import fit
from training.teaching import Teaching, accuracies, simulate

EVALUATION_SEED = 2**31
TEMPERATURES = (0.0, 1.0)  # of the held-out texts
RANKS = 10  # of a drafter's choices, whose accuracies are stored with it


class Drafter(Strict):
    """A target, a draft network, its head, text, a loss, and a loop.

    ``network`` holds settings of the kind's config (`jspec.drafters.kinds`). ``head`` is the target's, rows
    of it (frozen), or the network's own (trained, from these rows on where the target's head is a kernel and
    reads the same width, which the assistant's does not); with ``draft_vocab`` its columns are
    the so many most frequent tokens of the training answers. ``layers`` are those of the target as which the
    network's layers begin (`training.init.as_layers`); None: at random. ``init`` names a stored drafter to go
    on from.
    A ``masked`` network is a language model of its own: ``model`` says which, and what it begins as; with
    ``init``, ``network`` has its architecture, ``lm``.

    At every step ``anchors`` places of each sequence are drawn (None: all), and from each the network is
    taught ``num_tokens`` laws. With ``features`` what the target shows of all training text lies on the disk,
    2 * width bytes a token for the hidden state and for each layer that the network taps; without, its
    forward is part of the step. Runs that tap different layers share one cache if all keep the same
    ``kept_taps``, which hold each network's; those of one that looks at the target's cache (``glide``,
    ``assistant``) are the layers whose keys it looks at. One that runs rows of its own through the target
    (``pass``, ``bita``) needs that forward: ``features: null``.

    Evaluations are on what the target writes to the validation sources, greedily and sampled.
    """

    target: str | None = None  # for the command line
    kind: str
    network: dict[str, Any] = pydantic.Field(default={})
    model: distill.Drafter | None = None  # of ``kind: masked``
    head: HeadKind = "target"
    draft_vocab: Count | None = None
    layers: tuple[Annotated[int, pydantic.Field(ge=0)], ...] | None = None
    init: str | None = None
    num_tokens: Count = 4
    anchors: Count | None = 64
    loss: DraftLoss = DraftLoss()
    sources: Annotated[tuple[text.Source, ...], pydantic.Field(min_length=1)] = (text.Source(text="target"),)
    features: Precision | None = "float16"
    kept_taps: tuple[Annotated[int, pydantic.Field(ge=0)], ...] | None = None  # None: the network's
    data: recipe.Data | None = None
    limits: Limits = Limits()
    chat: bool = False  # sources are user messages, put into the chat template (decoder-only)
    batching: Batching = Batching(batch_size=16)
    max_new_tokens: Count = 128  # of answers that are written
    generation_batch: Count = 32  # answers written at a time
    validation_examples: Count = 64
    training: Training

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Drafter:
        kinds.find(self.kind)
        if self.model is not None and self.kind != "masked":
            raise ValueError(f"model: expected none for a drafter of kind {self.kind!r}, got one")
        if self.model is not None and self.init is not None:
            raise ValueError("model: expected none with init (network.lm is its architecture), got one")
        if self.layers is not None and (self.kind == "masked" or self.init is not None):
            where = "model" if self.kind == "masked" else "init"
            raise ValueError(f"layers: expected none with {where}, got {list(self.layers)}")
        if self.head == "rows" and self.draft_vocab is None:
            raise ValueError("draft_vocab: expected a number of tokens with head: rows, got None")
        if self.head == "target" and self.draft_vocab is not None:
            raise ValueError(f"draft_vocab: expected None with head: target, got {self.draft_vocab}")
        if any(source.text == "drafter" for source in self.sources):
            raise ValueError("sources: expected text of references or target, got drafter")
        if self.kept_taps is not None and self.features is None:
            raise ValueError(f"kept_taps: expected None without features, got {self.kept_taps}")
        if self.training.dropout:
            raise ValueError(f"training.dropout: expected 0, got {self.training.dropout}")
        return self


# --- the draft vocabulary ---------------------------------------------------------------------------


def draft_vocabulary(
    examples: Sequence[Example], size: int, vocab_size: int
) -> tuple[Int[np.ndarray, " Vd"], float]:
    """The ``size`` most frequent tokens of the answers, ascending, and the share of all that they make up.

    Of equally frequent ones the lower id comes first (FR-Spec, arXiv 2502.14856, and EAGLE-3 count so).

    Raises:
      ValueError: more than there are.

    >>> ids, coverage = draft_vocabulary([Example([9], [5, 3, 5]), Example([9], [5, 1])], 2, 10)
    >>> ids.tolist(), coverage
    ([1, 5], 0.8)
    """
    if size > vocab_size:
        raise ValueError(f"draft_vocab: expected at most {vocab_size} (the target's tokens), got {size}")
    counts = np.zeros(vocab_size, np.int64)
    for example in examples:
        np.add.at(counts, np.asarray(example.target), 1)
    ids = np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
    return ids, float(counts[ids].sum() / counts.sum())


# --- text -------------------------------------------------------------------------------------------


class Batchwise:
    """The batches of a run (`batch` is the loop's source), and how many answer tokens they have held.

    Args:
      parts: the examples of every source.
      shown: the batches of a part, with features or without.
    """

    def __init__(
        self,
        config: Drafter,
        parts: Sequence[Sequence[Example]],
        target: Model,
        shown: Callable[[Any, Sequence[Example]], Any],
    ) -> None:
        batching, start = config.batching, target.decoder_start
        if isinstance(batching.buckets, int):
            needed = np.concatenate([widths(part, start) for part in parts])
            edges = choose_edges(needed, batching.buckets, batching.multiple)
            batching = batching.model_copy(update={"buckets": tuple(edges)})
        plain = [recipe.batches(part, batching, config.training, start) for part in parts]
        self._plain = Mixture(plain, [source.weight for source in config.sources])
        self._shown = [shown(batches, part) for batches, part in zip(plain, parts, strict=True)]
        self._sizes = [np.array([len(example.target) for example in part]) for part in parts]
        self._seen = [0]  # after each number of steps
        self._steps = 0
        self.total = sum(int(sizes.sum()) for sizes in self._sizes)

    def batch(self, step: int, params: PyTree = None) -> Batch:
        """The batch of a step."""
        self._steps = step + 1
        while len(self._seen) <= self._steps:
            index, own = self._plain.part(len(self._seen) - 1)
            rows = self._plain.parts[index].rows(own)
            self._seen.append(self._seen[-1] + int(self._sizes[index][rows[rows >= 0]].sum()))
        index, own = self._plain.part(step)
        return self._shown[index][own]

    @property
    def tokens_seen(self) -> int:
        """Answer tokens of all steps up to the newest; each time that an epoch comes to them."""
        return self._seen[self._steps]


# --- the recipe -------------------------------------------------------------------------------------


class Beginning(NamedTuple):
    """A network before the first step. ``weights.net`` is what is trained."""

    network: Network
    weights: Weights
    coverage: float  # of the draft vocabulary


@alone
def run(
    config: Drafter,
    corpus: recipe.Corpus,
    output: str | Path,
    *,
    target: Model | None = None,
    cache: str | Path | None = None,
    console: rich.console.Console | None = None,
) -> Stored:
    """The trained network: trained, or trained to the end, or read where that was done before.

    Args:
      corpus: sources and reference answers; token ids for a target without tokenizer.
      output: the run's folder; `jspec.drafters.stored.load` reads it.
      target: None: the one that ``config`` names. Its forward computes in the dtype of its params.
      cache: a folder for what the target writes and shows, which several runs may share; None: within
        ``output``.

    Raises:
      ValueError: a wrong configuration, corpus or folder.
      OSError, FloatingPointError: see `training.loop.fit`.
    """
    output, settings = Path(output), config.training
    target = recipe.given("target", target, config.target, settings.dtype)
    model = model_of(config, target)
    network = network_of(config, target, model)
    before = init.stored_network(config.init, target, network)
    inputs = {
        **recipe.origin("drafter", corpus),
        "target": recipe.model_fingerprint(target.lm.config, target.params),
        "speech": recipe.speech_fingerprint(target),
    }
    if config.model is not None and model is not None and config.model.checkpoint is not None:
        inputs["model"] = recipe.model_fingerprint(model.lm.config, model.params)
    if before is not None:
        inputs["init"] = recipe.model_fingerprint(before.network.config, before.weights.net)
    finished = recipe.open_folder(output, config, inputs)
    if finished and (output / stored.CONFIG).is_file():
        return stored.load(output, target)
    writing = text.Writing(
        config.max_new_tokens, config.generation_batch, output / "text" if cache is None else Path(cache)
    )
    examples = recipe.encoded(config, target, corpus.train, "train")
    validation = recipe.encoded(config, target, corpus.validation[: config.validation_examples], "validation")
    if any(source.text == "references" for source in config.sources):  # what is written fits
        recipe.check_positions("train", examples, *(m for m in (target, model) if m is not None))
    parts = [text.chosen(source, examples, target, writing, console=console) for source in config.sources]
    if model is not None:  # what the target writes fits into its own positions
        for part in parts:
            recipe.check_positions("train", part, model)
    begun = begin(config, target, network, parts, before, model)
    _tell(console, parts, begun)

    taught = with_kernel(target)
    frozen = frozen_of(taught, begun.weights)

    def shown(batches: Any, part: Sequence[Example]) -> Any:
        if config.features is None:
            return batches
        kept = kept_taps(config, network)
        found = text.features(target, part, writing, config.features, taps=kept, console=console)
        summed = None
        if frozen["columns"] is not None:
            summed = text.laws(taught, found, part, writing, console=console)
        return Shown(batches, found, network.taps, summed)

    texts = Batchwise(config, parts, target, shown)
    held_out = []
    for temperature in TEMPERATURES:  # a seed of its own: training may see the same sources
        written = text.answered(target, validation, writing, temperature, EVALUATION_SEED, console=console)
        once = recipe.once(written, config.batching, settings, target.decoder_start)
        batches = shown(once, written)
        held_out.append([batches[step] for step in range(once.steps_per_epoch)])
    objective = teaching(config, taught, network, parts)
    params = fit(
        begun.weights.net,
        objective,
        texts.batch,
        settings,
        output,
        frozen=frozen,
        evaluate=_evaluation(config, objective, frozen, held_out, texts),
        console=console,
    )
    weights = begun.weights._replace(net=params)
    ranks = min(RANKS, network.config.vocab_size if begun.weights.ids is None else len(begun.weights.ids))
    right = accuracies(
        objective, params, frozen, held_out[0], number=ranks, dtype=config.training.dtype
    ).tolist()
    about = None if config.target is None else {"target": config.target}
    told = {"num_tokens": config.num_tokens, "accuracies": right}
    stored.save(output, config.kind, network.config, weights, **told, about=about)
    return Stored(config.kind, network, weights, **told)


def _tell(console: rich.console.Console | None, parts: Sequence[Sequence[Example]], begun: Beginning) -> None:
    if console is not None:
        total = sum(len(example.target) for part in parts for example in part)
        size = sum(x.size for x in jax.tree.leaves(begun.weights.net))
        console.print(
            f"text: {total} answer tokens; draft vocabulary: {begun.coverage:.1%} of them; "
            f"trained parameters: {size}",
            highlight=False,
        )


def model_of(config: Drafter, target: Model) -> Model | None:
    """The language model that a ``masked`` network is, before the first step.

    Raises:
      ValueError: one of another kind or vocabulary than the target's.
    """
    if config.model is None:
        return None
    loaded = None
    if config.model.checkpoint is not None:
        loaded = load(config.model.checkpoint)
        recipe.check_kind("model.checkpoint", target, loaded)
        recipe.check_vocabulary("model.checkpoint", target, loaded)
    return distill.begin(config.model, target, config.training.seed, loaded, "model")


def network_of(config: Drafter, target: Model, model: Model | None = None) -> Network:
    """The network that a configuration describes; ``model``: see `model_of`.

    Raises:
      ValueError: wrong settings, a layer that the target lacks, a loss that the network has nothing for, or
        features for one that needs the target itself.
    """
    settings = dict(config.network)
    if model is not None:
        if "lm" in settings:
            raise ValueError("network.lm: expected none, it is that of model")
        settings["lm"] = dataclasses.asdict(model.lm.config)
    architecture = kinds.configure(
        config.kind, settings, target.lm.config, head=config.head, draft_vocab=config.draft_vocab
    )
    network = kinds.find(config.kind).network(architecture)
    layers = target.lm.config.num_layers
    if not all(0 <= tap <= layers for tap in network.taps):
        raise ValueError(f"network: expected taps in 0 .. {layers} (the target's layers), got {network.taps}")
    if network.runs_target and config.features is not None:
        raise ValueError(
            f"features: expected none for a drafter of kind {config.kind!r}, which runs the target in every "
            f"step, got {config.features}"
        )
    kept = kept_taps(config, network)
    if not {*network.taps} <= {*kept} <= {*range(layers + 1)}:
        raise ValueError(
            f"kept_taps: expected layers in 0 .. {layers}, the network's {network.taps} among them, "
            f"got {kept}"
        )
    _rehearse(config, target, network)
    return network


def kept_taps(config: Drafter, network: Network) -> tuple[int, ...]:
    """The layers whose inputs lie on the disk."""
    return network.taps if config.kept_taps is None else config.kept_taps


def _rehearse(config: Drafter, target: Model, network: Network) -> None:
    """Run the network on shapes alone: what it cannot do is told before any text is written.

    Raises:
      ValueError: more tokens than it drafts, a loss for which it has no output, layers that it cannot begin
        as, or rows of a head that has none.
    """
    if config.draft_vocab is not None and config.draft_vocab > target.vocab_size:
        raise ValueError(
            f"draft_vocab: expected at most {target.vocab_size} (the target's tokens), "
            f"got {config.draft_vocab}"
        )
    width, dtype = target.lm.config.width, nets.dtype_of(target.lm, target.params)
    run = network.teach if network.details is None else network.details

    def rehearsal(params: PyTree) -> Any:
        net = network.init(jax.random.key(0))
        if config.layers is not None:
            net = init.as_layers(net, target.lm.config, params, config.layers)
        net = models.cast(net, config.training.dtype)
        ids = None if config.draft_vocab is None else jnp.arange(config.draft_vocab, dtype=jnp.int32)
        head = None
        if config.head == "rows":
            assert ids is not None
            head = nets.rows_of_head(target.lm, params, ids)
        tokens, length = jnp.zeros((1, 4), jnp.int32), jnp.full(1, 4, jnp.int32)
        hidden = jnp.zeros((1, 4, width), dtype)
        source = (tokens, length) if target.decoder_start else (None, None)
        given = Text(tokens, length, tokens, hidden, dict.fromkeys(network.taps, hidden), *source)
        return run(Weights(net, head, ids), target.lm, params, given, config.num_tokens)

    found = jax.eval_shape(rehearsal, target.params)
    details = {} if network.details is None else found[1]
    for name in config.loss.static().needs:
        if details.get(name) is None:
            which = {"hidden": "regression"}.get(name, name)
            raise ValueError(
                f"loss.{which}: expected 0 for a drafter of kind {config.kind!r}, which has no such output"
            )


def teaching(
    config: Drafter, target: Model, network: Network, parts: Sequence[Sequence[Example]]
) -> Teaching:
    """The objective of a configuration, for these texts and all that is written."""
    loss = config.loss.static()
    longest = max([config.max_new_tokens, *(len(example.target) for part in parts for example in part)])
    sizes = (config.num_tokens, config.anchors, target.vocab_size, longest)
    return Teaching(target.lm, network, loss, *sizes, banned=target.banned)


def with_kernel(target: Model) -> Model:
    """The same decoder with a head of its own, [E, V], beside an embedding that is the head, too: on a CPU,
    where products with a transposed factor take three times as long."""
    config = target.lm.config
    if jax.default_backend() != "cpu" or not isinstance(config, models.DecoderConfig) or not config.tied:
        return target
    kernel = {"kernel": jnp.asarray(np.asarray(target.params["embedding"]).T.copy())}
    lm = models.language_model(dataclasses.replace(config, tied=False))
    return dataclasses.replace(target, lm=lm, params={**target.params, "unembedding": kernel})


def frozen_of(target: Model, weights: Weights) -> dict[str, Any]:
    """What the objective reads and no step changes."""
    columns = weights.head
    if columns is None and weights.ids is not None:
        with contextlib.suppress(ValueError):  # a head that is no kernel
            columns = nets.rows_of_head(target.lm, target.params, weights.ids)
    return {"target": target.params, "head": weights.head, "ids": weights.ids, "columns": columns}


def begin(
    config: Drafter,
    target: Model,
    network: Network,
    parts: Sequence[Sequence[Example]],
    before: Stored | None = None,
    model: Model | None = None,
) -> Beginning:
    """Weights before the first step: random, those of ``before``, or of ``model`` (`model_of`)."""
    if before is not None:
        net = models.cast(before.weights.net, "float32")
        return Beginning(network, before.weights._replace(net=net), _coverage(parts, before.weights.ids))
    ids, coverage = None, 1.0
    if config.draft_vocab is not None:
        every = [example for part in parts for example in part]
        ids, coverage = draft_vocabulary(every, config.draft_vocab, target.vocab_size)
    net = models.cast(network.init(jax.random.key(config.training.seed)), "float32")
    if config.layers is not None:
        net = init.as_layers(net, target.lm.config, target.params, config.layers)
    if model is not None:
        net = {**net, "lm": models.cast(model.params, "float32")}
    elif config.head == "own":
        columns = np.arange(target.lm.config.vocab_size, dtype=np.int32) if ids is None else ids
        with contextlib.suppress(ValueError):  # the target's head is no kernel: its own stays random
            rows = nets.rows_of_head(target.lm, target.params, jnp.asarray(columns)).astype(jnp.float32)
            if net["head"].shape[-2:] == rows.shape:  # not so: the assistant's, which reads another width
                net = {**net, "head": jnp.broadcast_to(rows, net["head"].shape)}
    return Beginning(network, stored.headed(network.config, target, net, ids), coverage)


def _coverage(parts: Sequence[Sequence[Example]], ids: Array | None) -> float:
    if ids is None:
        return 1.0
    tokens = np.concatenate([np.asarray(example.target) for part in parts for example in part])
    return float(np.isin(tokens, np.asarray(ids)).mean())


# --- the learning curve -------------------------------------------------------------------------------


def _evaluation(
    config: Drafter, objective: Teaching, frozen: PyTree, held_out: Sequence[Sequence[Any]], texts: Batchwise
) -> Callable[[PyTree], dict[str, float]]:
    """A point of the learning curve, from params. ``held_out``: greedy and sampled texts."""

    def evaluate(params: PyTree) -> dict[str, float]:
        greedy, sampled = (
            simulate(objective, params, frozen, batches, dtype=config.training.dtype) for batches in held_out
        )
        chain = {name: value for name, value in greedy.items() if name.startswith(("accepted", "tau_0"))}
        seen = {"tokens_seen": float(texts.tokens_seen), "epochs": texts.tokens_seen / texts.total}
        return seen | sampled | chain

    return evaluate
