"""What a target shows of fixed texts, computed once and kept on disk: a distillation's steps then do without
its forward.

A feature is the hidden state that the target's head reads, or inputs of its layers (`Forward.taps`), or both,
side by side. Features are rounded to 16 bits, float16 to a thousandth: a text of n tokens takes 2 n F bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.checkpoint import Model
from jspec.types import LanguageModel, PyTree
from training import forward, recipe
from training.buckets import choose_edges
from training.data import Batch, Batches, Example, widths
from training.files import described_folder, write_whole

Precision = Literal["float16", "bfloat16"]
STORED = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHARD = 512  # examples of a file: what an interrupted call loses at most
ROWS = 64  # of a forward
BUCKETS, MULTIPLE = 8, 4  # shapes of the forwards


class Planned(Protocol):
    """Batches that say which examples they hold: `training.data.Batches`."""

    def __getitem__(self, step: int) -> Batch: ...

    def rows(self, step: int) -> Any:
        """Which example each row of a batch is; -1 for a row without weight."""
        ...


class Features:
    """Of every example of a text: ``features[i]`` is [T_i, F], of the positions of ``Batch.tokens``.

    Read from ``cache``, where a folder named by a fingerprint of target and text holds them, and computed
    where they are missing; shards that are there stay when a call was interrupted.

    Args:
      target: its forward computes in the dtype of its params.
      taps: layers whose inputs are kept; none: the hidden state that the head reads.
      hidden: keep that one, too, before the taps.
      precision: what they are rounded to.
      progress: called after every shard with the numbers of examples that are done and of all.
    Attributes:
      nbytes: their size on disk.
      folder: where they lie; its name tells them from all others.
      shards: which examples each file holds.
    Raises:
      ValueError: a feature that float16 cannot hold, or that is not finite.
      OSError: the cache cannot be written.
    """

    def __init__(
        self,
        target: Model,
        examples: Sequence[Example],
        cache: str | Path,
        *,
        taps: tuple[int, ...] = (),
        hidden: bool = False,
        precision: Precision = "float16",
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if jax.process_count() > 1:
            raise ValueError(f"features: expected a single process, got {jax.process_count()}")
        self._dtype = STORED[precision]
        self._target, self._examples, self._taps = target, examples, taps
        self._hidden = hidden and bool(taps)  # without taps it is all there is
        begins = [len(target.decoder_start) or len(example.source) for example in examples]
        self._lengths = [
            begin + len(example.target) - 1 for begin, example in zip(begins, examples, strict=True)
        ]
        self._edges = choose_edges(widths(examples, target.decoder_start), BUCKETS, MULTIPLE)
        self._width = target.lm.config.width * max(len(taps) + self._hidden, 1)
        self.nbytes = sum(self._lengths) * self._width * self._dtype.itemsize
        self.folder = folder = self._open(Path(cache), precision)
        self.shards = [
            range(first, min(first + SHARD, len(examples))) for first in range(0, len(examples), SHARD)
        ]
        self._shards: list[np.ndarray] = []
        self._at: list[tuple[int, int]] = []  # shard and first row of each example
        for number, chosen in enumerate(self.shards):
            offsets = np.cumsum([0, *(self._lengths[i] for i in chosen)])
            self._at += [(number, int(offset)) for offset in offsets[:-1]]
            path = folder / f"{number:05d}.npy"
            if not path.is_file():
                values = self._compute(chosen, offsets).view(np.uint16)  # npy files know no bfloat16
                write_whole(path, functools.partial(np.save, arr=values), "features")
                if progress is not None:
                    progress(chosen.stop, len(examples))
            self._shards.append(np.load(path, mmap_mode="r").view(self._dtype))

    def __getitem__(self, index: int) -> Float[np.ndarray, "T F"]:
        shard, begin = self._at[index]
        return self._shards[shard][begin : begin + self._lengths[index]]

    def batch(
        self, rows: Sequence[int], width: int, taps: tuple[int, ...] | None = None
    ) -> Float[np.ndarray, "B T F"]:
        """Those of several examples, right padded with zeros; -1 is a row without any. ``taps``: of all that
        are kept, the hidden state and these layers."""
        columns = np.arange(self._width)
        if taps is not None and taps != self._taps:
            columns = columns_of(taps, self._taps, self._target.lm.config.width)
        found = np.zeros((len(rows), width, len(columns)), self._dtype)
        for row, index in enumerate(rows):
            if index >= 0:
                found[row, : self._lengths[index]] = self[index][:, columns]
        return found

    def _open(self, cache: Path, precision: str) -> Path:
        description = {
            "target": recipe.model_fingerprint(self._target.lm.config, self._target.params),
            "decoder_start": self._target.decoder_start,
            "text": recipe.text_fingerprint(self._examples),
            "taps": self._taps,
            "precision": precision,
            "shard": SHARD,
        }
        if self._hidden:
            description["hidden"] = True
        return described_folder(cache, description, "features")

    def _compute(self, chosen: range, offsets: np.ndarray) -> np.ndarray:
        batches = Batches(
            [self._examples[i] for i in chosen],
            decoder_start=self._target.decoder_start,
            batch_size=ROWS,
            buckets=self._edges,
            shuffle=False,
        )
        found = np.empty((int(offsets[-1]), self._width), self._dtype)
        for step in range(batches.steps_per_epoch):
            batch = batches[step]
            shown = jax.device_get(
                shown_of(
                    self._target.params,
                    batch,
                    lm=self._target.lm,
                    taps=self._taps,
                    hidden=self._hidden,
                    dtype=self._dtype,
                )
            )
            for row, index in enumerate(batches.rows(step)):
                if index >= 0:
                    begin, end = offsets[index : index + 2]
                    found[begin:end] = shown[row, : end - begin]
        if not np.isfinite(found.astype(np.float32)).all():
            raise ValueError(
                f"features: expected finite numbers in {self._dtype.name}, got others; "
                "bfloat16 has the range of float32"
            )
        return found


def columns_of(taps: tuple[int, ...], kept: tuple[int, ...], width: int) -> Int[np.ndarray, " F"]:
    """Where the hidden state and ``taps`` stand in features of the hidden state and all ``kept`` layers.

    >>> columns_of((7,), (5, 7), 2).tolist()
    [0, 1, 4, 5]
    """
    parts = [0, *(1 + kept.index(tap) for tap in taps)]
    return (np.array(parts)[:, None] * width + np.arange(width)).ravel()


@functools.partial(jax.jit, static_argnames=("lm", "taps", "hidden", "dtype"))
def shown_of(
    params: PyTree, batch: PyTree, *, lm: LanguageModel, taps: tuple[int, ...], hidden: bool, dtype: Any
) -> Float[Array, "B T F"]:
    """The features of a batch, computed."""
    found = forward.hidden(lm, params, batch, taps=taps)
    parts = [found.hidden] if hidden or not taps else []
    return jnp.concatenate([*parts, *(found.taps[tap] for tap in taps)], axis=-1).astype(dtype)


class Rowwise(Protocol):
    """Something of every example, in batches: `training.laws.StoredLaws`."""

    def batch(self, rows: Sequence[int], width: int) -> Any:
        """Of these rows, to this width."""
        ...


class Shown:
    """Batches with the features of their examples: like the batches, by random access. ``taps``: see
    `Features.batch`; ``laws``: what comes with them as `Batch.laws`."""

    def __init__(
        self,
        batches: Planned,
        features: Features,
        taps: tuple[int, ...] | None = None,
        laws: Rowwise | None = None,
    ) -> None:
        self._batches, self._features, self._taps, self._laws = batches, features, taps, laws

    def __getitem__(self, step: int) -> Batch:
        batch = self._batches[step]
        rows, width = self._batches.rows(step), batch.tokens.shape[1]
        laws = None if self._laws is None else self._laws.batch(rows, width)
        return batch._replace(features=self._features.batch(rows, width, self._taps), laws=laws)
