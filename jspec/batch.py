"""The host's side of a batch: segments of engine rounds, text in between, rows refilled from a queue."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import engine, records, stops
from jspec.checkpoint import Model
from jspec.options import Options
from jspec.output import Result, Writer, result
from jspec.types import Drafter, Prompt, Verifier


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
        }

    def _shared(self, sequences: Sequence[int]) -> dict[str, Any]:
        sampler = self.options.sampler(sequences)
        return {"target": self.model.lm, "drafter": self.drafter, "sampler": sampler}

    def start(self, prompts: Sequence[Sequence[int]], limits: np.ndarray, capacity: int) -> None:
        """Read the prompts of the first sequences, a row each."""
        rows = range(len(prompts))
        self.state = engine.start(
            self.model.params,
            pad(prompts),
            self.options.keys(rows),
            max_new_tokens=jnp.asarray(limits, jnp.int32),
            capacity=capacity,
            record=self._record,
            **self._shared(rows),
        )

    def append(self, tokens: Sequence[int], limit: int) -> None:
        """Read the next turn of the only row."""
        turn = pad([tokens])
        self.state = engine.append(
            self.model.params,
            self.state,
            turn.tokens,
            turn.lengths,
            self.options.keys([0]),
            max_new_tokens=limit,
            **self._shared([0]),
        )

    def _insert(self, row: int, sequence: int, prompt: Sequence[int], limit: int) -> None:
        self.state = engine.insert(
            self.model.params,
            self.state,
            row,
            pad([prompt]),
            self.options.keys([sequence]),
            max_new_tokens=limit,
            record=self._record,
            **self._shared([sequence]),
        )

    def decode(
        self, prompts: Sequence[Sequence[int]], limits: np.ndarray, rounds: int | None
    ) -> Iterator[tuple[int, str | list[int], Result | None]]:
        """Run to the end, refilling finished rows with the sequences that have no row yet.

        Yields (sequence, new text or ids, its result once finished) after every ``rounds`` rounds, or, with
        None, whenever a sequence is finished.
        """
        assert self.state is not None
        batch = self.state.lengths.shape[0]
        sequences = list(range(batch))
        waiting = collections.deque(range(batch, len(prompts)))
        writers: dict[int, Writer] = {row: self._writer(row) for row in range(batch)}
        shared, stop = self._shared(sequences), self.options.stops()
        while writers:
            self.state = engine.run(
                self.model.params,
                self.state,
                verify=self.verify,
                stops=stop,
                widths=self.widths,
                record=self._record,
                max_rounds=rounds,
                max_finished=1 if waiting else None,
                **shared,
            )
            state = self.state
            tokens, lengths, starts, finish = jax.device_get(
                (state.tokens, state.lengths, state.starts, state.finish)
            )
            for row, writer in list(writers.items()):
                new = tokens[row, starts[row] + len(writer.tokens) : lengths[row]].tolist()
                reason = None if finish[row] == stops.RUNNING else stops.FINISH_REASONS[finish[row]]
                piece = writer.push(new, reason)
                if writer.finish is None:
                    yield sequences[row], piece, None
                    continue
                mine = jax.device_get(jax.tree.map(operator.itemgetter(row), self.state.record))
                mine = jax.tree.map(operator.itemgetter(slice(int(starts[row]), None)), mine)
                yield sequences[row], piece, result(writer, mine)
                del writers[row]
                if waiting:
                    sequences[row] = waiting.popleft()
                    self._insert(row, sequences[row], prompts[sequences[row]], limits[sequences[row]])
                    writers[row] = self._writer(sequences[row])
                    shared = self._shared(sequences)
                elif reason is None:  # a stop string, of which the engine knows nothing
                    self.state = self.state._replace(finish=self.state.finish.at[row].set(stops.STOP))

    def _writer(self, sequence: int) -> Writer:
        least = self.options.min_new_tokens
        return Writer(
            self.model.tokenizer,
            self.options.strings,
            self.options.sequences,
            0 if least is None else int(least[sequence]),
        )


def pad(prompts: Sequence[Sequence[int]]) -> Prompt:
    """Lists of ids as one `Prompt` of host arrays."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return Prompt(tokens, lengths)  # type: ignore[arg-type]
