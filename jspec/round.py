"""One round: propose, verify, commit. What the engine loops over."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec import sampling, trees
from jspec.records import Record, scatter
from jspec.stops import RUNNING, Row, Stops, cut
from jspec.types import (
    Block,
    Context,
    Draft,
    Drafter,
    Forward,
    Info,
    Keys,
    LanguageModel,
    PyTree,
    Sampler,
    Verdict,
    Verifier,
)

DRAFT_STREAM, VERIFY_STREAM = 0, 1


class State(NamedTuple):
    """A generation between two rounds. Every leaf leads with B."""

    tokens: Int[Array, "B S"]
    lengths: Int[Array, " B"]  # the root is tokens[b, lengths[b] - 1]; the cache holds what is before it
    limits: Int[Array, " B"]  # the length at which the row ends
    starts: Int[Array, " B"]  # index of the first new token of this turn
    finish: Int[Array, " B"]  # index into FINISH_REASONS
    rounds: Int[Array, " B"]
    keys: Keys
    history: PyTree
    cache: PyTree
    drafter_state: PyTree
    record: PyTree = ()  # buffers [B, S, ...]; entry i belongs to token i


def make_context(params: PyTree, state: State, target: LanguageModel, sampler: Sampler) -> Context:
    """What the drafter sees of the state: finished rows have a budget of 0."""
    budget = jnp.where(state.finish == RUNNING, state.limits - state.lengths, 0)
    return Context(state.tokens, state.lengths, budget, state.history, sampler, target, params, state.cache)


def _with_side(block: Block, side: Block) -> Block:
    """The draft's block with its side rows behind it. Draft nodes see no side row."""
    batch, width = block.tokens.shape
    rows = side.tokens.shape[1]
    assert block.mask is not None
    assert side.mask is not None
    mask = jnp.concatenate(
        [
            jnp.pad(block.mask, ((0, 0), (0, 0), (0, rows))),
            jnp.broadcast_to(side.mask, (batch, rows, width + rows)),
        ],
        axis=1,
    )
    inputs = None if side.inputs is None else jnp.pad(side.inputs, ((0, 0), (width, 0), (0, 0)))
    return Block(
        jnp.concatenate([block.tokens, side.tokens], axis=1),
        jnp.concatenate([block.positions, side.positions], axis=1),
        mask,
        inputs,
    )


def verify_forward(
    context: Context,
    draft: Draft,
    ancestor_mask: Bool[Array, "B N N"],
    taps: tuple[int, ...],
    widths: tuple[int, ...],
) -> Forward:
    """The target over the draft, in the narrowest of ``widths`` that holds every valid node.

    The branches return what is new, padded to N, and never the cache: a conditional that returns a
    written cache copies it whole.
    """
    positions = (context.lengths - 1)[:, None] + trees.depths(ancestor_mask)

    def forward(width: int) -> Forward:
        block = Block(draft.tokens[:, :width], positions[:, :width], ancestor_mask[:, :width, :width])
        if draft.side is not None:
            block = _with_side(block, draft.side)
        out = context.target.extend(context.params, context.cache, block, taps=taps)
        return out._replace(logits=context.target.head(context.params, out.hidden[:, :width]))

    if len(widths) == 1:
        return forward(widths[0])
    full = jax.eval_shape(lambda: forward(widths[-1]))

    def padded(width: int) -> Forward:
        def pad(leaf: Array, like: jax.ShapeDtypeStruct) -> Array:
            return jnp.pad(
                leaf, [(0, want - have) for have, want in zip(leaf.shape, like.shape, strict=True)]
            )

        return jax.tree.map(pad, forward(width), full)

    used = draft.valid & (context.budget > 0)[:, None]
    needed = jnp.max(jnp.where(used, jnp.arange(1, draft.tokens.shape[1] + 1)[None], 1))
    branch = jnp.searchsorted(jnp.array(widths), needed)
    return jax.lax.switch(branch, [functools.partial(padded, width) for width in widths])


def _push_all(sampler: Sampler, history: PyTree, verdict: Verdict) -> PyTree:
    """The history after the emitted tokens of every row."""
    if not jax.tree.leaves(history):
        return history

    def step(depth: Array, history: PyTree) -> PyTree:
        def keep(new: Array, old: Array) -> Array:
            going = depth < verdict.num_emitted
            return jnp.where(going.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

        return jax.tree.map(keep, sampler.push(history, verdict.tokens[:, depth]), history)

    return jax.lax.fori_loop(0, verdict.num_emitted.max(), step, history)


def round(
    params: PyTree,
    state: State,
    *,
    target: LanguageModel,
    drafter: Drafter,
    verify: Verifier,
    sampler: Sampler,
    stops: Stops,
    widths: tuple[int, ...],
    record: Record | None = None,
) -> tuple[State, Info]:
    """Propose, verify, commit: every running row emits at least one token (or ends as `nan`).

    A pure function of arrays, to be called inside a trace. Finished rows keep their state.
    """
    method = drafter.method
    context = make_context(params, state, target, sampler)
    keys = sampling.fold(state.keys, state.rounds)

    draft, drafter_state = method.propose(
        drafter.params, state.drafter_state, context, sampling.fold(keys, DRAFT_STREAM)
    )
    ancestor_mask = trees.ancestors(draft.parents)
    # A node at depth d is emitted as token d - 1 and followed by one more, so depth < budget is of use.
    useful = trees.depths(ancestor_mask) < jnp.maximum(context.budget, 1)[:, None]
    draft = draft._replace(valid=draft.valid & useful)

    forward = verify_forward(context, draft, ancestor_mask, method.taps, widths)
    logits = forward.logits
    assert logits is not None
    verdict = verify.rule(
        sampler, state.history, logits, draft, method.depth, sampling.fold(keys, VERIFY_STREAM)
    )
    broken = ~jnp.isfinite(logits.max(-1))
    row = Row(state.tokens, state.lengths, state.limits, state.starts, state.finish)
    broken = jnp.take_along_axis(broken, verdict.path, axis=1) | (verdict.tokens < 0)
    verdict, tokens, finish = cut(stops, row, verdict, broken)
    info = Info(draft, verdict, forward)
    new = State(
        tokens=tokens,
        lengths=state.lengths + verdict.num_emitted,
        limits=state.limits,
        starts=state.starts,
        finish=finish,
        rounds=state.rounds + (state.finish == RUNNING).astype(jnp.int32),
        keys=state.keys,
        history=_push_all(sampler, state.history, verdict),
        drafter_state=method.update(drafter.params, drafter_state, context, draft, verdict, forward),
        cache=target.commit(state.cache, forward.rows, verdict.path, verdict.num_emitted),
        record=state.record
        if record is None
        else scatter(state.record, state.lengths, verdict, record(info)),
    )
    return new, info
