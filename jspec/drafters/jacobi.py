"""Jacobi and lookahead decoding: the target's guesses about places it has not reached yet.

A forward over a wrong guess still predicts something at every later place, and iterating that is a
Jacobi iteration for the greedy continuation. `jacobi` drafts the newest iterate itself; `lookahead` runs
the iteration in rows of its own beside the draft, and collects the n-grams that its trajectories spell.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec import sampling
from jspec.checks import at_least
from jspec.drafters.common import (
    chain,
    merge_branches,
    move_to_front,
    read_rows,
    root,
    take,
    write_rows,
)
from jspec.types import Block, Context, Draft, Drafter, Forward, Keys, LanguageModel, Method, Prompt, Verdict

# --- Jacobi -------------------------------------------------------------------------------------------


@functools.cache
def _jacobi(num_tokens: int) -> Method:
    def init(params: tuple[()], prompt: Prompt, capacity: int, target: LanguageModel) -> Int[Array, "B D"]:
        index = prompt.lengths[:, None] - num_tokens + jnp.arange(num_tokens)[None]
        return take(prompt.tokens, index % prompt.lengths[:, None])

    def propose(
        params: tuple[()], guesses: Int[Array, "B D"], context: Context, keys: Keys
    ) -> tuple[Draft, Int[Array, "B D"]]:
        return chain(root(context), guesses, jnp.ones_like(guesses, bool)), guesses

    def update(
        params: tuple[()],
        guesses: Int[Array, "B D"],
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> Int[Array, "B D"]:
        if forward.logits is None:
            return guesses
        width = draft.tokens.shape[1]
        predicted = sampling.argmax(forward.logits)
        # The last emitted token follows node `path[num_emitted - 1]`; guesses are what was predicted after
        # the nodes behind it, and the last prediction again where these run out.
        node = take(verdict.path, verdict.num_emitted[:, None] - 1) + 1 + jnp.arange(num_tokens)[None]
        last = jnp.max(jnp.where(draft.valid, jnp.arange(width)[None], 0), axis=1)
        new = take(predicted, jnp.minimum(node, last[:, None]))
        return jnp.where((verdict.num_emitted > 0)[:, None], new, guesses)

    return Method(init, propose, update, width=num_tokens + 1, depth=num_tokens)


def jacobi(num_tokens: int = 5) -> Drafter:
    """Draft the target's own guesses of the round before, moved on by what was emitted.

    Lossless in law with any lossless rule: tokens are chosen. No weights. With y the target's most likely
    token, the guess at place t of iteration i + 1 is y(text, guesses before t of iteration i). The first
    guesses are the last ``num_tokens`` tokens of the prompt, repeated where it is shorter (an
    encoder-decoder's start token: its source is not read).

    On models that were not trained for it this hardly saves a round, as few guesses come right in time; it
    is the baseline of consistency models and of `lookahead`.

    Raises:
      ValueError: ``num_tokens`` < 1.

    >>> jacobi(3).method.width
    4

    Reference: Santilli et al. 2023, arXiv 2305.10427, algorithm 1, with a window that moves on with the
    accepted tokens in place of fixed blocks.
    """
    at_least(1, num_tokens=num_tokens)
    return Drafter((), _jacobi(num_tokens))


# --- lookahead ----------------------------------------------------------------------------------------


class LookaheadState(NamedTuple):
    """Window and pool. With p the place of the root, column i of level l is a guess of place p + l + i."""

    window: Int[Array, "B L W"]  # L = n - 1 levels, the newest last; column 0 of level 0 is the root's
    pool: Int[Array, "B V G L"]  # what came after a token, newest first; -1: nothing yet
    age: Int[Array, " B"]  # rounds, up to those after which the window holds no prompt tokens any more


def _side_mask(window: int, levels: int, width: int) -> np.ndarray:
    """``[M, N + M]``: what each window row sees of the draft (only its root) and of the window.

    Row (l, i) sees level 0 up to column i, and column i of the levels 1 to l. For W = 3 columns and L = 2
    levels, rows and columns in the order 01 02 10 11 12 (level, column), r the root::

             r  01 02 10 11 12
        01   1  1
        02   1  1  1
        10   1        1
        11   1  1        1
        12   1  1  1        1
    """
    rows = [(level, column) for level in range(levels) for column in range(window)][1:]
    mask = np.zeros((len(rows), width + len(rows)), bool)
    mask[:, 0] = True
    for i, (level, column) in enumerate(rows):
        for j, (other_level, other_column) in enumerate(rows):
            early = other_level == 0 and other_column <= column
            mask[i, width + j] = early or (other_column == column and other_level <= level)
    return mask


@functools.cache
def _lookahead(window: int, ngram: int, guesses: int) -> Method:
    levels = ngram - 1
    width, side = 1 + guesses * levels, levels * window - 1
    mask = _side_mask(window, levels, width)
    offset = np.add.outer(np.arange(levels), np.arange(window)).reshape(-1)[1:]

    def insert(
        pool: Int[Array, "B V G L"], key: Int[Array, " B"], ngram: Int[Array, "B L"]
    ) -> Int[Array, "B V G L"]:
        """The n-gram as the newest of its key; a key of V or more inserts nothing."""
        rows = jax.vmap(move_to_front)(read_rows(pool, key), ngram)
        return write_rows(pool, key[:, None], rows[:, None])

    def init(params: tuple[()], prompt: Prompt, capacity: int, target: LanguageModel) -> LookaheadState:
        batch, vocab_size = prompt.lengths.shape[0], target.config.vocab_size
        index = jnp.arange(levels)[:, None] + jnp.arange(window)[None]
        index = index.reshape(1, -1) % prompt.lengths[:, None]
        return LookaheadState(
            take(prompt.tokens, index).reshape(batch, levels, window),
            jnp.full((batch, vocab_size, guesses, levels), -1, jnp.int32),
            jnp.zeros(batch, jnp.int32),
        )

    def propose(
        params: tuple[()], state: LookaheadState, context: Context, keys: Keys
    ) -> tuple[Draft, LookaheadState]:
        batch = context.lengths.shape[0]
        branches = read_rows(state.pool, root(context))
        known = branches >= 0
        votes = jnp.ones((batch, guesses), jnp.int32)
        draft, _ = merge_branches(root(context), jnp.maximum(branches, 0), known, votes, width)
        tokens = state.window.reshape(batch, -1)[:, 1:]
        positions = (context.lengths - 1)[:, None] + jnp.asarray(offset, jnp.int32)[None]
        seen = jnp.broadcast_to(jnp.asarray(mask)[None], (batch, *mask.shape))
        return draft._replace(side=Block(tokens, positions, seen)), state

    def update(
        params: tuple[()],
        state: LookaheadState,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> LookaheadState:
        if forward.logits is None:
            return state._replace(pool=learn_text(state.pool, context, verdict))
        if draft.side is None:  # another drafter's round, in which the window did not run
            return state
        active = verdict.num_emitted > 0
        newest = sampling.argmax(context.target.head(context.params, forward.hidden[:, -window:]))
        first = state.window.at[:, 0, 0].set(root(context))
        full = jnp.concatenate([first, newest[:, None]], axis=1)
        # Before that age the columns hold the prompt's tokens, and spell no n-gram of the target's.
        ready = active & (state.age >= levels - 1)

        def learn(i: Int[Array, ""], pool: Int[Array, "B V G L"]) -> Int[Array, "B V G L"]:
            column = full[:, :, window - 1 - i]  # the nearest place last, as the newest
            return insert(pool, jnp.where(ready, column[:, 0], pool.shape[1]), column[:, 1:])

        return LookaheadState(
            jnp.where(active[:, None, None], full[:, 1:], state.window),
            jax.lax.fori_loop(0, window, learn, state.pool),
            jnp.minimum(state.age + active.astype(jnp.int32), levels - 1),
        )

    def learn_text(pool: Int[Array, "B V G L"], context: Context, verdict: Verdict) -> Int[Array, "B V G L"]:
        """The prompt's n-grams, each when its last token turns up as a next token."""

        def learn(t: Int[Array, ""], pool: Int[Array, "B V G L"]) -> Int[Array, "B V G L"]:
            start = context.lengths + t - levels
            tokens = take(context.tokens, start[:, None] + jnp.arange(ngram)[None])
            whole = (t < verdict.num_emitted) & (start >= 0)
            return insert(pool, jnp.where(whole, tokens[:, 0], pool.shape[1]), tokens[:, 1:])

        return jax.lax.fori_loop(0, verdict.num_emitted.max(), learn, pool)

    return Method(init, propose, update, width=width, depth=levels, side=side)


def lookahead(window: int = 7, ngram: int = 5, guesses: int = 7) -> Drafter:
    """Draft n-grams that the target's own Jacobi trajectories have spelled.

    Lossless in law with any lossless rule: tokens are chosen. No weights. Beside the draft runs a window of
    ``ngram - 1`` levels of ``window`` guesses, whose rows are never committed. Each round predicts a new
    level on top of it; every column then spells an n-gram, from the oldest guess to the newest, which
    goes into the pool under its first token, and the oldest level drops out. The draft is the tree of the
    ``guesses`` newest n-grams in the pool of the root::

        forward width = 1 + guesses * (ngram - 1) + (ngram - 1) * window - 1

    The window starts with the prompt's first tokens, and the pool with all the n-grams of the prompt, so
    the same prompt always gives the same rounds. (The original starts from random tokens of the prompt.) An
    encoder-decoder's source is not read, only its decoder's tokens.

    Args:
      window, ngram, guesses: W, N and G of the paper; the defaults are the original's for a 7B model. The
        pool takes [B, V, guesses, ngram - 1] int32, 5.5 MB a row at V = 49,152.

    Raises:
      ValueError: a number out of range (``ngram`` from 3, the others from 1).

    >>> method = lookahead(window=5, ngram=4, guesses=3).method
    >>> method.width, method.side
    (10, 14)

    Reference: Fu et al. 2024, arXiv 2402.02057, algorithm 2.
    """
    at_least(1, window=window, guesses=guesses)
    at_least(3, ngram=ngram)
    return Drafter((), _lookahead(window, ngram, guesses))
