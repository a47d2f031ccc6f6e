"""What ends a row: end tokens, stop sequences, the budget, and logits that are not finite."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.types import Verdict

FINISH_REASONS = ("running", "eos", "stop", "length", "nan")
RUNNING, EOS, STOP, LENGTH, NAN = range(5)


class Stops(NamedTuple):
    """What ends a row: any of the tokens ``eos``, or the last tokens being one of ``sequences``."""

    eos: Int[Array, " K"]
    sequences: Int[Array, "Q L"]  # left padded with -1


def no_stops() -> Stops:
    """Nothing ends a row but its limit."""
    return Stops(jnp.zeros(0, jnp.int32), jnp.zeros((0, 1), jnp.int32))


class Row(NamedTuple):
    """The part of the engine's state that says where each row begins and ends."""

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]
    limits: Int[Array, " B"]
    starts: Int[Array, " B"]
    finish: Int[Array, " B"]


def _first(hit: Bool[Array, "B R"]) -> Int[Array, " B"]:
    """Index of the first True of each row, R where there is none."""
    return jnp.where(hit.any(1), jnp.argmax(hit, axis=1), hit.shape[1]).astype(jnp.int32)


def cut(
    stops: Stops,
    row: Row,
    verdict: Verdict,
    broken: Bool[Array, "B R"],
) -> tuple[Verdict, Int[Array, "B S"], Int[Array, " B"]]:
    """The verdict cut at the first NaN, end token, stop sequence or the budget; tokens and finish after it.

    ``broken[b, d]`` says that the d-th token would come from logits that are not finite, or from no law.
    Where several ends fall on one token, the first of eos, stop, length is the reason; nothing is emitted
    from a NaN on.
    """
    running = row.finish == RUNNING
    budget = jnp.where(running, row.limits - row.lengths, 0)
    depth = jnp.arange(verdict.tokens.shape[1])[None]
    emitted = jnp.minimum(verdict.num_emitted, budget)

    first_broken = _first(broken & (depth < emitted[:, None]))
    is_nan = first_broken < emitted
    emitted = jnp.minimum(emitted, first_broken)

    def write(count: Int[Array, " B"]) -> Int[Array, "B S"]:
        slots = jnp.where(depth < count[:, None], row.lengths[:, None] + depth, row.tokens.shape[1])
        return jax.vmap(lambda buffer, new, at: buffer.at[at].set(new, mode="drop"))(
            row.tokens, verdict.tokens, slots
        )

    ends = jnp.isin(verdict.tokens, stops.eos)
    # Window [b, d] is the last L tokens once token d is out; -1 in a sequence matches anything.
    length = stops.sequences.shape[1]
    window = (row.lengths[:, None] + depth)[:, :, None] + (jnp.arange(length) - length + 1)[None, None]
    wanted = stops.sequences[None, None]
    seen = jnp.take_along_axis(write(emitted)[:, None], jnp.clip(window, 0, row.tokens.shape[1] - 1), axis=2)
    new = window >= row.starts[:, None, None]
    stopped = ((wanted < 0) | ((wanted == seen[:, :, None]) & new[:, :, None])).all(-1).any(-1)

    inside = depth < emitted[:, None]
    first_end, first_stop = _first(ends & inside), _first(stopped & inside)
    finished = jnp.minimum(first_end, first_stop) < emitted
    emitted = jnp.minimum(emitted, jnp.minimum(first_end, first_stop) + 1)
    emitted = jnp.where(running, emitted, 0)

    reason = jnp.where(emitted >= budget, LENGTH, RUNNING)
    reason = jnp.where(is_nan, NAN, reason)
    reason = jnp.where(finished, jnp.where(first_end <= first_stop, EOS, STOP), reason)
    finish = jnp.where(running, reason, row.finish).astype(jnp.int32)
    verdict = verdict._replace(
        num_emitted=emitted,
        num_accepted=jnp.minimum(verdict.num_accepted, emitted),
        tokens=jnp.where(depth < emitted[:, None], verdict.tokens, 0),
    )
    return verdict, write(emitted), finish
