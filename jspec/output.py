"""What a generation hands back, and how one sequence's tokens become text with stops cut off."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.io.tokenizer import Detokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of one sequence, or pooled over several. Every figure follows from the tokens handed out.

    Attributes:
      rounds: forwards of the target that gave at least one of the tokens.
      tokens: new tokens.
      accepted_by_position: entry d: rounds whose draft token at depth d + 1 was accepted.
      proposed_by_position: entry d: rounds whose draft reached depth d + 1.
      rows: the same for each sequence; () in these.
    """

    rounds: int
    tokens: int
    accepted_by_position: tuple[int, ...]
    proposed_by_position: tuple[int, ...]
    rows: tuple[Stats, ...] = ()

    @property
    def mean_accepted_length(self) -> float | None:
        """tau: tokens per target forward, bonus included; plain decoding gives 1. None without rounds."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted per proposed draft position, None when nothing was proposed."""
        proposed = sum(self.proposed_by_position)
        return sum(self.accepted_by_position) / proposed if proposed else None

    @classmethod
    def of(cls, offset: np.ndarray, accepted: np.ndarray, proposed: np.ndarray) -> Stats:
        """From what `records.statistics` keeps of each token, all [n].

        >>> Stats.of(np.array([0, 1, 0]), np.array([True, False, False]), np.array([2, 2, 1]))
        Stats(rounds=2, tokens=3, accepted_by_position=(1, 0), proposed_by_position=(2, 1), rows=())
        """
        depths = proposed[offset == 0]
        positions = range(depths.max(initial=0))
        return cls(
            rounds=len(depths),
            tokens=len(offset),
            accepted_by_position=tuple(int((accepted & (offset == d)).sum()) for d in positions),
            proposed_by_position=tuple(int((depths > d).sum()) for d in positions),
        )

    @classmethod
    def pooled(cls, rows: Sequence[Stats]) -> Stats:
        """Sums over sequences."""

        def total(counts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
            width = max((len(c) for c in counts), default=0)
            return tuple(sum(c[d] for c in counts if d < len(c)) for d in range(width))

        return cls(
            rounds=sum(row.rounds for row in rows),
            tokens=sum(row.tokens for row in rows),
            accepted_by_position=total([row.accepted_by_position for row in rows]),
            proposed_by_position=total([row.proposed_by_position for row in rows]),
            rows=tuple(rows),
        )


@dataclasses.dataclass(frozen=True)
class Output:
    """One entry a sequence; with ``num_samples`` = k, prompt i has entries i * k to i * k + k - 1.

    Attributes:
      texts: without end tokens and stops; None where the model has no tokenizer.
      tokens: new token ids. The end token, and the token that completes a stop, are the last ones.
      logprobs: natural log-probability of each token under the target's raw logits; None unless asked for.
      finish_reasons: "eos", "stop", "length" or "nan" (the model's logits were not finite).
      stats: pooled over the sequences, and each one's in ``stats.rows``.
      settings: what was in effect: depth and nodes of the drafts, acceptance rule, block widths, capacity,
        rows of the batch, and the rounds that the batch as a whole took.
    """

    texts: list[str] | None
    tokens: list[list[int]]
    logprobs: list[list[float]] | None
    finish_reasons: list[str]
    stats: Stats
    settings: dict[str, Any]


def overlap(tail: Any, stops: Sequence[Any]) -> int:
    """Length of the longest end of ``tail`` that a stop begins with (a whole stop does not count).

    >>> overlap("so long\\n", ["\\n\\nQ:", "\\n##"]), overlap((1, 2, 3), [(2, 3, 4)]), overlap("x", ["y"])
    (1, 2, 0)
    """
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(tail)), 0, -1):
        if any(length < len(stop) and tail[-length:] == stop[:length] for stop in stops):
            return length
    return 0


class Writer:
    """Turns one sequence's tokens into text as they come, and ends it at the first stop string.

    The rule is that of plain decoding: tokens are read one by one, whatever the rounds were that brought
    them, and the first token after which the text holds a stop string is the last. If it completes several,
    the text ends where the earliest of them begins.

    Attributes:
      tokens: all that count; text: all text that counts.
      finish: the reason, None while the sequence runs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        strings: Sequence[str] = (),
        sequences: Sequence[tuple[int, ...]] = (),
        min_tokens: int = 0,
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self._strings, self._sequences, self._min_tokens = strings, sequences, min_tokens
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._read = 0  # tokens that are text already
        self._released = 0  # characters (tokens, without tokenizer) handed out

    @property
    def has_text(self) -> bool:
        """False without a tokenizer."""
        return self._detokenizer is not None

    def push(self, tokens: Sequence[int], finish: str | None) -> str | list[int]:
        """The next tokens, and why they are the last if they are. Returns the new text (or token ids)
        that no later token can take back."""
        self.tokens += tokens
        self.finish = finish
        if self._detokenizer is None:
            piece = self.tokens[self._released :]
            self._released = len(self.tokens)
            return piece
        self._push_text(self._detokenizer, len(self.tokens) - self._textless())
        held = 0 if self.finish else overlap(self.text, self._strings)
        piece = self.text[self._released : len(self.text) - held]
        self._released += len(piece)
        return piece

    def _push_text(self, detokenizer: Detokenizer, end: int) -> None:
        step = 1 if self._strings else max(1, end - self._read)
        while self._read < end:
            before = len(self.text)
            self.text += detokenizer.push(self.tokens[self._read : self._read + step])
            self._read += step
            at = self._find_stop(before) if self._read >= self._min_tokens else None
            if at is not None:
                self.text, self.tokens, self.finish = self.text[:at], self.tokens[: self._read], "stop"
                return
        if self.finish:
            self.text += detokenizer.flush()

    def _find_stop(self, before: int) -> int | None:
        """Where the earliest stop string begins that ends after character ``before``."""
        found = [self.text.find(stop, max(0, before - len(stop) + 1)) for stop in self._strings]
        return min((at for at in found if at >= 0), default=None)

    def _textless(self) -> int:
        """Tokens at the end that are no text: the end token, a stop sequence, or what may become one."""
        if self.finish == "eos":
            return 1
        if self.finish == "stop":
            ends = (len(s) for s in self._sequences if self.tokens[-len(s) :] == list(s))
            return max(ends, default=0)
        return 0 if self.finish else overlap(tuple(self.tokens), self._sequences)


class Result(NamedTuple):
    """One finished sequence; fields as in `Output`."""

    text: str | None
    tokens: list[int]
    logprobs: list[float] | None
    finish: str
    stats: Stats


def result(writer: Writer, record: Mapping[str, Any]) -> Result:
    """A finished writer's sequence. ``record``: what was recorded of its tokens, arrays [n or more, ...]."""
    count = len(writer.tokens)
    logprobs = [float(x) for x in record["logprobs"][:count]] if "logprobs" in record else None
    stats = Stats.of(*(values[:count] for values in record["statistics"]))
    assert writer.finish is not None
    return Result(writer.text if writer.has_text else None, writer.tokens, logprobs, writer.finish, stats)


def collect(results: Sequence[Result], settings: dict[str, Any]) -> Output:
    """All sequences of one call."""
    texts = [r.text for r in results if r.text is not None]
    logprobs = [r.logprobs for r in results if r.logprobs is not None]
    return Output(
        texts=texts or None,
        tokens=[r.tokens for r in results],
        logprobs=logprobs or None,
        finish_reasons=[r.finish for r in results],
        stats=Stats.pooled([r.stats for r in results]),
        settings=settings,
    )
