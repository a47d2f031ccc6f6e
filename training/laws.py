"""What a target says at every answer's place of fixed texts, computed once and kept on disk.

A drafter of a reduced vocabulary computes the target's logits of its own columns at every step; of all others
it needs their sum and whether the first choice is among them. The two numbers that are kept of a place (8
bytes) replace a product with the whole head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.checkpoint import Model
from jspec.types import LanguageModel, PyTree
from training.data import Example, Laws
from training.features import Features
from training.files import described_folder, write_whole
from training.forward import possible

ROWS = 256  # of the head at a time
PLACES = 4096  # of a call


@functools.partial(jax.jit, static_argnames=("lm", "vocab_size", "banned"))
def laws_of(
    params: PyTree,
    hidden: Float[Array, "*n E"],
    *,
    lm: LanguageModel,
    vocab_size: int,
    banned: tuple[int, ...] = (),
) -> Laws:
    """From what the head reads; of what can come out alone (`training.forward.possible`)."""

    def law(row: Float[Array, " E"]) -> tuple[Array, Array]:
        logits = possible(lm.head(params, row), vocab_size, banned)
        return jax.nn.logsumexp(logits), logits.argmax().astype(jnp.int32)

    found = jax.lax.map(law, hidden.reshape(-1, hidden.shape[-1]), batch_size=ROWS)
    return Laws(*(values.reshape(hidden.shape[:-1]) for values in found))


class StoredLaws:
    """Of every answer of a text, from its features.

    Read from ``cache`` and computed where they are missing, file by file as the features are.

    Args:
      target: it computes in the dtype of its params.
      features: of these examples, hidden states first.
      progress: called after every file with the numbers of examples that are done and of all.
    Raises:
      OSError: the cache cannot be written.
    """

    def __init__(
        self,
        target: Model,
        features: Features,
        examples: Sequence[Example],
        cache: str | Path,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        description = {
            "laws of features": features.folder.name,
            "vocab_size": target.vocab_size,
            "banned": sorted(target.banned),
        }
        folder = described_folder(Path(cache), description, "laws")
        self._found: list[Int[np.ndarray, "T 2"]] = []
        for number, chosen in enumerate(features.shards):
            path = folder / f"{number:05d}.npy"
            sizes = [len(examples[i].target) for i in chosen]
            if not path.is_file():
                hidden = (features[i][-size:] for i, size in zip(chosen, sizes, strict=True))
                write_whole(path, functools.partial(np.save, arr=_computed(target, hidden)), "laws")
                if progress is not None:
                    progress(chosen.stop, len(examples))
            self._found += np.split(np.load(path), np.cumsum(sizes)[:-1])
        self._lengths = [len(features[i]) for i in range(len(examples))]

    def batch(self, rows: Sequence[int], width: int) -> Laws:
        """Those of several examples at the places of their answers, elsewhere zeros; -1 is a row without."""
        found = np.zeros((len(rows), width, 2), np.int32)
        for row, index in enumerate(rows):
            if index >= 0:
                end, own = self._lengths[index], self._found[index]
                found[row, end - len(own) : end] = own
        return Laws(np.ascontiguousarray(found[..., 0]).view(np.float32), found[..., 1])


def _computed(target: Model, parts: Iterable[Float[np.ndarray, "T F"]]) -> Int[np.ndarray, "N 2"]:
    """The bits of the normaliser, and the first choice."""
    width = target.lm.config.width
    hidden = np.concatenate([part[:, :width] for part in parts])
    dtype = jax.tree.leaves(target.params)[0].dtype
    found = np.empty((len(hidden), 2), np.int32)
    for begin in range(0, len(hidden), PLACES):
        rows = hidden[begin : begin + PLACES]
        padded = np.pad(rows, ((0, PLACES - len(rows)), (0, 0)))
        laws = laws_of(
            target.params,
            jnp.asarray(padded).astype(dtype),
            lm=target.lm,
            vocab_size=target.vocab_size,
            banned=target.banned,
        )
        normalizer, best = jax.device_get(laws)
        found[begin : begin + PLACES, 0] = normalizer.view(np.int32)[: len(rows)]
        found[begin : begin + PLACES, 1] = best[: len(rows)]
    return found
