"""The router: every row takes the arm that is its own; the second one is asked only where it is needed."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import drafters, sampling, verify
from jspec.drafters.common import chain, root
from jspec.types import Context, Draft, Drafter, Method, Prompt

V = 12
COPIED = [1, 2, 3, 4, 1, 2]  # its end occurred before: 3 4 1 2 follow
FRESH = [5, 6, 7, 8, 9, 10]


def init(params, prompt, capacity, target):
    return jnp.zeros_like(prompt.lengths)


def propose(params, state, context, keys):
    """Two children of the root, drawn; the state counts the calls."""
    batch = context.lengths.shape[0]
    tokens = jnp.concatenate([root(context)[:, None], jnp.broadcast_to(params[None], (batch, 2))], axis=1)
    parents = jnp.broadcast_to(jnp.array([[-1, 0, 0]]), (batch, 3))
    laws = jnp.full((batch, 1, V), 1 / V)
    return Draft(
        tokens, parents, jnp.ones((batch, 3), bool), laws, jnp.array([[-1, 0, 0]] * batch)
    ), state + 1


def update(params, state, context, draft, verdict, forward):
    return state + 100


PAIR = Drafter(jnp.array([10, 11]), Method(init, propose, update, width=3, depth=1, taps=(2,), draws="iid"))


def run(drafter, rows, budget=None):
    tokens = jnp.asarray(rows, jnp.int32)
    lengths = jnp.full(len(rows), tokens.shape[1], jnp.int32)
    budget = jnp.full(len(rows), 9) if budget is None else jnp.asarray(budget)
    context = Context(tokens, lengths, budget, (), *[None] * 4)
    state = drafter.method.init(drafter.params, Prompt(tokens, lengths), 16, None)
    keys = sampling.row_keys(jnp.arange(len(rows)))
    return drafter.method.propose(drafter.params, state, context, keys)


def test_each_row_takes_its_own_arm():
    both = drafters.router(drafters.suffix(4), PAIR, 2)
    assert (both.method.width, both.method.depth, both.method.taps, both.method.draws) == (
        6,
        4,
        (2,),
        "mixed",
    )
    draft, state = run(both, [COPIED, FRESH])
    assert draft.tokens[0, :5].tolist() == [2, 3, 4, 1, 2]
    assert draft.parents[0, :5].tolist() == [-1, 0, 1, 2, 3]
    assert draft.valid.tolist() == [[True] * 5 + [False], [True] * 3 + [False] * 3]
    assert draft.tokens[1, :3].tolist() == [10, 10, 11]
    assert draft.parents[1, :3].tolist() == [-1, 0, 0]
    # Laws belong to what was drawn; a copied token was chosen.
    assert draft.law.tolist() == [[-1] * 6, [-1, 0, 0, -1, -1, -1]]
    assert state.second.tolist() == [1, 1]
    assert (np.asarray(draft.parents) < np.arange(6)).all()


def test_the_second_arm_is_asked_only_where_it_is_needed():
    both = drafters.router(drafters.suffix(4), PAIR, 2)
    draft, state = run(both, [COPIED, COPIED])
    assert state.second.tolist() == [0, 0]
    assert draft.valid.sum(1).tolist() == [5, 5]
    _, state = run(both, [COPIED, FRESH], budget=[9, 0])  # a finished row needs nothing
    assert state.second.tolist() == [0, 0]
    draft, state = run(drafters.router(drafters.suffix(4), PAIR, 5), [COPIED])
    assert state.second.tolist() == [1]
    assert draft.tokens[0, :3].tolist() == [2, 10, 11]


def test_a_row_with_a_draft_is_a_finished_one_to_the_second_arm():
    """Whoever stands beside it: a wrapper that follows acceptance must not judge what it did not draft."""
    adaptive = drafters.heuristic(Drafter(PAIR.params, PAIR.method._replace(depth=3)), 2)
    both = drafters.router(drafters.suffix(4), adaptive, 2)
    _, alone = run(both, [COPIED])
    _, together = run(both, [COPIED, FRESH])
    assert alone.second.offered[0] == together.second.offered[0] == 0
    assert together.second.offered[1] > 0


def test_rules_for_one_kind_of_children_are_refused():
    """Copied siblings are chosen, drawn ones are not: a rule for the one would be biased on the other."""
    both = drafters.router(drafters.suffix(4, num_nodes=6), PAIR)
    with pytest.raises(ValueError, match="kseq"):
        verify.resolve(both.method, verify.kseq())


def test_laws_by_parent_stay_those_of_the_parents():
    def propose_chain(params, state, context, keys):
        laws = jnp.full((context.lengths.shape[0], 2, V), 1 / V)
        tokens = jnp.broadcast_to(params[None], (context.lengths.shape[0], 2))
        return chain(root(context), tokens, tokens > 0, laws), state

    method = PAIR.method._replace(propose=propose_chain, width=3, depth=2)
    draft, _ = run(drafters.router(drafters.suffix(4), Drafter(PAIR.params, method)), [COPIED, FRESH])
    assert draft.law.tolist() == [[-1] * 5, [-1, 0, 1, -1, -1]]


def test_both_arms_learn():
    both = drafters.router(drafters.suffix(4), PAIR)
    _, state = run(both, [COPIED])
    after = both.method.update(both.params, state, None, None, None, None)
    assert after.second.tolist() == [100]


def test_what_cannot_be_routed():
    suffix = drafters.suffix(4)
    with pytest.raises(ValueError, match="min_tokens: expected a whole number >= 1, got 0"):
        drafters.router(suffix, PAIR, 0)
    with pytest.raises(ValueError, match="first: expected a drafter whose tokens are chosen, got 'iid'"):
        drafters.router(PAIR, suffix)
    with pytest.raises(ValueError, match="second: expected a drafter without rows beside its draft, got"):
        drafters.router(suffix, drafters.lookahead(window=3, ngram=3, guesses=2))
