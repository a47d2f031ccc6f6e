"""N-gram drafters, trained by counting: unigram and bigram models of the target's text.

The unigram law adds ``delta`` to every count, and the bigram law takes ``discount`` off every count and gives
what it took to the unigram law (absolute discounting, interpolated: Ney, Essen and Kneser 1994)::

    P(x)     = (c(x) + delta) / (N + delta V)
    P(x | w) = max(c(w x) - discount, 0) / c(w) + backoff(w) P(x)

A token keeps its ``successors`` most frequent successors, of equal ones the lower ids; the mass of the others
goes to ``backoff(w)`` as well, so that these are exact laws however few are kept. Nothing is random.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import pydantic
from jaxtyping import Int

from jspec.checkpoint import Model
from jspec.drafters.ngram import NgramTable, load_ngram, save_ngram
from jspec.io import orbax
from training import hosts, recipe
from training.config import Count, Strict
from training.data import Example, Limits

TABLE = "ngram.npz"


class Ngram(Strict):
    """A target, whose tokens are counted, a corpus of what it writes (or should), and the smoothing."""

    target: str | None = None  # for the command line: checkpoint or run
    data: recipe.Data | None = None
    limits: Limits = Limits()
    chat: bool = False  # sources are user messages, put into the chat template (decoder-only)
    order: Literal[1, 2] = 2  # unigram or bigram
    successors: Count = 64
    delta: Annotated[float, pydantic.Field(gt=0)] = 0.1
    discount: Annotated[float, pydantic.Field(gt=0, le=1)] = 0.75  # 0: unseen pairs would have probability 0


class Counts(NamedTuple):
    """How often each token occurs, and each pair that does, ascending by (first, second)."""

    tokens: Int[np.ndarray, " V"]
    first: Int[np.ndarray, " n"]
    second: Int[np.ndarray, " n"]
    pairs: Int[np.ndarray, " n"]


def _texts(examples: Sequence[Example], decoder_start: Sequence[int]) -> list[list[int]]:
    """Each target behind the token that it follows."""
    return [[(decoder_start or source)[-1], *target] for source, target in examples]


def count(examples: Sequence[Example], vocab_size: int, decoder_start: Sequence[int] = ()) -> Counts:
    """Counts of the targets' tokens and of the pairs that end with one.

    The first token of a target follows the decoder's start or, without encoder, the last token of the prompt.

    Raises:
      ValueError: an id outside the vocabulary.

    >>> counts = count([Example([9], [2, 3, 2, 1]), Example([9], [2, 1])], 10, decoder_start=(0,))
    >>> counts.tokens[:4].tolist(), list(zip(*map(np.ndarray.tolist, counts[1:])))
    ([0, 2, 3, 1], [(0, 2, 2), (2, 1, 2), (2, 3, 1), (3, 2, 1)])
    """
    texts = _texts(examples, decoder_start)
    flat = np.fromiter((token for text in texts for token in text), np.int64)
    if flat.size and not 0 <= flat.min() <= flat.max() < vocab_size:
        raise ValueError(f"examples: expected ids in 0 .. {vocab_size - 1}, got {flat.min()} .. {flat.max()}")
    follows = np.ones(len(flat), bool)
    follows[np.cumsum([0, *map(len, texts[:-1])])] = False
    codes = flat[:-1][follows[1:]] * vocab_size + flat[1:][follows[1:]]
    unique, pairs = np.unique(codes, return_counts=True)
    return Counts(np.bincount(flat[follows], minlength=vocab_size), *divmod(unique, vocab_size), pairs)


def smooth(
    counts: Counts,
    *,
    order: int = 2,
    successors: int = 64,
    delta: float = 0.1,
    discount: float = 0.75,
    width: int | None = None,
) -> NgramTable:
    """The laws that the counts stand for; see the module.

    Args:
      order: 1: a unigram model, which keeps no successors.
      successors: kept for a token (k); at most V are.
      width: of the target's logits, where it is more than V: the surplus tokens get probability 0.
    """
    vocab_size = len(counts.tokens)
    width = vocab_size if width is None else width
    unigram = np.zeros(width)
    unigram[:vocab_size] = (counts.tokens + delta) / (counts.tokens.sum() + delta * vocab_size)

    k = min(successors, vocab_size) if order > 1 else 0
    order_of_use = np.lexsort((counts.second, -counts.pairs, counts.first))
    first, second, pairs = (array[order_of_use] for array in counts[1:])
    rank = np.arange(len(first)) - np.searchsorted(first, first)
    first, second, pairs, rank = (array[rank < k] for array in (first, second, pairs, rank))
    occurrences = np.bincount(counts.first, counts.pairs, minlength=width)
    index, excess = np.zeros((width, k), np.int32), np.zeros((width, k))
    index[first, rank] = second
    excess[first, rank] = np.maximum(pairs - discount, 0) / occurrences[first]
    arrays = unigram, np.maximum(1 - excess.sum(1), 0), excess
    unigram, backoff, excess = (jnp.asarray(array, jnp.float32) for array in arrays)
    return NgramTable(unigram, backoff, jnp.asarray(index), excess)


def loss(table: NgramTable, examples: Sequence[Example], decoder_start: Sequence[int] = ()) -> float:
    """Mean -log P of the targets' tokens, each after the token before it."""
    backoff, successors, excess = (np.asarray(array, np.float64) for array in table[1:4])
    unigram = np.asarray(table.unigram, np.float64)
    total, number = 0.0, 0
    for text in _texts(examples, decoder_start):
        before, after = np.array(text[:-1]), np.array(text[1:])
        law = backoff[before] * unigram[after]
        law += np.where(successors[before] == after[:, None], excess[before], 0).sum(1)
        total, number = total - float(np.log(law).sum()), number + len(law)
    return total / number


def run(
    config: Ngram, corpus: recipe.Corpus, output: str | Path, *, target: Model | None = None
) -> NgramTable:
    """The table, counted on ``corpus.train``, or read where that was done before.

    Args:
      corpus: texts that the target wrote, or references; token ids for a target without tokenizer.
      output: a folder; ``drafters.ngram(output / "ngram.npz")`` drafts with what it gets. ``DONE`` holds
        how much was counted, and the loss on ``corpus.validation``.
      target: None: the one that ``config`` names.
    Raises:
      ValueError: a wrong configuration, corpus or folder.
      OSError: the folder cannot be written.
    """
    output = Path(output)
    target = recipe.given("target", target, config.target, "float32")
    inputs = {
        **recipe.origin("ngram", corpus),
        "vocabulary": [target.vocab_size, target.lm.config.vocab_size],
        "tokens": target.vocabulary and recipe.text_fingerprint(target.vocabulary.tokens),
        "decoder_start": target.decoder_start,
    }
    if recipe.open_folder(output, config, inputs):
        return load_ngram(output / TABLE)
    train, validation = (
        recipe.encoded(config, target, texts, name)
        for texts, name in zip(corpus, corpus._fields, strict=True)
    )
    counts = count(train, target.vocab_size, target.decoder_start)
    table = smooth(
        counts,
        order=config.order,
        successors=config.successors,
        delta=config.delta,
        discount=config.discount,
        width=target.lm.config.vocab_size,
    )._replace(vocabulary=target.vocabulary)
    summary = {
        "tokens": int(counts.tokens.sum()),
        "pairs": len(counts.pairs),
        "kept": int((table.excess > 0).sum()),
        "validation_loss": loss(table, validation, target.decoder_start),
    }

    def write() -> None:
        save_ngram(output / TABLE, table)
        orbax.write_json(output / orbax.DONE, summary)

    hosts.on_first(write)
    return table
