"""Answers that a model writes itself, to train on: generated in batches, kept on disk as they come."""

from __future__ import annotations

import dataclasses
import functools
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import jspec
from training import hosts, recipe
from training.files import described_folder, write_whole

SHARD = 1024  # answers that are generated and stored together, at least
BATCHES_PER_SHARD = 32  # at least, because slots idle while the last rows of a shard finish
SLOTS = 32  # the capacity of the cache is a multiple, so that few shapes are compiled


class Progress(NamedTuple):
    """How far a generation is. ``tokens`` and ``utilisation`` leave out what was on disk before the call.

    ``utilisation``: of all slots in all rounds, the share that decoded a sequence and did not wait for a new
    one; for plain decoding that is emitted tokens / (rounds x slots). None before the first round.
    """

    done: int
    total: int
    tokens: int
    utilisation: float | None


class _Shard(NamedTuple):
    """Answers of one shard in its own order, and what they took."""

    answers: list[list[int]]
    busy: int  # rounds, summed over the rows that were in them
    slots: int  # rounds of the batch x its rows


def generate_answers(
    model: jspec.Model,
    sources: Sequence[Sequence[int]],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = 128,
    batch_size: int = 64,
    cache: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[list[int]]:
    """One answer to each source, as token ids, ended by an end token unless ``max_new_tokens`` cut it off.

    Answer i has the law of ``model`` at ``temperature`` and the random stream of the seed ``seed + i``. It
    depends on nothing else of the call. Sources of similar length are decoded together, longest first, in
    shards that are stored when they are done: a call that was interrupted goes on from there, and gives
    what it would have given at once.

    Args:
      sources: what the encoder reads, or the prompts.
      batch_size: rows decoded at a time; a finished row takes the next source of the shard.
      cache: a folder. Answers lie in a sub-folder named by a fingerprint of model, sources and settings, so
        those of another model, temperature or seed are never taken for these.
      progress: called after every shard.
    Raises:
      ValueError: no source, a wrong option (see `jspec.generate`), or logits that are not finite.
      OSError: the cache cannot be written. What is already there stays.

    >>> from jspec import testing
    >>> model = jspec.Model(*testing.table_lm([[0, 1, 0], [0, 0, 1], [1, 0, 0]]), eos=(2,))
    >>> generate_answers(model, [[0], [1]], max_new_tokens=4)
    [[1, 2], [2]]
    """
    if len(sources) == 0:
        raise ValueError("sources: expected at least one, got none")
    model = dataclasses.replace(model, tokenizer=None)  # answers need not become text
    settings = {
        "temperature": temperature,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
    }
    folder = None if cache is None else _open(Path(cache), model, sources, settings)
    order = np.argsort([-len(source) for source in sources], kind="stable")
    size = max(SHARD, BATCHES_PER_SHARD * batch_size)
    answers: list[list[int]] = [[]] * len(sources)
    done = tokens = busy = slots = 0
    for number, rows in enumerate(np.array_split(order, -(-len(order) // size))):
        path = None if folder is None else folder / f"{number:05d}.npz"
        found = None if path is None else hosts.on_first(functools.partial(_load, path, len(rows)))
        if found is None:
            shard = _generate(model, [sources[i] for i in rows], rows.tolist(), **settings)
            found = shard.answers
            tokens += sum(map(len, found))
            busy, slots = busy + shard.busy, slots + shard.slots
            if path is not None:
                hosts.on_first(functools.partial(_save, path, found))
        for row, answer in zip(rows, found, strict=True):
            answers[row] = answer
        done += len(rows)
        if progress is not None:
            progress(Progress(done, len(sources), tokens, busy / slots if slots else None))
    return answers


def _generate(
    model: jspec.Model,
    sources: list[Sequence[int]],
    rows: list[int],
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int,
    batch_size: int,
) -> _Shard:
    begins = [len(model.decoder_start) or len(source) for source in sources]
    capacity = -(-(max(begins) + max_new_tokens) // SLOTS) * SLOTS
    output = jspec.generate(
        model,
        sources,
        temperature=temperature,
        seed=[(seed + row) % 2**32 for row in rows],
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        capacity=min(capacity, model.context_length),
    )
    if "nan" in output.finish_reasons:
        row = rows[output.finish_reasons.index("nan")]
        raise ValueError(f"model: expected finite logits, got others in the answer to source {row}")
    return _Shard(output.tokens, output.stats.rounds, output.settings["rounds"] * output.settings["rows"])


# --- the cache --------------------------------------------------------------------------------------


def _open(
    cache: Path, model: jspec.Model, sources: Sequence[Sequence[int]], settings: dict[str, Any]
) -> Path:
    """The folder of these answers."""
    description = settings | {
        "model": recipe.model_fingerprint(model.lm.config, model.params),
        "eos": model.eos,
        "decoder_start": model.decoder_start,
        "vocab_size": model.vocab_size,
        "sources": recipe.text_fingerprint(sources),
        "shard": SHARD,
    }
    if model.banned:
        description["banned"] = model.banned
    return described_folder(cache, description, "cache")


def _save(path: Path, answers: list[list[int]]) -> None:
    tokens = np.array([token for answer in answers for token in answer], np.int32)
    lengths = np.array([len(answer) for answer in answers], np.int32)
    write_whole(path, lambda file: np.savez(file, tokens=tokens, lengths=lengths), "cache")


def _load(path: Path, count: int) -> list[list[int]] | None:
    """What `_save` wrote; None where there is nothing, or nothing whole: it is generated again."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            tokens, lengths = arrays["tokens"], arrays["lengths"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    if len(lengths) != count or lengths.sum() != len(tokens):
        return None
    return [part.tolist() for part in np.split(tokens, lengths.cumsum()[:-1])]
