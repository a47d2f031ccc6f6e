"""What to keep of every round, one entry per emitted token.

A record function maps a round's `Info` to arrays [B, R, ...]; the engine scatters them to the positions of
the emitted tokens. Statistics, log-probabilities, feature caches and distillation data are all this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jspec import trees
from jspec.types import Info, PyTree, Verdict

Record = Callable[[Info], PyTree]
OUTSIDE = np.iinfo(np.int32).max  # a slot that no buffer has: the write is dropped


class Statistics(NamedTuple):
    """Per emitted token, from which every acceptance figure follows."""

    offset: Int[Array, "B R"]  # index within its round; 0 opens a round
    accepted: Bool[Array, "B R"]  # a draft token; False: recovered or bonus
    proposed: Int[Array, "B R"]  # depth of the draft that its round verified


def statistics(info: Info) -> Statistics:
    """The record behind mean accepted length and acceptance by position."""
    shape = info.verdict.tokens.shape
    offset = jnp.broadcast_to(jnp.arange(shape[1], dtype=jnp.int32)[None], shape)
    depths = trees.depths(trees.ancestors(info.draft.parents))
    proposed = jnp.max(jnp.where(info.draft.valid, depths, 0), axis=1)
    return Statistics(
        offset, offset < info.verdict.num_accepted[:, None], jnp.broadcast_to(proposed[:, None], shape)
    )


def logprobs(info: Info) -> Float[Array, "B R"]:
    """Natural log-probability of each emitted token under the target's raw logits (before penalties,
    temperature and filters), as plain teacher-forced scoring of the text gives it."""
    assert info.forward.logits is not None
    rows = jnp.take_along_axis(info.forward.logits, info.verdict.path[:, :, None], axis=1)
    chosen = jnp.take_along_axis(rows, info.verdict.tokens[:, :, None], axis=2)[:, :, 0]
    return chosen - jax.nn.logsumexp(rows, axis=-1)


@functools.cache
def records(**functions: Record) -> Record:
    """Several record functions as one that returns a dict; equal for equal functions."""
    return lambda info: {name: function(info) for name, function in functions.items()}


def scatter(buffers: PyTree, lengths: Int[Array, " B"], verdict: Verdict, values: PyTree) -> PyTree:
    """``values`` [B, R, ...] written into ``buffers`` [B, S, ...] at the positions of the emitted tokens."""
    depth = jnp.arange(verdict.tokens.shape[1])[None]
    slots = jnp.where(depth < verdict.num_emitted[:, None], lengths[:, None] + depth, OUTSIDE)
    put = jax.vmap(lambda buffer, new, at: buffer.at[at].set(new, mode="drop"))
    return jax.tree.map(lambda buffer, new: put(buffer, new, slots), buffers, values)
