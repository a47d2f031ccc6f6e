"""From pairs of texts to batches of fixed shapes, by random access.

`encode` turns records into examples (token ids), `Batches` examples into an endless sequence of batches:
``batches[step]`` depends on the examples, the settings, the seed and ``step``, and on nothing that happened
before, so a run is resumed by its step alone. An epoch holds every example exactly once, in another order
each time. Few shapes occur, because every shape of a batch is one compilation of the training step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jspec.io.tokenizer import Tokenizer
from training.buckets import Bucket, choose_edges, make_buckets
from training.config import Count, Strict


class Record(NamedTuple):
    """A pair of texts; for a decoder-only model a prompt and its answer."""

    source: str
    target: str


class Example(NamedTuple):
    """A pair of token ids. ``target`` ends with the end token unless it was cut off."""

    source: list[int]
    target: list[int]


class Laws(NamedTuple):
    """Of a target's laws at the answers' places (`training.laws`): the log of the sum of the exponentials of
    all logits, and the first choice."""

    normalizer: Any  # float32 [B, T], on the host or a device
    best: Any  # int32 [B, T]


class Batch(NamedTuple):
    """Host arrays, right padded. ``labels[b, t]`` is the token after ``tokens[b, t]``; weights are 1 on the
    labels that belong to the target, else 0. A row that only fills the batch has length 1 and no weight.
    ``features``: what the target shows of ``tokens`` (`training.features`), and ``laws``: what it says after
    them, where that is kept."""

    tokens: Int[np.ndarray, "B T"]
    labels: Int[np.ndarray, "B T"]
    weights: Float[np.ndarray, "B T"]
    lengths: Int[np.ndarray, " B"]
    source: Int[np.ndarray, "B Ts"] | None  # None: decoder-only
    source_lengths: Int[np.ndarray, " B"] | None
    features: Float[np.ndarray, "B T F"] | None = None
    laws: Laws | None = None


# --- records to examples ----------------------------------------------------------------------------


class Limits(Strict):
    """The longest source and target in tokens, end token included, and what becomes of longer ones.

    A truncated source keeps its beginning and its end token; a truncated target keeps its beginning only.
    """

    source: Count | None = None
    target: Count | None = None
    long_sources: Literal["truncate", "drop"] = "truncate"
    long_targets: Literal["truncate", "drop"] = "drop"


class Counts(NamedTuple):
    """What `encode` did; ``examples`` + ``dropped_sources`` + ``dropped_targets`` + ``unusable`` = all."""

    examples: int
    truncated_sources: int
    truncated_targets: int
    dropped_sources: int
    dropped_targets: int
    unusable: int  # a side without tokens, or a target with an end token before its end or a banned one


def encode(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    *,
    encoder: bool,
    limits: Limits | None = None,
    chat: bool = False,
    banned: Iterable[int] = (),
) -> tuple[list[Example], Counts]:
    """Token ids of every record, as decoding will see them.

    Args:
      encoder: the sources go through an encoder and keep the end token that the tokenizer gives them, also
        where they are cut.
      limits: None: any length.
      chat: a source is a user's message, put into the chat template (decoder-only).
      banned: tokens that the model never emits: a target that holds one is unusable, its law gives it 0.
    Raises:
      ValueError: nothing is left; a tokenizer without end token, or one that puts it behind the prompts of a
        decoder; ``chat`` with an encoder.
    """
    limits = limits or Limits()
    if chat and encoder:
        raise ValueError("chat: expected False for an encoder-decoder model, got True")
    if not tokenizer.eos:
        raise ValueError("tokenizer: expected one with an end token, got none")
    declared = tokenizer.backend.eos_token_id
    end = declared if declared in tokenizer.eos else tokenizer.eos[0]
    if not encoder and not chat and tokenizer.encode("a")[-1:] == [end]:
        raise ValueError(
            "tokenizer: expected one that puts no end token behind a decoder's prompt, from which the answer "
            "goes on (append_end: false)"
        )
    begin = {tokenizer.backend.bos_token_id} - {None}
    impossible = {*tokenizer.eos, *banned}
    examples: list[Example] = []
    number = dict.fromkeys(Counts._fields, 0)
    for record in records:
        if chat:
            source, tail = tokenizer.chat([{"role": "user", "content": record.source}]), []
        else:
            source = tokenizer.encode(record.source)
            tail = [end] if encoder and source[-1:] == [end] else []
            source = source[: len(source) - len(tail)]
        target = tokenizer.encode_target(record.target)
        target = target[1:] if target and target[0] in begin else target
        target = target[:-1] if target[-1:] == [end] else target
        if not source or not target or not impossible.isdisjoint(target):
            number["unusable"] += 1
            continue
        source, target = [*source, *tail], [*target, end]
        long_source = limits.source is not None and len(source) > limits.source
        long_target = limits.target is not None and len(target) > limits.target
        if long_source and (chat or limits.long_sources == "drop"):  # half a template is no prompt
            number["dropped_sources"] += 1
            continue
        if long_target and limits.long_targets == "drop":
            number["dropped_targets"] += 1
            continue
        if long_source:
            assert limits.source is not None
            source = [*source[: limits.source - len(tail)], *tail]
            number["truncated_sources"] += 1
        if long_target:
            target = target[: limits.target]
            number["truncated_targets"] += 1
        examples.append(Example(source, target))
    counts = Counts(**{**number, "examples": len(examples)})
    if not examples:
        raise ValueError(f"data: expected at least one example, got none: {counts}")
    return examples, counts


# --- batches ----------------------------------------------------------------------------------------


def permutation(size: int, *seed: int) -> Int[np.ndarray, " size"]:
    """Of 0 .. size - 1, from the raw bits, which stay the same in every version of numpy."""
    return np.argsort(np.random.PCG64(seed).random_raw(size), kind="stable")


def widths(examples: Sequence[Example], decoder_start: Sequence[int]) -> Int[np.ndarray, "n 2"]:
    """What an example needs of a batch: columns of ``source`` (0 without encoder) and of ``tokens``.

    Raises:
      ValueError: no example, or one without a source or a target.
    """
    sources = np.fromiter((len(example.source) for example in examples), np.int64, len(examples))
    targets = np.fromiter((len(example.target) for example in examples), np.int64, len(examples))
    if len(examples) == 0 or min(sources.min(), targets.min()) < 1:
        raise ValueError("examples: expected at least one, each with a source and a target, got an empty one")
    if decoder_start:
        return np.stack([sources, len(decoder_start) + targets - 1], axis=1)
    return np.stack([np.zeros_like(sources), sources + targets - 1], axis=1)


class Batches:
    """An endless sequence of batches over ``examples``: ``batches[step]``, by random access.

    An example goes into the first bucket that holds it. What is left of a bucket when its batches are full
    moves on to the next one, so at most one batch of an epoch (of the last bucket) has rows without weight.

    Args:
      examples: at least one; lists of ids.
      decoder_start: the tokens a decoder begins with; () for a decoder-only model.
      batch_size: rows of every batch.
      max_tokens: instead, the most slots (source and target) of a batch: short examples, more rows.
      buckets: their number, to be chosen from the data (`choose_edges`), or their (source, target) widths.
      multiple: chosen widths are multiples of it.
      rows_multiple: rows of a batch are a multiple of it (devices, micro-batches).
      seed, shuffle: of the order, which without ``shuffle`` is the same in every epoch.
    Attributes:
      steps_per_epoch: batches that hold every example once.
      buckets: the shapes that occur.
    Raises:
      ValueError: no or an empty example, one that no bucket holds, rows that cannot be split.

    >>> examples = [Example([7, 1], [3, 4, 1]), Example([8, 9, 1], [5, 1]), Example([6, 1], [6, 1])]
    >>> batches = Batches(examples, decoder_start=(0,), batch_size=2, buckets=[(4, 4)], shuffle=False)
    >>> batches.steps_per_epoch, batches[0].tokens.tolist(), batches[0].labels.tolist()
    (2, [[0, 3, 4, 0], [0, 5, 0, 0]], [[3, 4, 1, 0], [5, 1, 0, 0]])
    >>> batches[1].weights.tolist(), batches[1].source_lengths.tolist()
    ([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], [2, 1])
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        decoder_start: Sequence[int] = (),
        batch_size: int | None = None,
        max_tokens: int | None = None,
        buckets: int | Sequence[tuple[int, int]] = 4,
        multiple: int = 8,
        rows_multiple: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        needed = widths(examples, decoder_start)
        edges = choose_edges(needed, buckets, multiple) if isinstance(buckets, int) else buckets
        self.buckets = make_buckets(needed, edges, batch_size, max_tokens, rows_multiple)
        self._examples, self._decoder_start = examples, list(decoder_start)
        self._seed, self._shuffle = seed, shuffle
        self._bucket_of = (needed[:, None] <= np.array(edges)[None]).all(-1).argmax(1)
        self._epoch = 0, self._plan(0)
        self.steps_per_epoch = len(self._epoch[1])

    def _plan(self, epoch: int) -> list[tuple[Bucket, Int[np.ndarray, " n"]]]:
        """The batches of an epoch: bucket and examples. Their number is the same for every epoch, because
        it follows from the sizes of the buckets."""
        count = len(self._examples)
        order = permutation(count, self._seed, epoch, 0) if self._shuffle else np.arange(count)
        in_order = self._bucket_of[order]
        left, plan = order[:0], []
        for i, bucket in enumerate(self.buckets):
            mine = np.concatenate([left, order[in_order == i]])
            last = i == len(self.buckets) - 1
            end = len(mine) if last else len(mine) // bucket.rows * bucket.rows
            plan += [(bucket, mine[at : at + bucket.rows]) for at in range(0, end, bucket.rows)]
            left = mine[end:]
        if self._shuffle:
            plan = [plan[i] for i in permutation(len(plan), self._seed, epoch, 1)]
        return plan

    def _at(self, step: int) -> tuple[Bucket, Int[np.ndarray, " n"]]:
        if step < 0:
            raise IndexError(f"step: expected a number >= 0, got {step}")
        epoch, index = divmod(step, self.steps_per_epoch)
        number, plan = self._epoch
        if number != epoch:
            plan = self._plan(epoch)
            self._epoch = epoch, plan
        return plan[index]

    def rows(self, step: int) -> Int[np.ndarray, " B"]:
        """Which example each row of ``batches[step]`` is; -1 for a row without weight."""
        bucket, indices = self._at(step)
        padded = np.full(bucket.rows, -1, np.int64)
        padded[: len(indices)] = indices
        return padded

    def __getitem__(self, step: int) -> Batch:
        bucket, _ = self._at(step)
        rows = self.rows(step)
        shape = (len(rows), bucket.target)
        tokens, labels = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        weights, lengths = np.zeros(shape, np.float32), np.ones(len(rows), np.int32)
        source = np.zeros((len(rows), bucket.source), np.int32)
        source_lengths = np.ones(len(rows), np.int32)
        for row, index in enumerate(rows):
            if index < 0:
                continue
            example = self._examples[index]
            prefix = self._decoder_start or example.source
            text = [*prefix, *example.target]
            lengths[row] = end = len(text) - 1
            tokens[row, :end], labels[row, :end] = text[:-1], text[1:]
            weights[row, len(prefix) - 1 : end] = 1
            if self._decoder_start:
                source[row, : len(example.source)] = example.source
                source_lengths[row] = len(example.source)
        encoder = (source, source_lengths) if self._decoder_start else (None, None)
        return Batch(tokens, labels, weights, lengths, *encoder)


class Mixture:
    """Batches of several sequences in fixed shares, by random access like `Batches`.

    Step n belongs to the part whose share is due, so that after any number of steps the counts are the shares
    up to about one step. Each part goes through its own epochs. Parts with the same ``buckets``
    (`choose_edges` over all examples) share their compilations.

    Args:
      parts: sequences of batches.
      weights: shares of the steps, > 0; they need not sum to 1.

    >>> examples = [Example([7, 1], [3, 1])]
    >>> part = Batches(examples, batch_size=1)
    >>> [Mixture([part, part], [1, 2]).part(step) for step in range(6)]
    [(1, 0), (0, 0), (1, 1), (1, 2), (0, 1), (1, 3)]
    """

    def __init__(self, parts: Sequence[Batches], weights: Sequence[float]) -> None:
        if not parts or len(parts) != len(weights) or min(weights) <= 0:
            raise ValueError(f"weights: expected {len(parts)} numbers > 0, got {list(weights)}")
        self.parts = tuple(parts)
        # Share of part i among what parts 0 .. i - 1 leave, so that counts follow in closed form.
        self._shares = [weight / sum(weights[i:]) for i, weight in enumerate(weights)]

    def _taken(self, steps: int) -> list[int]:
        """How many of the first ``steps`` steps each part has had."""
        taken = []
        for share in self._shares:
            taken.append(int(steps * share + 0.5))
            steps -= taken[-1]
        return taken

    def part(self, step: int) -> tuple[int, int]:
        """The part that step belongs to, and which of its own steps that is."""
        before, after = self._taken(step), self._taken(step + 1)
        index = next(i for i in range(len(before)) if after[i] > before[i])
        return index, before[index]

    def __getitem__(self, step: int) -> Batch:
        if step < 0:
            raise IndexError(f"step: expected a number >= 0, got {step}")
        index, own = self.part(step)
        return self.parts[index][own]
