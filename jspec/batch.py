"""The host's side of a batch: segments of engine rounds, text in between, rows refilled from a queue."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import engine, parallel, records, stops
from jspec.checkpoint import Model
from jspec.options import Options
from jspec.output import Result, Writer, result
from jspec.types import Drafter, Prompt, Verifier

REFILL = 8  # a batch of B rows takes B / REFILL new prompts at a time: reading them one by one costs more


class Request(NamedTuple):
    """A prompt as ids; for an encoder-decoder, what its decoder begins with and what its encoder reads."""

    tokens: Sequence[int]
    source: Sequence[int] | None = None


@dataclasses.dataclass
class Batch:
    """The engine's state and everything its calls need; sequences are indices into ``options``."""

    model: Model
    drafter: Drafter
    verify: Verifier
    options: Options
    widths: tuple[int, ...] | None
    logprobs: bool
    state: Any = None  # engine.State, once started or taken over
    source_width: int = 0  # of every encoder input, so that any request fits into any row
    rounds: int = 0  # that the batch as a whole has run in `decode`

    @property
    def _record(self) -> records.Record:
        logprobs = {"logprobs": records.logprobs} if self.logprobs else {}
        return records.records(statistics=records.statistics, **logprobs)

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return 0 if self.state is None else self.state.tokens.shape[1]

    @property
    def settings(self) -> dict[str, Any]:
        """What is in effect, for `Output.settings`."""
        return {
            "draft_depth": self.drafter.method.depth,
            "draft_nodes": self.drafter.method.width,
            "verify": self.verify.name,
            "lossless": self.verify.lossless,
            "widths": self.widths,
            "capacity": self.capacity,
            "rows": self.state.lengths.shape[0],
            "rounds": self.rounds,
        }

    def _shared(self, sequences: Sequence[int]) -> dict[str, Any]:
        sampler = self.options.sampler(sequences)
        return {"target": self.model.lm, "drafter": self.drafter, "sampler": sampler}

    def start(self, requests: Sequence[Request], limits: np.ndarray, capacity: int) -> None:
        """Read the prompts of the first sequences, a row each."""
        rows = range(len(requests))
        self.state = engine.start(
            self.model.params,
            pad(requests, self.source_width),
            self.options.keys(rows),
            max_new_tokens=jnp.asarray(limits, jnp.int32),
            capacity=capacity,
            record=self._record,
            **self._shared(rows),
        )

    def append(self, tokens: Sequence[int], limit: int) -> None:
        """Read the next turn of the only row."""
        turn = pad([Request(tokens)])
        self.state = engine.append(
            self.model.params,
            self.state,
            turn.tokens,
            turn.lengths,
            self.options.keys([0]),
            max_new_tokens=limit,
            **self._shared([0]),
        )

    def _insert(
        self, refills: Sequence[tuple[int, int]], requests: Sequence[Request], limits: np.ndarray, size: int
    ) -> None:
        """Put sequences into rows, ``refills`` being (row, sequence); always ``size`` at a time."""
        batch = self.state.lengths.shape[0]
        for at in range(0, len(refills), size):
            rows, sequences = zip(*refills[at : at + size], strict=True)
            missing = size - len(rows)
            sequences = (*sequences, *(sequences[:1] * missing))
            self.state = engine.insert(
                self.model.params,
                self.state,
                (*rows, *([batch] * missing)),
                pad([requests[i] for i in sequences], self.source_width),
                self.options.keys(sequences),
                max_new_tokens=jnp.asarray([limits[i] for i in sequences], jnp.int32),
                record=self._record,
                **self._shared(sequences),
            )

    def decode(
        self, requests: Sequence[Request], limits: np.ndarray, rounds: int | None
    ) -> Iterator[tuple[int, str | list[int], Result | None]]:
        """Run to the end, refilling finished rows with the sequences that have no row yet.

        Yields (sequence, new text or ids, its result once finished) after every ``rounds`` rounds, or, with
        None, whenever some rows can be refilled.
        """
        assert self.state is not None
        batch = self.state.lengths.shape[0]
        sequences = list(range(batch))
        waiting = collections.deque(range(batch, len(requests)))
        size = max(1, batch // REFILL)
        writers: dict[int, Writer] = {row: self._writer(row) for row in range(batch)}
        shared, stop = self._shared(sequences), self.options.stops()
        counted = np.array(parallel.fetch(self.state.rounds))  # a copy: `run` donates the state
        while writers:
            self.state = engine.run(
                self.model.params,
                self.state,
                verify=self.verify,
                stops=stop,
                widths=self.widths,
                record=self._record,
                max_rounds=rounds,
                max_finished=min(size, len(waiting)) if waiting else None,
                **shared,
            )
            state = self.state
            tokens, lengths, starts, finish, rounds_of_rows = parallel.fetch(
                (state.tokens, state.lengths, state.starts, state.finish, state.rounds)
            )
            self.rounds += int((rounds_of_rows - counted).max())  # of a row that ran to the last one
            refills, record = [], None
            for row, writer in list(writers.items()):
                new = tokens[row, starts[row] + len(writer.tokens) : lengths[row]].tolist()
                reason = None if finish[row] == stops.RUNNING else stops.FINISH_REASONS[finish[row]]
                piece = writer.push(new, reason)
                if writer.finish is None:
                    yield sequences[row], piece, None
                    continue
                record = parallel.fetch(state.record) if record is None else record
                mine = jax.tree.map(operator.itemgetter((row, slice(int(starts[row]), None))), record)
                yield sequences[row], piece, result(writer, mine)
                del writers[row]
                if waiting:
                    sequences[row] = waiting.popleft()
                    refills.append((row, sequences[row]))
                    writers[row] = self._writer(sequences[row])
                elif reason is None:  # a stop string, of which the engine knows nothing
                    self.state = self.state._replace(finish=self.state.finish.at[row].set(stops.STOP))
            counted = np.array(rounds_of_rows)
            if refills:
                self._insert(refills, requests, limits, size)
                shared = self._shared(sequences)
                counted[[row for row, _ in refills]] = 0

    def _writer(self, sequence: int) -> Writer:
        least = self.options.min_new_tokens
        return Writer(
            self.model.tokenizer,
            self.options.strings,
            self.options.sequences,
            0 if least is None else int(least[sequence]),
        )


def pad(requests: Sequence[Request], source_width: int = 0) -> Prompt:
    """Requests as one `Prompt` of host arrays; sources are padded to ``source_width``."""
    tokens, lengths = _padded([request.tokens for request in requests])
    sources = [request.source for request in requests if request.source is not None]
    if not sources:
        return Prompt(tokens, lengths)  # type: ignore[arg-type]
    return Prompt(tokens, lengths, *_padded(sources, source_width))  # type: ignore[arg-type]


def _padded(lists: Sequence[Sequence[int]], width: int = 0) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(ids) for ids in lists], np.int32)
    padded = np.zeros((len(lists), max(width, lengths.max())), np.int32)
    for row, ids in zip(padded, lists, strict=True):
        row[: len(ids)] = ids
    return padded, lengths


def source_width(requests: Sequence[Request], most: int | None = None) -> int:
    """The width of encoder inputs, a power of two, so that few widths are compiled; 0 without encoder.
    ``most``: positions that the encoder has, which all sources fit into.

    >>> source_width([Request([0], [5] * 17), Request([0], [5])]), source_width([Request([3])])
    (32, 0)
    """
    longest = max(len(request.source or ()) for request in requests)
    width = 0 if longest == 0 else max(16, 1 << (longest - 1).bit_length())
    return width if most is None else min(width, most)
