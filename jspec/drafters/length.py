"""Draft length that follows the acceptance: a wrapper around any drafter."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec import trees
from jspec.checks import at_least, instance
from jspec.types import Context, Draft, Drafter, Forward, Keys, LanguageModel, Method, Prompt, PyTree, Verdict


class HeuristicState(NamedTuple):
    """The inner state, the depth allowed next, and the depth offered last."""

    inner: PyTree
    allowed: Int[Array, " B"]
    offered: Int[Array, " B"]


@functools.cache
def _heuristic(method: Method, initial: int) -> Method:
    def init(params: PyTree, prompt: Prompt, capacity: int, target: LanguageModel) -> HeuristicState:
        zeros = jnp.zeros_like(prompt.lengths)
        return HeuristicState(method.init(params, prompt, capacity, target), zeros + initial, zeros)

    def propose(
        params: PyTree, state: HeuristicState, context: Context, keys: Keys
    ) -> tuple[Draft, HeuristicState]:
        # The lower budget lets an autoregressive drafter stop its loop; the mask holds for all others.
        lowered = context._replace(budget=jnp.minimum(context.budget, state.allowed + 1))
        draft, inner = method.propose(params, state.inner, lowered, keys)
        depth = trees.depths(trees.ancestors(draft.parents))
        draft = draft._replace(valid=draft.valid & (depth <= state.allowed[:, None]))
        offered = jnp.max(jnp.where(draft.valid & (depth < context.budget[:, None]), depth, 0), axis=1)
        return draft, HeuristicState(inner, state.allowed, offered)

    def update(
        params: PyTree,
        state: HeuristicState,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> HeuristicState:
        inner = method.update(params, state.inner, context, draft, verdict, forward)
        if forward.logits is None:
            return state._replace(inner=inner)
        whole = verdict.num_accepted >= state.offered
        change = jnp.where(whole, state.allowed + 2, state.allowed - 1)
        judged = (verdict.num_emitted > 0) & (state.offered > 0)
        allowed = jnp.where(judged, jnp.clip(change, 1, method.depth), state.allowed)
        return HeuristicState(inner, allowed, jnp.where(verdict.num_emitted > 0, 0, state.offered))

    return method._replace(init=init, propose=propose, update=update)


def heuristic(drafter: Drafter, initial: int = 5) -> Drafter:
    """Drafts grow by 2 after a whole acceptance and shrink by 1 after a rejection, per row, between 1 and
    the drafter's own depth (the ``heuristic`` schedule of transformers' assisted generation, there one
    length for the whole batch).

    Keeps the exactness of the drafter: the length is fixed before the draft. A round without a draft
    changes nothing.

    Raises:
      ValueError: ``initial`` < 1, or no drafter.
    """
    at_least(1, initial=initial)
    instance(Drafter, "a drafter of jspec.drafters", drafter=drafter)
    start = min(initial, drafter.method.depth)
    return dataclasses.replace(drafter, method=_heuristic(drafter.method, start))
