"""Two drafters, of which every row takes one in every round."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jspec import sampling, trees
from jspec.checks import at_least, instance
from jspec.drafters.common import root
from jspec.types import (
    Context,
    Draft,
    Drafter,
    Forward,
    Keys,
    LanguageModel,
    Method,
    Prompt,
    PyTree,
    Verdict,
)


class RouterState(NamedTuple):
    """Those of both arms."""

    first: PyTree
    second: PyTree


def _widened(draft: Draft, width: int) -> Draft:
    """The draft with invalid nodes behind its own."""
    more = width - draft.tokens.shape[1]
    law = draft.law
    if draft.laws is not None and law is None:
        law = draft.parents
    return Draft(
        jnp.pad(draft.tokens, ((0, 0), (0, more))),
        jnp.pad(draft.parents, ((0, 0), (0, more))),  # children of the root: a parent precedes them
        jnp.pad(draft.valid, ((0, 0), (0, more))),
        draft.laws,
        None if law is None else jnp.pad(law, ((0, 0), (0, more)), constant_values=-1),
    )


def _choose(takes_first: Bool[Array, " B"], first: Draft, second: Draft) -> Draft:
    """Each row's own; the nodes of ``first`` are chosen ones, so its rows have no laws."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(takes_first.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    tokens, parents, valid = (pick(a, b) for a, b in zip(first[:3], second[:3], strict=True))
    if second.law is None:
        return Draft(tokens, parents, valid)
    return Draft(tokens, parents, valid, second.laws, pick(jnp.full_like(second.law, -1), second.law))


@functools.cache
def _router(first: Method, second: Method, min_tokens: int) -> Method:
    depth, width = max(first.depth, second.depth), max(first.width, second.width)
    chains = all(method.width == method.depth + 1 for method in (first, second))
    if not chains and width == depth + 1:
        width += 1  # N = depth + 1 would say that every draft is a chain

    def init(params: PyTree, prompt: Prompt, capacity: int, target: LanguageModel) -> RouterState:
        arms = zip(params, (first, second), strict=True)
        return RouterState(*(method.init(own, prompt, capacity, target) for own, method in arms))

    def propose(
        params: PyTree, state: RouterState, context: Context, keys: Keys
    ) -> tuple[Draft, RouterState]:
        draft, first_state = first.propose(params[0], state.first, context, sampling.fold(keys, 0))
        takes_first = draft.valid.sum(1) > min_tokens  # node 0 is the root

        # A row that has its draft is a finished one to the other arm, whoever stands beside it.
        left = context._replace(budget=jnp.where(takes_first, 0, context.budget))

        def ask(carry: tuple[Draft, PyTree, Array]) -> tuple[Draft, PyTree, Array]:
            found, inner = second.propose(params[1], carry[1], left, sampling.fold(keys, 1))
            return _widened(found, width), inner, jnp.bool_(False)

        needed = (left.budget > 0).any()
        shapes = jax.eval_shape(ask, (None, state.second, needed))[0]
        nothing: Draft = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        nothing = nothing._replace(
            tokens=nothing.tokens.at[:, 0].set(root(context)),
            parents=trees.chain_parents(*nothing.tokens.shape),
            valid=nothing.valid.at[:, 0].set(True),
        )
        # A loop of one step or none: a conditional would copy a cache that the second arm writes.
        drafted, second_state, _ = jax.lax.while_loop(
            lambda carry: carry[2], ask, (nothing, state.second, needed)
        )
        return _choose(takes_first, _widened(draft, width), drafted), RouterState(first_state, second_state)

    def update(
        params: PyTree,
        state: RouterState,
        context: Context,
        draft: Draft,
        verdict: Verdict,
        forward: Forward,
    ) -> RouterState:
        round_ = (context, draft, verdict, forward)
        return RouterState(
            first.update(params[0], state.first, *round_), second.update(params[1], state.second, *round_)
        )

    taps = tuple(sorted({*first.taps, *second.taps}))
    draws = "chosen" if second.draws == "chosen" else "mixed"
    return Method(init, propose, update, width=width, depth=depth, taps=taps, draws=draws)


def router(first: Drafter, second: Drafter, min_tokens: int = 1) -> Drafter:
    """Rows for which ``first`` drafts at least ``min_tokens`` tokens take them, the others ask ``second``.

    Made for a cheap arm that copies (`suffix`) before a network that foresees: text that repeats itself is
    copied further than a network looks ahead. The second arm's drafting is skipped in rounds where no row
    needs it; both learn from every round. As exact as the second arm: which arm a row takes is known before
    anything is drawn, and what the first one chooses reads no coin.

    Args:
      first: one whose tokens are chosen (``draws`` "chosen").
      second: any drafter.
      min_tokens: shorter drafts of ``first`` are not used.
    Raises:
      ValueError: a first arm that draws its tokens, an arm with rows that ride along (`lookahead`,
        `lookahead_tokens`), or ``min_tokens`` < 1; what is no drafter.

    >>> from jspec.drafters import suffix
    >>> both = router(suffix(5), suffix(3, min_match=2), min_tokens=2)
    >>> both.method.width, both.method.depth, both.method.draws
    (6, 5, 'chosen')
    """
    at_least(1, min_tokens=min_tokens)
    instance(Drafter, "a drafter of jspec.drafters", first=first, second=second)
    if first.method.draws != "chosen":
        raise ValueError(f"first: expected a drafter whose tokens are chosen, got {first.method.draws!r}")
    for name, arm in (("first", first), ("second", second)):
        if arm.method.side:
            raise ValueError(
                f"{name}: expected a drafter without rows beside its draft, got {arm.method.side}"
            )
    return Drafter((first.params, second.params), _router(first.method, second.method, min_tokens))
