import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import engine, sampling, testing, verify
from jspec.drafters.jacobi import LookaheadState, _side_mask, jacobi, lookahead
from jspec.drafters.plain import plain
from jspec.types import Context, Draft, Forward, Prompt, Verdict

V, S = 7, 24
W, N, G = 4, 4, 3  # window, n-gram, guesses
TARGET = testing.table_lm(np.eye(V))[0]
LOOKAHEAD, JACOBI = lookahead(W, N, G), jacobi(3)


def read_off(params, hidden):
    """The head of a target whose hidden states are its logits."""
    return hidden


HEAD = TARGET._replace(head=read_off)


def context_of(tokens, lengths):
    return Context(tokens, lengths, jnp.full_like(lengths, 99), (), None, HEAD, None, None)


@functools.partial(jax.jit, static_argnames="method")
def propose(state, tokens, lengths, *, method):
    return method.propose((), state, context_of(tokens, lengths), None)[0]


@functools.partial(jax.jit, static_argnames="method")
def update(state, tokens, lengths, draft, verdict, logits, *, method):
    """``logits`` of the draft's nodes and of its side rows."""
    hidden = jnp.zeros((*draft.tokens.shape, 1)) if logits is None else logits
    nodes = None if logits is None else logits[:, : draft.tokens.shape[1]]
    forward = Forward(hidden, {}, (), nodes)
    return method.update((), state, context_of(tokens, lengths), draft, verdict, forward)


def prompts(batch=4, seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.array([1, S, *rng.integers(2, S, batch)])[:batch]
    return jnp.array(rng.integers(0, V, (batch, S)), jnp.int32), jnp.array(lengths, jnp.int32)


def absorb(tokens, lengths, chunk, method):
    """What the engine does with a prompt: all but its last token, in chunks, as a forced chain."""
    state = method.init((), Prompt(tokens, lengths), S, TARGET)
    for base in range(0, int(lengths.max()), chunk):
        at = jnp.minimum(base, lengths - 1)
        count = jnp.clip(lengths - 1 - at, 0, chunk)
        path = jnp.broadcast_to(jnp.arange(chunk)[None], (len(lengths), chunk))
        index = jnp.minimum(at[:, None] + path, S - 2)
        draft = Draft(jnp.take_along_axis(tokens, index, 1), path - 1, path < jnp.maximum(count, 1)[:, None])
        verdict = Verdict(path, jnp.maximum(count - 1, 0), jnp.take_along_axis(tokens, index + 1, 1), count)
        state = update(state, tokens, at + 1, draft, verdict, None, method=method)
    return state


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def verdict_of(accepted, depth, active=True):
    """A chain's verdict, which keeps its first ``accepted`` drafts."""
    accepted = jnp.array(accepted)
    path = jnp.broadcast_to(jnp.arange(depth + 1)[None], (len(accepted), depth + 1))
    return Verdict(path, accepted, path * 0, jnp.where(active, accepted + 1, 0))


# --- Jacobi -------------------------------------------------------------------------------------------


def test_first_guesses_come_from_the_prompt():
    tokens = jnp.array([[1, 2, 3, 4, 5], [1, 2, 0, 0, 0], [6, 0, 0, 0, 0]])
    lengths = jnp.array([5, 2, 1])
    state = JACOBI.method.init((), Prompt(tokens, lengths), 5, TARGET)
    assert state.tolist() == [[3, 4, 5], [2, 1, 2], [6, 6, 6]]
    draft = propose(state, tokens, lengths, method=JACOBI.method)
    assert draft.tokens.tolist() == [[5, 3, 4, 5], [2, 2, 1, 2], [6, 6, 6, 6]]
    assert draft.valid.all()
    equal(absorb(tokens, lengths, 2, JACOBI.method), state)


def test_guesses_move_on_with_what_was_emitted():
    # After node i the target would say i + 2: accepting a drafts, the last token emitted is a + 2.
    logits = jnp.broadcast_to(jnp.eye(V)[None, 2:6], (5, 4, V))
    tokens, lengths = prompts(5)
    state = jnp.zeros((5, 3), jnp.int32)
    draft = propose(state, tokens, lengths, method=JACOBI.method)
    active = jnp.array([True, True, True, True, False])
    verdict = verdict_of([0, 1, 2, 3, 1], 3, active)
    state = update(state, tokens, lengths, draft, verdict, logits, method=JACOBI.method)
    assert state.tolist() == [[3, 4, 5], [4, 5, 5], [5, 5, 5], [5, 5, 5], [0, 0, 0]]


def test_jacobi_stops_at_the_last_valid_node():
    logits = jnp.eye(V)[None, 2:6]
    tokens, lengths = prompts(1)
    draft = propose(jnp.zeros((1, 3), jnp.int32), tokens, lengths, method=JACOBI.method)
    draft = draft._replace(valid=jnp.array([[True, True, True, False]]))
    verdict = verdict_of([0], 3)
    state = update(
        jnp.zeros((1, 3), jnp.int32), tokens, lengths, draft, verdict, logits, method=JACOBI.method
    )
    assert state.tolist() == [[3, 4, 4]]


def test_jacobi_reaches_the_fixed_point_of_a_model_that_sees_places_only():
    """Where the next token does not depend on the guess before it, one iteration finds all of them."""
    text = jnp.arange(S, dtype=jnp.int32)[None] % V
    state = JACOBI.method.init((), Prompt(text * 0 + 6, jnp.array([5])), S, TARGET)
    accepted = []
    lengths = jnp.array([5])
    for _ in range(4):
        draft = propose(state, text, lengths, method=JACOBI.method)
        places = lengths[0] + jnp.arange(4)  # node i predicts place lengths + i
        logits = jnp.eye(V)[places % V][None]
        right = draft.tokens[0, 1:] == places[:3] % V
        accepted.append(int(jnp.cumprod(right.astype(jnp.int32)).sum()))
        verdict = verdict_of(accepted[-1:], 3)
        state = update(state, text, lengths, draft, verdict, logits, method=JACOBI.method)
        lengths = lengths + verdict.num_emitted
    assert accepted[0] == 0
    assert accepted[1] == 3


# --- lookahead ----------------------------------------------------------------------------------------


def seen_in_figure(level, column, other_level, other_column):
    """The rule in words: level 0 up to my column, then down my own column to myself."""
    if other_level == 0:
        return other_column <= column
    return other_column == column and other_level <= level


@pytest.mark.parametrize(("window", "levels", "width"), [(3, 2, 1), (5, 3, 10), (1, 2, 4)])
def test_window_mask(window, levels, width):
    mask = _side_mask(window, levels, width)
    places = list(itertools.product(range(levels), range(window)))[1:]
    assert mask.shape == (len(places), width + len(places))
    assert mask[:, 0].all()
    assert not mask[:, 1:width].any()
    for i, (level, column) in enumerate(places):
        assert mask[i, width:].tolist() == [seen_in_figure(level, column, *other) for other in places]
        # Each row sees one row, or the root, at every place between the root's and its own.
        assert sorted(a + b for (a, b), sees in zip(places, mask[i, width:], strict=True) if sees) == list(
            range(1, level + column + 1)
        )


def branches(pool_of_key):
    return [tuple(row) for row in np.asarray(pool_of_key).tolist() if row[0] >= 0]


def test_pool_holds_the_prompts_ngrams():
    tokens, lengths = prompts()
    state = absorb(tokens, lengths, 5, LOOKAHEAD.method)
    for b in range(len(lengths)):
        text = np.asarray(tokens[b, : lengths[b]]).tolist()
        wanted = {}
        for i in range(len(text) - N + 1):
            rows = wanted.setdefault(text[i], [])
            ngram = tuple(text[i + 1 : i + N])
            rows[:] = [ngram, *[row for row in rows if row != ngram]][:G]
        for key in range(V):
            assert branches(state.pool[b, key]) == wanted.get(key, [])
    assert (state.age == 0).all()


@pytest.mark.parametrize("drafter", [JACOBI, LOOKAHEAD])
def test_chunks_of_a_prompt_do_not_matter(drafter):
    tokens, lengths = prompts()
    whole = absorb(tokens, lengths, S, drafter.method)
    for chunk in (1, 4, 7):
        equal(absorb(tokens, lengths, chunk, drafter.method), whole)


def test_draft_is_the_tree_of_the_roots_ngrams():
    tokens, lengths = jnp.array([[2, 5, 0]]), jnp.array([2])
    state = LOOKAHEAD.method.init((), Prompt(tokens, lengths), 3, TARGET)
    pool = state.pool.at[0, 5].set(jnp.array([[1, 2, 3], [1, 4, 3], [-1, -1, -1]]))
    draft = propose(state._replace(pool=pool), tokens, lengths, method=LOOKAHEAD.method)
    assert draft.valid[0].sum() == 6
    paths = [()]
    for i in range(1, 6):
        paths.append((*paths[draft.parents[0, i]], int(draft.tokens[0, i])))
    assert set(paths[1:]) == {(1,), (1, 2), (1, 4), (1, 2, 3), (1, 4, 3)}
    assert draft.tokens[0, :4].tolist() == [5, 1, 2, 4]
    assert draft.tokens.shape == (1, 1 + G * (N - 1))
    nothing = propose(state, tokens, lengths, method=LOOKAHEAD.method)
    assert nothing.valid.tolist() == [[True] + [False] * (G * (N - 1))]


def test_window_positions():
    tokens, lengths = prompts(1)
    state = LOOKAHEAD.method.init((), Prompt(tokens, lengths), S, TARGET)
    side = propose(state, tokens, jnp.array([9]), method=LOOKAHEAD.method).side
    assert side.positions.tolist() == [[9, 10, 11, 9, 10, 11, 12, 10, 11, 12, 13]]
    assert side.tokens.shape == (1, LOOKAHEAD.method.side) == (1, (N - 1) * W - 1)


def play(tokens, lengths, rounds, seed, finished=None):
    """Rounds with random logits, one token emitted in each: states, and what a plain program makes of it."""
    rng = np.random.default_rng(seed)
    method = LOOKAHEAD.method
    state = absorb(tokens, lengths, 6, method)
    batch = len(lengths)
    windows = np.asarray(state.window).tolist()
    pools = [{key: branches(state.pool[b, key]) for key in range(V)} for b in range(batch)]
    for r in range(rounds):
        lengths = jnp.array(rng.integers(1, S + 1, batch), jnp.int32)
        draft = propose(state, tokens, lengths, method=method)
        logits = jnp.array(rng.integers(0, 9, (batch, method.width + method.side, V)), jnp.float32)
        active = np.ones(batch, bool) if finished is None else ~finished
        verdict = verdict_of([0] * batch, method.depth, jnp.array(active))
        before = state
        state = update(state, tokens, lengths, draft, verdict, logits, method=method)
        for b in np.flatnonzero(active):
            windows[b][0][0] = int(tokens[b, lengths[b] - 1])
            windows[b].append(np.asarray(logits[b, -W:]).argmax(-1).tolist())
            if r >= N - 2:
                for column in reversed(range(W)):
                    key, *ngram = (windows[b][level][column] for level in range(N))
                    rest = [row for row in pools[b][key] if row != tuple(ngram)]
                    pools[b][key] = [tuple(ngram), *rest][:G]
            del windows[b][0]
        for b in np.flatnonzero(~active):
            equal(jax.tree.map(lambda x, b=b: x[b], state), jax.tree.map(lambda x, b=b: x[b], before))
    return state, windows, pools


def test_window_and_pool_equal_their_reference():
    tokens, lengths = prompts()
    state, windows, pools = play(tokens, lengths, 9, 1, np.array([False, False, True, False]))
    assert state.window.tolist() == windows
    for b, pool in enumerate(pools):
        assert {key: branches(state.pool[b, key]) for key in range(V)} == pool
    assert state.age.tolist() == [N - 2, N - 2, 0, N - 2]


@pytest.mark.parametrize("drafter", [JACOBI, LOOKAHEAD])
def test_a_row_does_not_see_its_neighbours_or_its_padding(drafter):
    method = drafter.method
    rng = np.random.default_rng(2)
    tokens, lengths = prompts()
    state = absorb(tokens, lengths, 6, method)
    if isinstance(state, LookaheadState):
        state = state._replace(age=state.age + N - 1)
    draft = propose(state, tokens, lengths, method=method)
    logits = jnp.array(rng.normal(size=(4, method.width + method.side, V)), jnp.float32)
    verdict = verdict_of([0, 1, 2, 1], method.depth)
    after = update(state, tokens, lengths, draft, verdict, logits, method=method)
    for b in range(4):
        pick = functools.partial(jax.tree.map, lambda x, b=b: x[b : b + 1])
        garbage = jnp.where(jnp.arange(S)[None] < lengths[b], tokens[b : b + 1], 3)
        alone = absorb(garbage, lengths[b : b + 1], 6, method)
        if isinstance(alone, LookaheadState):
            alone = alone._replace(age=alone.age + N - 1)
        equal(alone, pick(state))
        equal(propose(alone, garbage, lengths[b : b + 1], method=method), pick(draft))
        args = (garbage, lengths[b : b + 1], pick(draft), pick(verdict), pick(logits))
        equal(update(alone, *args, method=method), pick(after))


def test_another_drafters_round_leaves_the_window():
    tokens, lengths = prompts(2)
    state = absorb(tokens, lengths, 6, LOOKAHEAD.method)
    draft = propose(jnp.zeros((2, 3), jnp.int32), tokens, lengths, method=JACOBI.method)
    after = update(
        state, tokens, lengths, draft, verdict_of([1, 2], 3), jnp.zeros((2, 4, V)), method=LOOKAHEAD.method
    )
    equal(after, state)


def test_the_pool_is_written_in_place():
    vocab, batch = 5120, 2
    method = lookahead(3, 3, 8).method
    tokens, lengths = prompts(batch)

    @functools.partial(jax.jit, donate_argnums=0)
    def rounds(state):
        def body(i, state):
            context = context_of(tokens, lengths)
            draft, state = method.propose((), state, context, None)
            rows = jnp.concatenate([draft.tokens, draft.side.tokens], axis=1).astype(jnp.float32)
            logits = jnp.sin(rows[:, :, None] + jnp.arange(vocab, dtype=jnp.float32)[None, None])
            verdict = verdict_of([0] * batch, method.depth, logits.sum((1, 2)) < jnp.inf)
            return method.update(
                (), state, context, draft, verdict, Forward(rows[:, :, None], {}, (), logits)
            )

        return jax.lax.fori_loop(0, 9, body, state)

    state = method.init((), Prompt(tokens, lengths), S, testing.table_lm(np.eye(vocab))[0])
    memory = rounds.lower(state).compile().memory_analysis()
    logits = 4 * batch * (method.width + method.side) * vocab
    assert memory.temp_size_in_bytes < logits + state.pool.nbytes / 2


@pytest.mark.parametrize("drafter", [JACOBI, LOOKAHEAD])
def test_greedy_output_is_that_of_plain_decoding(drafter):
    target, params = testing.table_lm(np.random.default_rng(5).dirichlet(np.full(V, 0.3), V))
    tokens, lengths = prompts(3)
    outputs = []
    for each in (drafter, plain()):
        state = engine.generate(
            params,
            Prompt(tokens, lengths),
            sampling.row_keys(jnp.arange(3)),
            target=target,
            drafter=each,
            verify=verify.tree(),
            max_new_tokens=jnp.array([20, 3, 11]),
        )
        outputs.append([row[:n].tolist() for row, n in zip(state.tokens, state.lengths, strict=True)])
    assert outputs[0] == outputs[1]


# --- factories ----------------------------------------------------------------------------------------


def test_equal_settings_are_one_method():
    assert jacobi(3).method is JACOBI.method
    assert lookahead(W, N, G).method is LOOKAHEAD.method
    assert (JACOBI.method.width, JACOBI.method.depth, JACOBI.method.side) == (4, 3, 0)
    assert (LOOKAHEAD.method.width, LOOKAHEAD.method.depth) == (1 + G * (N - 1), N - 1)
    assert LOOKAHEAD.method.draws == JACOBI.method.draws == "chosen"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jacobi(0), "num_tokens: expected a whole number >= 1, got 0"),
        (lambda: jacobi(2.5), "num_tokens: expected a whole number >= 1, got 2.5"),
        (lambda: lookahead(window=0), "window: expected a whole number >= 1, got 0"),
        (lambda: lookahead(ngram=2), "ngram: expected a whole number >= 3, got 2"),
        (lambda: lookahead(guesses=0), "guesses: expected a whole number >= 1, got 0"),
    ],
)
def test_bad_settings_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
