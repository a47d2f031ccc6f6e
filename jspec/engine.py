"""The engine: every loop of jspec stands here.

A generation is `start` (an empty state, then `absorb`: the prompt in chunks) and `run` (one jitted
`lax.while_loop` over `round`, state donated). The last prompt token is the root of the first round, so the
first new token is verified like any other. `append` continues a finished conversation, `insert` refills one
row of a batch, `stream` runs the same rounds from the host. Nothing of a row depends on its neighbours:
every leaf of `State` leads with B, rounds are counted per row, and a round's randomness is
``fold_in(row_key, round of the row, stream)``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from jspec import parallel, sampling, trees
from jspec import verify as rules
from jspec.drafters.common import take
from jspec.records import Record, logprobs, records, statistics
from jspec.round import State, make_context, round, verify_forward
from jspec.stops import FINISH_REASONS, LENGTH, RUNNING, Stops, no_stops
from jspec.types import (
    Block,
    Context,
    Draft,
    Drafter,
    Info,
    Keys,
    LanguageModel,
    Prompt,
    PyTree,
    Sampler,
    Verdict,
    Verifier,
)

__all__ = [
    "FINISH_REASONS",
    "Record",
    "State",
    "Stops",
    "absorb",
    "append",
    "block_widths",
    "bucket",
    "generate",
    "insert",
    "logprobs",
    "no_stops",
    "records",
    "round",
    "run",
    "start",
    "statistics",
    "stream",
]

CAPACITY_STEP = 256
CHUNKS = (16, 128)


# --- start, absorb, append, insert ------------------------------------------------------------------


def _empty_record(record: Record, state: State, params: PyTree, context: Context, drafter: Drafter) -> PyTree:
    """Zero buffers [B, S, ...] of the shapes that ``record`` returns."""
    batch, capacity = state.tokens.shape
    method = drafter.method

    def one_round() -> PyTree:
        draft, _ = method.propose(drafter.params, state.drafter_state, context, state.keys)
        forward = verify_forward(context, draft, trees.ancestors(draft.parents), method.taps, (method.width,))
        zeros, row = jnp.zeros((batch, method.depth + 1), jnp.int32), jnp.zeros(batch, jnp.int32)
        return record(Info(draft, Verdict(zeros, row, zeros, row), forward))

    shapes = jax.eval_shape(one_round)
    return jax.tree.map(lambda s: jnp.zeros((batch, capacity, *s.shape[2:]), s.dtype), shapes)


@functools.partial(jax.jit, static_argnames=("target", "capacity", "record", "mesh"))
def _empty(
    params: PyTree,
    prompt: Prompt,
    keys: Keys,
    drafter: Drafter,
    sampler: Sampler,
    max_new_tokens: Int[Array, " B"],
    *,
    target: LanguageModel,
    capacity: int,
    record: Record | None,
    mesh: Mesh | None,
) -> State:
    prompt = parallel.constrain(mesh, prompt)
    zeros = jnp.zeros_like(prompt.lengths)
    state = State(
        tokens=prompt.tokens,
        lengths=prompt.lengths,
        limits=prompt.lengths + max_new_tokens,
        starts=prompt.lengths,
        finish=jnp.where(max_new_tokens > 0, RUNNING, LENGTH).astype(jnp.int32),
        rounds=zeros,
        keys=keys,
        history=sampler.init(prompt.tokens, prompt.lengths),
        cache=target.start(params, prompt, capacity),
        drafter_state=drafter.method.init(drafter.params, prompt, capacity, target),
    )
    if record is not None:
        context = make_context(params, state, target, sampler)
        state = state._replace(record=_empty_record(record, state, params, context, drafter))
    return parallel.constrain(mesh, state)


@functools.partial(jax.jit, static_argnames=("target", "chunk"), donate_argnames=("state",))
def _absorb(
    params: PyTree, state: State, drafter: Drafter, sampler: Sampler, *, target: LanguageModel, chunk: int
) -> State:
    method = drafter.method
    index = jnp.arange(chunk, dtype=jnp.int32)[None]

    def body(state: State) -> State:
        base = state.cache.lengths
        count = jnp.clip(state.lengths - 1 - base, 0, chunk)
        slots = base[:, None] + index
        tokens = take(state.tokens, slots)
        forward = target.extend(params, state.cache, Block(tokens, slots), taps=method.taps)
        path = jnp.broadcast_to(index, slots.shape)
        draft = Draft(tokens, trees.chain_parents(*slots.shape), index < jnp.maximum(count, 1)[:, None])
        verdict = Verdict(path, jnp.maximum(count - 1, 0), take(state.tokens, slots + 1), count)
        context = make_context(params, state, target, sampler)._replace(lengths=base + 1)
        drafter_state = method.update(drafter.params, state.drafter_state, context, draft, verdict, forward)
        return state._replace(
            cache=target.commit(state.cache, forward.rows, path, count), drafter_state=drafter_state
        )

    return jax.lax.while_loop(lambda s: jnp.any(s.cache.lengths < s.lengths - 1), body, state)


def absorb(
    params: PyTree, state: State, *, target: LanguageModel, drafter: Drafter, sampler: Sampler
) -> State:
    """Read all known tokens before the root into the cache and the drafter, in chunks.

    One compilation per chunk width; the state is donated. Costs nothing when nothing is missing.
    """
    lengths, read = parallel.fetch((state.lengths, state.cache.lengths))
    missing = int(np.max(lengths - 1 - read))
    return _catch_up(params, state, missing, target=target, drafter=drafter, sampler=sampler)


def _catch_up(
    params: PyTree, state: State, missing: int, *, target: LanguageModel, drafter: Drafter, sampler: Sampler
) -> State:
    """`absorb` where the host knows already how many tokens the row that lacks most lacks."""
    if missing <= 0:
        return state
    return _absorb(params, state, drafter, sampler, target=target, chunk=chunk_width(missing))


def chunk_width(missing: int) -> int:
    """Width of the chunks in which ``missing`` tokens are absorbed: the prompt bucket."""
    return next((width for width in CHUNKS if missing <= width), CHUNKS[-1])


def bucket(length: int) -> int:
    """The smallest capacity of the engine's grid that holds ``length`` tokens."""
    return -(-length // CAPACITY_STEP) * CAPACITY_STEP


def _padded(tokens: np.ndarray, width: int) -> np.ndarray:
    return np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))


def _checked(
    name: str, tokens: Array, lengths: Array, max_new_tokens: Array | int, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and new tokens of every row on the host, refused where they are out of range."""
    count = np.asarray(lengths, np.int32)
    new = np.broadcast_to(np.asarray(max_new_tokens, np.int32), count.shape)
    _check_lengths(name, tokens, count, least)
    if new.min() < 0:
        raise ValueError(f"max_new_tokens: expected numbers >= 0, got {new.min()}")
    return count, new


def _check_lengths(name: str, tokens: Array, count: np.ndarray, least: int) -> None:
    if count.min() < least or count.max() > tokens.shape[1]:
        raise ValueError(
            f"{name}: expected lengths in {least} .. {tokens.shape[1]}, got {count.min()} .. {count.max()}"
        )


def start(
    params: PyTree,
    prompt: Prompt,
    keys: Keys,
    *,
    target: LanguageModel,
    drafter: Drafter,
    sampler: Sampler,
    max_new_tokens: Int[Array, " B"] | int,
    capacity: int | None = None,
    record: Record | None = None,
) -> State:
    """A state that is ready for its first round.

    Args:
      prompt: tokens [B, T] and lengths [B] in 1 .. T; for an encoder-decoder also source [B, Ts] and
        source_lengths [B] in 0 .. Ts.
      max_new_tokens: one number, or one a row.
      capacity: slots of cache and token buffer; None: the smallest bucket that fits.
      record: what to keep of every round (`statistics`, `logprobs`, `records(...)`).
    Raises:
      ValueError: an empty prompt, lengths out of range, or a request that does not fit into ``capacity``.
    """
    lengths, new = _checked("prompt", prompt.tokens, prompt.lengths, max_new_tokens, least=1)
    if prompt.source is not None and prompt.source_lengths is not None:
        _check_lengths("prompt.source", prompt.source, np.asarray(prompt.source_lengths), least=0)
    needed = int((lengths + new).max())
    if capacity is None:
        capacity = min(bucket(needed), max(needed, target.config.context_length))
    if needed > capacity:
        raise ValueError(f"capacity: expected at least {needed} slots (prompt + new tokens), got {capacity}")
    tokens = np.asarray(prompt.tokens, np.int32)[:, : lengths.max()]
    state = _empty(
        params,
        prompt._replace(tokens=jnp.asarray(_padded(tokens, capacity)), lengths=jnp.asarray(lengths)),
        keys,
        drafter,
        sampler,
        jnp.asarray(new),
        target=target,
        capacity=capacity,
        record=record,
        mesh=parallel.mesh_of(params),
    )
    missing = int(lengths.max()) - 1
    return _catch_up(params, state, missing, target=target, drafter=drafter, sampler=sampler)


@functools.partial(jax.jit, donate_argnames=("state",))
def _append(
    state: State,
    tokens: Int[Array, "B S"],
    lengths: Int[Array, " B"],
    keys: Keys,
    sampler: Sampler,
    max_new_tokens: Int[Array, " B"],
) -> State:
    slots = jnp.arange(tokens.shape[1])[None] - state.lengths[:, None]
    mine = (slots >= 0) & (slots < lengths[:, None])
    buffer = jnp.where(mine, take(tokens, slots), state.tokens)
    total = state.lengths + lengths
    return state._replace(
        tokens=buffer,
        lengths=total,
        limits=total + max_new_tokens,
        starts=total,
        finish=jnp.where(max_new_tokens > 0, RUNNING, LENGTH).astype(jnp.int32),
        rounds=jnp.zeros_like(total),
        keys=keys,
        history=sampler.init(buffer, total),
    )


def append(
    params: PyTree,
    state: State,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    keys: Keys,
    *,
    target: LanguageModel,
    drafter: Drafter,
    sampler: Sampler,
    max_new_tokens: Int[Array, " B"] | int,
) -> State:
    """The next turn: ``tokens`` follow what each row holds, only they are absorbed. Donates the state."""
    count, new = _checked("tokens", tokens, lengths, max_new_tokens, least=0)
    capacity = state.tokens.shape[1]
    held, read = parallel.fetch((state.lengths, state.cache.lengths))
    needed, missing = int((held + count + new).max()), int((held + count - 1 - read).max())
    if needed > capacity:
        raise ValueError(
            f"tokens: the conversation needs {needed} slots with its new tokens, the capacity is {capacity}"
        )
    padded = _padded(np.asarray(tokens, np.int32)[:, : count.max()], capacity)
    state = _append(state, jnp.asarray(padded), jnp.asarray(count), keys, sampler, jnp.asarray(new))
    return _catch_up(params, state, missing, target=target, drafter=drafter, sampler=sampler)


@functools.partial(jax.jit, donate_argnames=("state",))
def _insert(state: State, rows: Int[Array, " K"], new: State) -> State:
    return jax.tree.map(lambda old, fresh: old.at[rows].set(fresh, mode="drop"), state, new)


def insert(
    params: PyTree,
    state: State,
    rows: Sequence[int],
    prompt: Prompt,
    keys: Keys,
    *,
    target: LanguageModel,
    drafter: Drafter,
    sampler: Sampler,
    max_new_tokens: Int[Array, " B"] | int,
    record: Record | None = None,
) -> State:
    """Refill rows with new prompts, ``prompt``'s row i into ``rows[i]``; ``sampler`` holds the new rows'
    settings. A row beyond the state's last drops its prompt: what fills a batch of fixed size up. Donates
    the state.

    Raises:
      ValueError: as `start`, or a source of another width than those the state was started with.
    """
    new = start(
        params,
        prompt,
        keys,
        target=target,
        drafter=drafter,
        sampler=sampler,
        max_new_tokens=max_new_tokens,
        capacity=state.tokens.shape[1],
        record=record,
    )

    def shapes(state: State) -> State:
        return jax.tree.map(lambda leaf: leaf.shape[1:], state._replace(record=None))

    if shapes(new) != shapes(state):  # the capacity is the state's own, so only the source's width is left
        width = 0 if prompt.source is None else prompt.source.shape[1]
        raise ValueError(f"prompt.source: expected the width of the state's other rows, got {width}")
    return _insert(state, jnp.asarray(rows, jnp.int32), new)


# --- run --------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("target", "widths", "record"), donate_argnames=("state",))
def _run(
    params: PyTree,
    state: State,
    drafter: Drafter,
    verify: Verifier,
    sampler: Sampler,
    stops: Stops,
    max_rounds: Int[Array, ""],
    max_finished: Int[Array, ""],
    *,
    target: LanguageModel,
    widths: tuple[int, ...],
    record: Record | None,
) -> State:
    def going(carry: tuple[State, Int[Array, ""]]) -> Bool[Array, ""]:
        state, rounds = carry
        running = state.finish == RUNNING
        return running.any() & (rounds < max_rounds) & ((~running).sum() < max_finished)

    def body(carry: tuple[State, Int[Array, ""]]) -> tuple[State, Int[Array, ""]]:
        state, rounds = carry
        state, _ = round(
            params,
            state,
            target=target,
            drafter=drafter,
            verify=verify,
            sampler=sampler,
            stops=stops,
            widths=widths,
            record=record,
        )
        return state, rounds + 1

    return jax.lax.while_loop(going, body, (state, jnp.int32(0)))[0]


def block_widths(drafter: Drafter, widths: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The block widths a round switches over, ascending and ending with the draft's own; the default is
    one token and the whole draft, so that an empty draft costs a plain step. With side rows there is
    always something to run, and no switch."""
    full = drafter.method.width
    if widths is None:
        return (full,) if drafter.method.side or full == 1 else (1, full)
    if not isinstance(widths, Sequence) or not all(isinstance(width, (int, np.integer)) for width in widths):
        raise ValueError(f"widths: expected several whole numbers, got {widths!r}")
    if drafter.method.side and set(widths) != {full}:
        raise ValueError(f"widths: a drafter with side rows always runs all its {full} nodes, got {widths}")
    if any(not 1 <= width <= full for width in widths):
        raise ValueError(f"widths: expected numbers in 1 .. {full} (the draft's width), got {widths}")
    return tuple(sorted({*widths, full}))


def run(
    params: PyTree,
    state: State,
    *,
    target: LanguageModel,
    drafter: Drafter,
    verify: Verifier,
    sampler: Sampler,
    stops: Stops,
    widths: tuple[int, ...] | None = None,
    record: Record | None = None,
    max_rounds: int | None = None,
    max_finished: int | None = None,
) -> State:
    """Rounds until every row is finished, or ``max_rounds`` are done, or ``max_finished`` rows are finished.

    One jitted while_loop; the state is donated. No value of any argument but ``target``, the drafter's
    method, ``widths`` and ``record`` makes it compile again; shapes do (the number and length of stop
    sequences among them).
    """
    rules.resolve(drafter.method, verify)
    if (record is None) != (not jax.tree.leaves(state.record)):
        raise ValueError("record: expected the one that the state was started with, got another")
    largest = np.iinfo(np.int32).max
    return _run(
        params,
        state,
        drafter,
        verify,
        sampler,
        stops,
        jnp.int32(largest if max_rounds is None else max_rounds),
        jnp.int32(largest if max_finished is None else max_finished),
        target=target,
        widths=block_widths(drafter, widths),
        record=record,
    )


def generate(
    params: PyTree,
    prompt: Prompt,
    keys: Keys,
    *,
    target: LanguageModel,
    drafter: Drafter,
    verify: Verifier,
    sampler: Sampler | None = None,
    stops: Stops | None = None,
    max_new_tokens: Int[Array, " B"] | int,
    capacity: int | None = None,
    widths: tuple[int, ...] | None = None,
    record: Record | None = None,
) -> State:
    """Prompts in, finished state out: `start`, then `run` to the end.

    Row b's tokens are ``state.tokens[b, state.starts[b] : state.lengths[b]]``. The law of the tokens is the
    target's under ``sampler`` (default: greedy) whenever ``verify.lossless``.

    Args:
      params: the target's parameters.
      prompt: tokens [B, T], lengths [B].
      keys: [B] typed keys (`sampling.row_keys`), one stream a row.

    >>> from jspec import testing, verify
    >>> target, params = testing.table_lm([[0.0, 1.0], [1.0, 0.0]])
    >>> state = generate(params, Prompt(jnp.array([[0]]), jnp.array([1])), sampling.row_keys(jnp.array([0])),
    ...                  target=target, drafter=testing.scripted([0, 1, 0, 1, 0]),
    ...                  verify=verify.target_only(), max_new_tokens=4)
    >>> state.tokens[0, :5].tolist()
    [0, 1, 0, 1, 0]
    """
    sampler = sampling.greedy(prompt.lengths.shape[0]) if sampler is None else sampler
    state = start(
        params,
        prompt,
        keys,
        target=target,
        drafter=drafter,
        sampler=sampler,
        max_new_tokens=max_new_tokens,
        capacity=capacity,
        record=record,
    )
    return run(
        params,
        state,
        target=target,
        drafter=drafter,
        verify=verify,
        sampler=sampler,
        stops=no_stops() if stops is None else stops,
        widths=widths,
        record=record,
    )


def stream(params: PyTree, state: State, *, rounds: int = 1, **options: object) -> Iterator[State]:
    """The same rounds from the host: the state after every ``rounds`` rounds, to the end.

    ``options`` are those of `run`. Read what you need before asking for the next state: it is donated.
    """
    while (parallel.fetch(state.finish) == RUNNING).any():
        state = run(params, state, max_rounds=rounds, **options)  # pyright: ignore[reportArgumentType]
        yield state
