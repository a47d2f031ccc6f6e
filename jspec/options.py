"""Sampling options: checked on the host, spread over the sequences, turned into a `Sampler` and `Stops`.

Every option may be one value for all prompts or a list with one value a prompt. Whether a step (top-p, a
penalty, ...) is part of the compiled program depends on whether any prompt uses it; its values never do.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec import engine, sampling
from jspec.sampling import Processor
from jspec.types import Keys, Sampler

Tokens = Sequence[int]


class SamplingOptions(TypedDict, total=False):
    """The keywords that `generate`, `stream` and `Session` share.

    Each may be one value or a list with one a prompt, but for ``processors`` and ``stop``. They act in
    this order on target and drafter alike: penalties, bans, first tokens, processors, temperature, top-k,
    top-p, min-p.
    """

    temperature: float | Sequence[float]  # >= 0; 0 (default): greedy
    top_k: int | Sequence[int]  # 0 (default): off
    top_p: float | Sequence[float]  # in (0, 1]; 1 (default): off
    min_p: float | Sequence[float]  # in [0, 1]; 0 (default): off
    repetition_penalty: float | Sequence[float]  # > 0; 1 (default): off
    presence_penalty: float | Sequence[float]  # 0 (default): off
    frequency_penalty: float | Sequence[float]  # 0 (default): off
    banned_tokens: Tokens | Sequence[Tokens] | None  # never come out
    allowed_tokens: Tokens | Sequence[Tokens] | None  # nothing else comes out; end tokens must be listed, too
    first_tokens: Tokens | Sequence[Tokens] | None  # the first new token is one of these
    min_new_tokens: int | Sequence[int]  # no end token and no stop before that many
    processors: Sequence[Processor]  # your own rules; without arrays per row
    stop: str | Sequence[str] | Sequence[Tokens]  # strings, or token sequences
    seed: int | Sequence[int]  # a prompt's result depends on its own seed alone, not on its neighbours


def reject_unknown(function: str, given: Sequence[str], own: Sequence[str]) -> None:
    """TypeError for a keyword that is no sampling option, with the nearest one that is, or that is one of the
    function's ``own``."""
    for name in given:
        if name not in SamplingOptions.__annotations__:
            near = difflib.get_close_matches(name, [*SamplingOptions.__annotations__, *own], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def one_each(name: str, value: Any, prompts: int, good: Callable[[Any], bool], expected: str) -> list[Any]:
    """``value`` as a list with one entry a prompt, every entry checked.

    >>> one_each("top_k", 5, 2, lambda k: k >= 0, "a number >= 0")
    [5, 5]
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    values = list(value) if isinstance(value, (list, tuple)) else [value] * prompts
    if len(values) != prompts:
        raise ValueError(
            f"{name}: expected one value, or one for each of {prompts} prompts, got {len(values)}"
        )
    for entry in values:
        number = isinstance(entry, (int, float, np.integer, np.floating)) and not isinstance(entry, bool)
        if not number or not good(entry):
            raise ValueError(f"{name}: expected {expected}, got {entry!r}")
    return values


def _is_whole(value: float) -> bool:
    return isinstance(value, (int, np.integer)) and value >= 0


def _is_seed(value: float) -> bool:
    return _is_whole(value) and value < 2**32


def whole_each(name: str, value: Any, prompts: int) -> np.ndarray:
    """Whole numbers >= 0, one a prompt, as int64."""
    return np.array(one_each(name, value, prompts, _is_whole, "a whole number >= 0"), np.int64)


def _token_lists(name: str, value: Any, prompts: int, vocab: int) -> list[list[int]]:
    """One list of ids for all prompts, or one a prompt, as one a prompt."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence):
        raise ValueError(f"{name}: expected a list of token ids, got {value!r}")
    lists = [value] * prompts if all(isinstance(entry, (int, np.integer)) for entry in value) else list(value)
    if len(lists) != prompts:
        raise ValueError(f"{name}: expected one list, or one for each of {prompts} prompts, got {len(lists)}")
    return [check_tokens(name, tokens, vocab) for tokens in lists]


def check_tokens(name: str, tokens: Any, vocab: int) -> list[int]:
    """``tokens`` as a list of ints, each in 0 .. vocab - 1."""
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    if not isinstance(tokens, Sequence):
        raise ValueError(f"{name}: expected token ids in 0 .. {vocab - 1}, got {tokens!r}")
    for token in tokens:
        whole = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
        if not whole or not 0 <= token < vocab:
            raise ValueError(f"{name}: expected token ids in 0 .. {vocab - 1}, got {token!r}")
    return [int(token) for token in tokens]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Sampling options of n sequences, one entry each; None leaves a step out. Made by `resolve`."""

    width: int  # of the logits
    ends: tuple[int, ...]  # end tokens of the model
    temperature: np.ndarray
    top_k: np.ndarray | None
    top_p: np.ndarray | None
    min_p: np.ndarray | None
    penalties: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    allowed: np.ndarray | None  # [1 or n, width] bool
    first: np.ndarray | None  # [1 or n, width] bool
    min_new_tokens: np.ndarray | None
    processors: tuple[Processor, ...]
    strings: tuple[str, ...]
    sequences: tuple[tuple[int, ...], ...]
    seeds: np.ndarray
    samples: np.ndarray  # index of the sequence among the samples of its prompt

    def sampler(self, rows: Sequence[int]) -> Sampler:
        """The sampler of a batch that holds the sequences ``rows``."""
        index = np.asarray(rows)

        def pick(values: np.ndarray | None, dtype: Any = jnp.float32) -> Any:
            return None if values is None else jnp.asarray(values[index], dtype)

        def mask(values: np.ndarray) -> Any:
            return jnp.asarray(values if len(values) == 1 else values[index])

        processors = []
        if self.penalties is not None:
            processors.append(sampling.penalties(self.width, *(pick(values) for values in self.penalties)))
        if self.allowed is not None:
            processors.append(sampling.allow(mask(self.allowed)))
        if self.min_new_tokens is not None:
            enders = np.ones((1, self.width), bool)
            enders[0, list(self._enders())] = False
            processors.append(
                sampling.allow_before(pick(self.min_new_tokens, jnp.int32), jnp.asarray(enders))
            )
        if self.first is not None:
            processors.append(sampling.allow_before(jnp.ones(len(index), jnp.int32), mask(self.first)))
        settings = sampling.Settings(
            pick(self.temperature), pick(self.top_k, jnp.int32), pick(self.top_p), pick(self.min_p)
        )
        return sampling.sampler(settings, [*processors, *self.processors])

    def keys(self, rows: Sequence[int]) -> Keys:
        """One key a row, from its seed and its number among its prompt's samples."""
        index = np.asarray(rows)
        seeds, samples = self.seeds[index], self.samples[index]
        return _keys(jnp.asarray(seeds, jnp.uint32), jnp.asarray(samples, jnp.int32))

    def stops(self) -> engine.Stops:
        """What the engine itself checks: end tokens and token sequences."""
        length = max((len(sequence) for sequence in self.sequences), default=1)
        padded = [[-1] * (length - len(sequence)) + list(sequence) for sequence in self.sequences]
        return engine.Stops(
            jnp.asarray(self.ends, jnp.int32), jnp.asarray(padded, jnp.int32).reshape(-1, length)
        )

    def _enders(self) -> set[int]:
        return {*self.ends, *(sequence[0] for sequence in self.sequences if len(sequence) == 1)}


@jax.jit
def _keys(seeds: Int[Array, " B"], samples: Int[Array, " B"]) -> Keys:
    return sampling.fold(sampling.row_keys(seeds), samples)


def resolve(
    options: SamplingOptions,
    *,
    prompts: int,
    samples: int,
    width: int,
    vocab: int,
    ends: tuple[int, ...],
    special_id: Callable[[str], int | None] | None,
    banned: Tokens = (),
) -> Options:
    """Check ``options`` and spread them over ``prompts`` x ``samples`` sequences (samples adjacent).

    Args:
      width: columns of the logits; ``vocab`` of them are real tokens, the rest is padding and banned.
      ends: end tokens.
      special_id: the tokenizer's; a stop string that is a special token becomes a token stop (such tokens
        have no text). None: no tokenizer, stop strings are refused.
      banned: ids that never come out, beside the request's own ``banned_tokens``.
    """

    def spread(values: Any, dtype: Any) -> np.ndarray:
        return np.repeat(np.asarray(values, dtype), samples, axis=0)

    def number(name: str, default: float, good: Callable[[Any], bool], expected: str) -> np.ndarray:
        value = options.get(name, default)
        return spread(one_each(name, value, prompts, good, expected), np.float32)

    def used(values: np.ndarray, off: float) -> np.ndarray | None:
        return values if (values != off).any() else None

    temperature = number("temperature", 0.0, lambda t: 0 <= t < math.inf, "a finite number >= 0")
    top_k = spread(np.minimum(whole_each("top_k", options.get("top_k", 0), prompts), width), np.int32)
    top_p = number("top_p", 1.0, lambda p: 0 < p <= 1, "a number in (0, 1]")
    min_p = number("min_p", 0.0, lambda p: 0 <= p <= 1, "a number in [0, 1]")
    # Beyond float32 they would be infinite or 0, and a law of NaN.
    least_float, most = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    finite = "a finite number of float32"
    repetition = number("repetition_penalty", 1.0, lambda r: least_float <= r <= most, f"{finite} > 0")
    presence = number("presence_penalty", 0.0, lambda x: abs(x) <= most, finite)
    frequency = number("frequency_penalty", 0.0, lambda x: abs(x) <= most, finite)
    penalized = (repetition != 1).any() or (presence != 0).any() or (frequency != 0).any()
    seeds = one_each("seed", options.get("seed", 0), prompts, _is_seed, "a whole number in 0 .. 2**32 - 1")
    strings, sequences = _stops(options.get("stop", ()), vocab, special_id)
    least = spread(whole_each("min_new_tokens", options.get("min_new_tokens", 0), prompts), np.int32)
    if least.any() and any(len(sequence) > 1 for sequence in sequences):
        raise ValueError("min_new_tokens: cannot be combined with stop sequences of several tokens")

    resolved = Options(
        width=width,
        ends=ends,
        temperature=temperature,
        top_k=used(top_k, 0),
        top_p=used(top_p, 1),
        min_p=used(min_p, 0),
        penalties=(repetition, presence, frequency) if penalized else None,
        allowed=_allowed(options, prompts, samples, width, vocab, banned),
        first=_marks("first_tokens", options.get("first_tokens"), prompts, samples, width, vocab),
        min_new_tokens=used(least, 0),
        processors=_processors(options.get("processors", ())),
        strings=strings,
        sequences=sequences,
        seeds=spread(seeds, np.uint32),
        samples=np.tile(np.arange(samples, dtype=np.int32), prompts),
    )
    _check_something_left(resolved)
    return resolved


def _processors(given: Any) -> tuple[Processor, ...]:
    if not isinstance(given, Sequence) or not all(isinstance(entry, Processor) for entry in given):
        raise ValueError(f"processors: expected a list of jspec.sampling.Processor, got {given!r}")
    return tuple(given)


def _stops(
    stop: Any, vocab: int, special_id: Callable[[str], int | None] | None
) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Stop strings and stop token sequences."""
    strings, sequences = [], []
    if not isinstance(stop, (str, Sequence, np.ndarray, type(None))):
        raise ValueError(f"stop: expected strings or lists of token ids, got {stop!r}")
    for entry in [stop] if isinstance(stop, str) else () if stop is None else stop:
        if not isinstance(entry, (str, Sequence, np.ndarray)):
            raise ValueError(f"stop: expected strings or lists of token ids, got the bare {entry!r}")
        if len(entry) == 0:
            raise ValueError(f"stop: expected stops that are not empty, got {entry!r}")
        if not isinstance(entry, str):
            sequences.append(tuple(check_tokens("stop", entry, vocab)))
        elif special_id is None:
            raise ValueError(f"stop: expected token ids, because the model has no tokenizer, got {entry!r}")
        elif (index := special_id(entry)) is not None:
            sequences.append((index,))
        else:
            strings.append(entry)
    return tuple(strings), tuple(sequences)


def _marks(name: str, value: Any, prompts: int, samples: int, width: int, vocab: int) -> np.ndarray | None:
    """[1 or n, width] bool: the listed ids; None where nothing is listed."""
    if value is None:
        return None
    lists = _token_lists(name, value, prompts, vocab)
    if all(tokens == lists[0] for tokens in lists):
        lists, samples = lists[:1], 1
    marks = np.zeros((len(lists), width), bool)
    for row, tokens in zip(marks, lists, strict=True):
        row[tokens] = True
    return np.repeat(marks, samples, axis=0)


def _allowed(
    options: SamplingOptions, prompts: int, samples: int, width: int, vocab: int, never: Tokens
) -> np.ndarray | None:
    """What may come out at all: real tokens, the allowed ones, without the banned; None: everything."""
    allowed = _marks("allowed_tokens", options.get("allowed_tokens"), prompts, samples, width, vocab)
    banned = _marks("banned_tokens", options.get("banned_tokens"), prompts, samples, width, vocab)
    allowed = np.ones((1, width), bool) if allowed is None else allowed
    if banned is not None:
        allowed = allowed & ~banned
    index = np.arange(width)
    allowed = allowed & ((index < vocab) & ~np.isin(index, never))[None]
    return None if allowed.all() else allowed


def _check_something_left(options: Options) -> None:
    """No combination of bans may forbid every token."""
    everything = np.ones((1, options.width), bool)
    allowed = everything if options.allowed is None else options.allowed
    if not allowed.any(1).all():
        raise ValueError("allowed_tokens: expected at least one token that is not banned, got none")
    if options.min_new_tokens is not None:
        held = options.min_new_tokens > 0  # the sequences that may not end at once
        allowed = np.array(np.broadcast_to(allowed, (len(held), options.width)))
        allowed[np.ix_(np.flatnonzero(held), np.array(sorted(options._enders()), int))] = False
        if not allowed.any(1).all():
            raise ValueError("min_new_tokens: expected an allowed token that ends nothing, got none")
    if options.first is not None and not (allowed & options.first).any(1).all():
        raise ValueError("first_tokens: expected at least one token that is not banned, got none")
