import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import engine, sampling, testing, trees, verify
from jspec.drafters.common import top_k
from jspec.drafters.plain import plain
from jspec.drafters.recycling import ACCURACIES, token_recycling
from jspec.types import Context, Draft, Forward, Prompt, Verdict

V, K, S = 11, 3, 24
TREE = trees.template(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)))
DRAFTER = token_recycling(k=K, template=TREE)


def context_of(tokens, lengths):
    return Context(tokens, lengths, jnp.full_like(lengths, 99), (), *[None] * 4)


@functools.partial(jax.jit, static_argnames="method")
def propose(state, tokens, lengths, method=DRAFTER.method):
    return method.propose((), state, context_of(tokens, lengths), None)[0]


@functools.partial(jax.jit, static_argnames="method")
def update(state, tokens, lengths, draft, verdict, logits, method=DRAFTER.method):
    forward = Forward(jnp.zeros((*draft.tokens.shape, 1)), {}, (), logits)
    return method.update((), state, context_of(tokens, lengths), draft, verdict, forward)


def prompts(batch=4, seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.array([1, S, *rng.integers(2, S, batch)])[:batch]
    return jnp.array(rng.integers(0, V, (batch, S)), jnp.int32), jnp.array(lengths, jnp.int32)


def absorb(tokens, lengths, chunk, drafter=DRAFTER):
    """What the engine does with a prompt: all but its last token, in chunks, as a forced chain."""
    state = drafter.method.init((), Prompt(tokens, lengths), S, testing.table_lm(np.eye(V))[0])
    for base in range(0, int(lengths.max()), chunk):
        at = jnp.minimum(base, lengths - 1)
        count = jnp.clip(lengths - 1 - at, 0, chunk)
        path = jnp.broadcast_to(jnp.arange(chunk)[None], (len(lengths), chunk))
        index = jnp.minimum(at[:, None] + path, S - 2)
        draft = Draft(jnp.take_along_axis(tokens, index, 1), path - 1, path < jnp.maximum(count, 1)[:, None])
        verdict = Verdict(path, jnp.maximum(count - 1, 0), jnp.take_along_axis(tokens, index + 1, 1), count)
        state = update(state, tokens, at + 1, draft, verdict, None, method=drafter.method)
    return state


def some_verdict(rng, draft):
    """A random valid path for each row; the last row is finished."""
    batch, depth = draft.tokens.shape[0], TREE.depth + 1
    path, accepted = np.zeros((batch, depth), np.int32), np.zeros(batch, np.int32)
    for b in range(batch):
        node = 0
        for d in range(1, depth):
            children = np.flatnonzero((np.asarray(draft.parents[b]) == node) & np.asarray(draft.valid[b]))
            if not len(children) or rng.random() < 0.2:
                break
            node = rng.choice(children)
            path[b, d:], accepted[b] = node, d
    tokens = np.take_along_axis(np.asarray(draft.tokens), path, 1)
    tokens = np.concatenate([tokens[:, 1:], rng.integers(0, V, (batch, 1))], 1).astype(np.int32)
    emitted = np.where(np.arange(batch) == batch - 1, 0, accepted + 1)
    return Verdict(*map(jnp.array, (path, accepted, tokens, emitted.astype(np.int32))))


class Reference:
    """The same tables as dictionaries of lists."""

    def __init__(self, prompt):
        self.rows = {}
        for token, following in itertools.pairwise(prompt):
            others = [x for x in self.rows.get(token, []) if x != following]
            self.rows[token] = [following, *others][:K]

    def draft(self, root):
        tokens = [root]
        for parent, rank in zip(TREE.parents[1:], TREE.ranks[1:], strict=True):
            row = self.rows.get(tokens[parent], [])
            tokens.append(row[rank] if rank < len(row) else None)
        return tokens

    def learn(self, tokens, valid, path, accepted, logits):
        on_path = list(path[: accepted + 1])
        order = [i for i in range(len(tokens)) if i not in on_path] + on_path
        for i in order:  # the last one written stays: accepted after rejected, deeper after higher
            if valid[i]:
                self.rows[tokens[i]] = sorted(range(V), key=lambda x: (-logits[i][x], x))[:K]

    def table(self):
        table = np.full((V, K), -1)
        for token, row in self.rows.items():
            table[token, : len(row)] = row
        return table


def test_a_generation_equals_its_reference():
    rng = np.random.default_rng(0)
    tokens, lengths = prompts()
    references = [Reference(t[:n].tolist()) for t, n in zip(np.asarray(tokens), lengths, strict=True)]
    state = absorb(tokens, lengths, 5)
    for _ in range(12):
        np.testing.assert_array_equal(state, [r.table() for r in references])
        lengths = jnp.array(rng.integers(1, S + 1, len(lengths)), jnp.int32)
        draft = propose(state, tokens, lengths)
        for b, reference in enumerate(references):
            wanted = reference.draft(int(tokens[b, lengths[b] - 1]))
            assert draft.valid[b].tolist() == [token is not None for token in wanted]
            assert draft.tokens[b].tolist() == [token or 0 for token in wanted]
            assert draft.parents[b].tolist() == list(TREE.parents)
        verdict = some_verdict(rng, draft)
        logits = jnp.array(rng.integers(0, 5, (len(lengths), TREE.width, V)), jnp.float32)  # with ties
        for b, reference in enumerate(references[:-1]):
            reference.learn(
                *(np.asarray(x[b]).tolist() for x in (draft.tokens, draft.valid)),
                np.asarray(verdict.path[b]).tolist(),
                int(verdict.num_accepted[b]),
                np.asarray(logits[b]),
            )
        state = update(state, tokens, lengths, draft, verdict, logits)


def test_who_wins_among_nodes_of_one_token():
    # Root 3, then 5 5 7 and below the first 5 another 5; distinct logits name the node that was kept.
    nodes = jnp.array([[3, 5, 5, 7, 5, 0, 0, 0, 0, 0]])
    parents = jnp.array([TREE.parents])
    logits = jnp.eye(V)[None, 1:] * 9 + jnp.zeros((1, TREE.width, V))
    tokens, lengths = prompts(1)

    def kept(path, accepted, valid):
        path = jnp.array([path])
        verdict = Verdict(path, jnp.array([accepted]), jnp.zeros_like(path), jnp.array([accepted + 1]))
        draft = Draft(nodes, parents, jnp.arange(TREE.width)[None] < valid)
        empty = jnp.full((1, V, K), -1, jnp.int32)
        return int(update(empty, tokens, lengths, draft, verdict, logits)[0, 5, 0]) - 1

    assert kept([0, 0, 0, 0, 0], 0, 5) == 4  # all rejected: the last one
    assert kept([0, 2, 2, 2, 2], 1, 5) == 2  # accepted before rejected
    assert kept([0, 1, 4, 4, 4], 2, 5) == 4  # of two accepted the deeper
    assert kept([0, 1, 2, 2, 2], 1, 5) == 1  # a path goes on beyond num_accepted, and means nothing there
    assert kept([0, 0, 0, 0, 0], 0, 3) == 2  # invalid nodes teach nothing


def test_chunks_of_a_prompt_do_not_matter():
    tokens, lengths = prompts()
    whole = absorb(tokens, lengths, S)
    for chunk in (1, 4, 7):
        np.testing.assert_array_equal(absorb(tokens, lengths, chunk), whole)
    assert (whole[0] == -1).all()  # a prompt of one token has no successors
    np.testing.assert_array_equal(whole[1], Reference(np.asarray(tokens[1]).tolist()).table())


def test_a_row_does_not_see_its_neighbours_or_its_padding():
    rng = np.random.default_rng(2)
    tokens, lengths = prompts()
    state = absorb(tokens, lengths, 6)
    draft = propose(state, tokens, lengths)
    verdict = some_verdict(rng, draft)
    logits = jnp.array(rng.normal(size=(4, TREE.width, V)), jnp.float32)
    after = update(state, tokens, lengths, draft, verdict, logits)
    for b in range(4):
        pick = functools.partial(jax.tree.map, lambda x, b=b: x[b : b + 1])
        garbage = jnp.where(jnp.arange(S)[None] < lengths[b], tokens[b : b + 1], 3)
        alone = absorb(garbage, lengths[b : b + 1], 6)
        np.testing.assert_array_equal(alone, state[b : b + 1])
        for one, many in zip(propose(alone, garbage, lengths[b : b + 1])[:3], draft[:3], strict=True):
            np.testing.assert_array_equal(one, many[b : b + 1])
        new = update(alone, garbage, lengths[b : b + 1], pick(draft), pick(verdict), pick(logits))
        np.testing.assert_array_equal(new, after[b : b + 1])
    np.testing.assert_array_equal(after[-1], state[-1])  # the finished row


def test_learns_from_another_drafters_round():
    """A chain of two tokens, as a router would hand it on."""
    tokens, lengths = prompts(1)
    draft = Draft(jnp.array([[3, 4, 5]]), jnp.array([[-1, 0, 1]]), jnp.array([[True, True, False]]))
    verdict = Verdict(jnp.array([[0, 1, 2]]), jnp.array([1]), jnp.array([[4, 9, 0]]), jnp.array([2]))
    logits = jnp.broadcast_to(jnp.arange(V, dtype=jnp.float32), (1, 5, V))  # with two side rows
    state = update(jnp.full((1, V, K), -1, jnp.int32), tokens, lengths, draft, verdict, logits)
    assert state[0, 3:6].tolist() == [[10, 9, 8], [10, 9, 8], [-1, -1, -1]]


def test_the_table_is_written_in_place():
    vocab, batch = 5120, 4
    drafter = token_recycling(16)
    tokens, lengths = prompts(batch)

    @functools.partial(jax.jit, donate_argnums=0)
    def rounds(table, logits):
        def body(i, table):
            draft, table = drafter.method.propose((), table, context_of(tokens, lengths), None)
            zero = jnp.zeros((batch, drafter.method.depth + 1), jnp.int32)
            verdict = Verdict(zero, lengths * 0, zero, lengths * 0 + 1)
            forward = Forward(jnp.zeros((batch, 16, 1)), {}, (), logits)
            return drafter.method.update((), table, context_of(tokens, lengths), draft, verdict, forward)

        return jax.lax.fori_loop(0, 9, body, table)

    target = testing.table_lm(np.eye(vocab))[0]
    table = drafter.method.init((), Prompt(tokens, lengths), S, target)
    memory = rounds.lower(table, jnp.zeros((batch, 16, vocab))).compile().memory_analysis()
    assert memory.temp_size_in_bytes < table.nbytes / 2


@pytest.mark.parametrize("width", [7, 128, 2048, 2049, 3333, 4096])
def test_top_k_equals_that_of_jax(width):
    rng = np.random.default_rng(width)
    two = np.zeros((1, 1, width))
    two[..., 3 * width // 4], two[..., width // 4] = 9, 8  # the best chunk is late, and full of ties
    for values in (
        two,
        rng.normal(size=(2, 3, width)),
        rng.integers(0, 4, (2, 3, width)),
        np.zeros((1, 1, width)),
    ):
        values = jnp.array(values, jnp.float32).at[..., : width // 2].add(-jnp.inf if width == 4096 else 0)
        for mine, theirs in zip(
            jax.jit(top_k, static_argnums=1)(values, 5), jax.lax.top_k(values, 5), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
            assert mine.dtype == theirs.dtype


def test_greedy_output_is_that_of_plain_decoding():
    rng = np.random.default_rng(5)
    target, params = testing.table_lm(rng.dirichlet(np.full(V, 0.3), V))
    tokens, lengths = prompts(3)
    outputs = []
    for drafter in (token_recycling(12), plain()):
        state = engine.generate(
            params,
            Prompt(tokens, lengths),
            sampling.row_keys(jnp.arange(3)),
            target=target,
            drafter=drafter,
            verify=verify.tree(),
            max_new_tokens=jnp.array([20, 3, 11]),
        )
        outputs.append([row[:n].tolist() for row, n in zip(state.tokens, state.lengths, strict=True)])
        rounds = int(state.rounds.max())
    assert outputs[0] == outputs[1]
    assert rounds == 20  # plain; and a first-order chain is learnt after one visit of each token
    assert int(state.rounds[0]) == 20


def test_default_tree():
    method = token_recycling().method
    assert (method.width, method.draws) == (24, "chosen")
    assert token_recycling().method is token_recycling(24).method
    assert token_recycling(24) == token_recycling(template=trees.grow(ACCURACIES, 24))
    assert token_recycling(9, k=2).method.width == 9


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: token_recycling(1), "num_nodes: expected a whole number >= 2, got 1"),
        (lambda: token_recycling(k=0), "k: expected a whole number >= 1, got 0"),
        (lambda: token_recycling(k=2, template=TREE), "template: expected ranks below k = 2, got 2"),
        (lambda: token_recycling(24, k=1), "num_nodes: expected at most 9 with k = 1, got 24"),
    ],
)
def test_bad_settings_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
