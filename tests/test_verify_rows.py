"""Acceptance rules with real random numbers: rows, greedy decoding, compilation, arguments."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import FAST_COMPILE
from test_verify import LOSSLESS, RULES

from jspec import sampling, trees, verify
from jspec.types import Draft, Method, Verdict, Verifier
from jspec.verify import base
from jspec.verify.token import _at_once, _in_turn

# One shape for all, so that each rule compiles once.
BATCH, WIDTH, VOCAB = 24, 6, 3


@functools.partial(jax.jit, static_argnames="depth", compiler_options=FAST_COMPILE)
def run(verifier: Verifier, sampler, history, logits, draft: Draft, keys, depth: int = WIDTH - 1) -> Verdict:
    return verifier.rule(sampler, history, logits, draft, depth, keys)


def random_draft(seed: int, chained: bool, laws: bool = True) -> tuple[jax.Array, Draft]:
    """Logits [B, N, V] and drafts whose shape differs from row to row."""
    rng = np.random.default_rng(seed)
    rows = np.arange(BATCH)
    parents = np.stack([[-1, *(rng.integers(0, i) for i in range(1, WIDTH))] for _ in rows]).astype(np.int32)
    if chained:
        parents = np.broadcast_to(np.arange(WIDTH, dtype=np.int32) - 1, (BATCH, WIDTH))
    valid = rng.random((BATCH, WIDTH)) < 0.85
    valid[:, 0] = True
    for i in range(1, WIDTH):
        valid[:, i] &= valid[rows, parents[:, i]]
    draft = Draft(
        jnp.asarray(rng.integers(0, VOCAB, (BATCH, WIDTH)), jnp.int32),
        jnp.asarray(parents),
        jnp.asarray(valid),
        jnp.asarray(rng.dirichlet(np.ones(VOCAB), (BATCH, WIDTH)), jnp.float32) if laws else None,
    )
    return jnp.asarray(rng.normal(size=(BATCH, WIDTH, VOCAB)) * 2, jnp.float32), draft


def penalized(temperature: jax.Array, repetition: float = 1.3) -> tuple[sampling.Sampler, object]:
    one = jnp.ones(BATCH)
    penalty = sampling.penalties(VOCAB, repetition * one, 0 * one, 0 * one)
    sampler = sampling.sampler(sampling.Settings(temperature, top_p=0.9 * one), [penalty])
    return sampler, sampler.init(jnp.zeros((BATCH, 1), jnp.int32), jnp.ones(BATCH, jnp.int32))


@pytest.mark.parametrize("name", RULES)
def test_rows_do_not_influence_each_other(name):
    """Row by row the same whatever the order of the rows, and whatever stands in the others (NaN too)."""
    logits, draft = random_draft(11, chained=RULES[name].chain)
    sampler, history = penalized(jnp.where(jnp.arange(BATCH) % 3 == 0, 0.0, 0.7))
    keys = sampling.row_keys(jnp.arange(BATCH))
    rows = (sampler, history, logits, draft, keys)
    verdict = run(RULES[name].make(), *rows)
    assert len(set(verdict.num_accepted.tolist())) > 2

    order = np.random.default_rng(0).permutation(BATCH)
    moved = run(RULES[name].make(), *jax.tree.map(lambda x: x[order], rows))
    other_logits, other_draft = random_draft(12, chained=RULES[name].chain)
    own = jnp.arange(BATCH) % 2 == 0

    def keep(mine: jax.Array, theirs: jax.Array) -> jax.Array:
        return jnp.where(jnp.expand_dims(own, tuple(range(1, mine.ndim))), mine, theirs)

    others = (keep(logits, other_logits * jnp.nan), jax.tree.map(keep, draft, other_draft))
    changed = run(RULES[name].make(), sampler, history, *others, keys)
    for before, after, beside in zip(verdict, moved, changed, strict=True):
        assert np.array_equal(before[order], after)
        assert np.array_equal(before[own], beside[own])


@pytest.mark.parametrize("kind", ["chain", "chosen", "iid"])
def test_greedy_follows_the_argmax(kind):
    """Every lossless rule at temperature 0 against a plain loop."""
    logits, draft = random_draft(13, chained=kind == "chain", laws=kind != "chosen")
    best, tokens, parents, valid = (
        np.array(x) for x in (logits.argmax(-1), draft.tokens, draft.parents, draft.valid)
    )
    if draft.laws is not None:  # a greedy drafter: all children of a node are its law's only token
        hot = tokens.copy()
        for i in range(1, WIDTH):
            tokens[:, i] = hot[np.arange(BATCH), parents[:, i]]
        draft = draft._replace(
            tokens=jnp.asarray(tokens), laws=jnp.asarray(np.eye(VOCAB, dtype=np.float32)[hot])
        )
    sampler, history = penalized(jnp.zeros(BATCH), repetition=1.0)
    for name, rule in LOSSLESS.items():
        if (rule.chain and kind != "chain") or (name == "kseq" and kind == "chosen"):
            continue
        verdict = run(rule.make(), sampler, history, logits, draft, sampling.row_keys(jnp.arange(BATCH)))
        for b in range(BATCH):
            expected, nodes = [], [0]
            while nodes:
                expected.append(best[b, nodes[0]])
                nodes = [
                    i
                    for i in range(1, WIDTH)
                    if parents[b, i] in nodes and valid[b, i] and tokens[b, i] == expected[-1]
                ]
                if name != "target_only":  # which alone follows all copies of a repeated child
                    nodes = nodes[:1]
            assert verdict.tokens[b, : int(verdict.num_emitted[b])].tolist() == expected, (name, b)


@pytest.mark.parametrize("name", RULES)
def test_no_draft_is_a_plain_step(name):
    """Only the root is valid: one token of the target's law."""
    logits, draft = random_draft(14, chained=RULES[name].chain)
    draft = draft._replace(valid=jnp.broadcast_to(jnp.arange(WIDTH)[None] == 0, (BATCH, WIDTH)))
    sampler, history = penalized(jnp.zeros(BATCH), repetition=1.0)
    verdict = run(RULES[name].make(), sampler, history, logits, draft, sampling.row_keys(jnp.arange(BATCH)))
    assert (verdict.num_emitted == 1).all()
    assert np.array_equal(verdict.tokens[:, 0], logits[:, 0].argmax(-1))


@pytest.mark.parametrize("name", ["block", "tree", "target_only", "token"])
def test_plain_decoding_is_a_draft_of_one_node(name):
    """N = 1, depth 0."""
    draft = Draft(jnp.zeros((2, 1), jnp.int32), jnp.full((2, 1), -1), jnp.ones((2, 1), bool))
    logits = jnp.array([[[0.0, 3.0, 1.0]], [[2.0, 3.0, 7.0]]])
    keys = sampling.row_keys(jnp.arange(2))
    verdict = run(LOSSLESS[name].make(), sampling.greedy(2), (), logits, draft, keys, depth=0)
    assert jax.tree.map(lambda x: x.tolist(), tuple(verdict)) == ([[0], [0]], [0, 0], [[1], [2]], [1, 1])


def test_thresholds_are_leaves():
    """New thresholds, temperatures and rates reuse the compiled program."""
    logits, draft = random_draft(11, chained=False)
    keys = sampling.row_keys(jnp.arange(BATCH))
    pairs = [
        (verify.lenience(0.5), verify.lenience(0.9)),
        (verify.typical(0.1, 0.2), verify.typical()),
        (verify.top_beta(2, 1.0), verify.top_beta()),
        (verify.blockwise(3, 1), verify.blockwise()),
        (verify.rollback(1.0), verify.rollback()),
        (verify.synthetic([0.5] * 5), verify.synthetic([0.9] * 5)),
        (verify.tree(), verify.tree()),
    ]
    for first, second in pairs:
        run(first, *penalized(jnp.zeros(BATCH)), logits, draft, keys)
        compiled = run._cache_size()
        run(second, *penalized(jnp.ones(BATCH)), logits, draft, keys)
        assert run._cache_size() == compiled, first.name


def test_default():
    method = Method(lambda: None, lambda: None, lambda: None, width=4, depth=3)
    for draws, tree, name in (
        ("chosen", False, "target_only"),
        ("chosen", True, "target_only"),
        ("iid", False, "block"),
        ("mixed", False, "block"),
        ("iid", True, "tree"),
        ("distinct", True, "tree"),
        ("mixed", True, "tree"),
    ):
        verifier = verify.default(method._replace(draws=draws, width=9 if tree else 4))
        assert (verifier.name, verifier.lossless, draws in verifier.draws) == (name, True, True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: verify.lenience(0.0), "factor: expected a number in"),
        (lambda: verify.typical(epsilon=1.0), "epsilon: expected a number in"),
        (lambda: verify.typical(delta=-0.1), "delta: expected a number in"),
        (lambda: verify.top_beta(beta=0), "beta: expected a number of at least 1"),
        (lambda: verify.top_beta(tau=-1.0), "tau: expected a number of at least 0"),
        (lambda: verify.blockwise(top_k=0), "top_k: expected a number of at least 1"),
        (lambda: verify.blockwise(distance=-1), "distance: expected a number of at least 0"),
        (lambda: verify.rollback(-1.0), "threshold: expected a number of at least 0"),
        (lambda: verify.synthetic([0.5, 1.5]), "rates: expected a vector"),
        (lambda: verify.synthetic([[0.5]]), "rates: expected a vector"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- blockwise and typical acceptance by hand ---------------------------------------------------------


def test_blockwise_accepts_by_rank_or_by_distance():
    laws = jnp.array([[[0.1, 0.5, 0.1, 0.0, 0.3], [0.0, 0.0, 0.2, 0.7, 0.1], [1, 0, 0, 0, 0]]])
    sampler, keys = sampling.sampler(sampling.Settings(jnp.ones(1))), sampling.row_keys(jnp.arange(1))

    def accepted(tokens: list[int], rule) -> int:
        draft = Draft(jnp.array([[0, *tokens]]), jnp.array([[-1, 0, 1]]), jnp.ones((1, 3), bool))
        return int(run(rule, sampler, (), jnp.log(laws), draft, keys, depth=2).num_accepted[0])

    assert accepted([1, 3], verify.blockwise(1)) == 2
    assert accepted([4, 2], verify.blockwise(1, 1)) == 0  # 3 away from the best, 1
    assert accepted([4, 2], verify.blockwise(2)) == 2
    assert accepted([2, 4], verify.blockwise(1, 1)) == 2
    assert accepted([2, 1], verify.blockwise(1, 2)) == 1  # near enough, but impossible


def test_typical_keeps_the_longest_path_and_the_likelier_on_ties():
    laws = jnp.array([[[0.5, 0.4, 0.1], [0.9, 0.05, 0.05], [0.6, 0.2, 0.2], [1, 0, 0], [1, 0, 0]]])
    cases = [
        ([0, 0, 1, 2, 2], [-1, 0, 0, 0, 0], [0, 1]),  # 0 and 1 pass, 0 is likelier
        ([0, 0, 1, 0, 2], [-1, 0, 0, 2, 0], [0, 2, 3]),  # 0 is likelier but has no child
        ([0, 0, 1, 1, 0], [-1, 0, 0, 1, 2], [0, 2, 4]),  # 0 1 does not pass: 0.05 < 0.09
        ([0, 2, 2, 2, 2], [-1, 0, 0, 0, 0], [0, 1]),  # min(0.09, 0.3 exp(-H) = 0.117) < 0.1
    ]
    tokens, parents, paths = zip(*cases, strict=True)
    draft = Draft(jnp.array(tokens), jnp.array(parents), jnp.ones((len(cases), 5), bool))
    sampler = sampling.sampler(sampling.Settings(jnp.ones(len(cases))))
    logits = jnp.log(jnp.repeat(laws, len(cases), axis=0))
    keys = sampling.row_keys(jnp.arange(len(cases)))
    verdict = run(verify.typical(), sampler, (), logits, draft, keys, depth=2)
    for row, path in enumerate(paths):
        assert verdict.path[row, : int(verdict.num_emitted[row])].tolist() == path


def test_typical_is_looser_where_the_target_is_unsure():
    """Over 8 tokens of much the same probability a token of 0.05 passes; beside a sure one it does not."""
    unsure, sure = np.array([0.2, 0.05, *[0.125] * 6]), np.array([0.94, 0.05, *[0.01 / 6] * 6])
    draft = Draft(jnp.array([[0, 1]] * 2), trees.chain_parents(2, 2), jnp.ones((2, 2), bool))
    logits = jnp.asarray(np.log(np.stack([unsure, sure])), jnp.float32)[:, None].repeat(2, axis=1)
    sampler = sampling.sampler(sampling.Settings(jnp.ones(2)))
    keys = sampling.row_keys(jnp.arange(2))
    assert run(verify.typical(), sampler, (), logits, draft, keys, depth=1).num_accepted.tolist() == [1, 0]
    # 0.05 lies between 0.3 exp(-H) = 0.039 and epsilon = 0.09.
    strict = run(verify.typical(0.09, 0.9), sampler, (), logits, draft, keys, depth=1)
    assert strict.num_accepted.tolist() == [0, 0]


# --- with real random numbers -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["token", "block", "tree", "kseq", "target_only"])
def test_frequencies_with_real_keys(name):
    """Chi-square of the first token: the streams of draft, coins and draws are independent."""
    rows, p, q = 40_000, np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    width = 2 if LOSSLESS[name].chain else 3
    parents = jnp.array([[-1, 0, 0][:width]])

    def spread(law: np.ndarray) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(law, jnp.float32), (rows, len(law)))

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def first(verifier: Verifier, keys: jax.Array) -> jax.Array:
        draft_keys = sampling.fold(keys, 0)
        children = [sampling.draw(sampling.fold(draft_keys, i), spread(q)) for i in range(1, width)]
        draft = Draft(
            jnp.stack([jnp.zeros(rows, jnp.int32), *children], 1),
            jnp.broadcast_to(parents, (rows, width)),
            jnp.ones((rows, width), bool),
            spread(q)[:, None],
            jnp.broadcast_to(parents, (rows, width)),
        )
        sampler = sampling.sampler(sampling.Settings(jnp.ones(rows)))
        logits = jnp.repeat(jnp.log(spread(p))[:, None], width, axis=1)
        return verifier.rule(sampler, (), logits, draft, 1, sampling.fold(keys, 1)).tokens[:, 0]

    tokens = first(LOSSLESS[name].make(), sampling.row_keys(jnp.arange(rows)))
    counts = np.bincount(np.asarray(tokens), minlength=4)
    assert ((counts - rows * p) ** 2 / (rows * p)).sum() < 30, counts / rows  # 3 degrees of freedom: 1e-6


def test_accepted_paths_are_ancestors():
    logits, draft = random_draft(15, chained=False)
    sampler, history = penalized(jnp.ones(BATCH))
    verdict = run(verify.tree(), sampler, history, logits, draft, sampling.row_keys(jnp.arange(BATCH)))
    mask = np.asarray(trees.ancestors(draft.parents))
    for b, n in enumerate(verdict.num_emitted.tolist()):
        path = verdict.path[b, :n].tolist()
        assert mask[b, path[-1]].nonzero()[0].tolist() == path


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["drawn", "chosen", "mixed"])
def test_the_token_rule_at_once_is_the_token_rule_in_turn(kind, temperature):
    """Rows of several lengths, laws with zeros, tokens that their law cannot have drawn."""
    rows, depth, size = 200, 4, 7
    rng = np.random.default_rng(1)
    laws = rng.dirichlet(np.full(size, 0.4), (rows, depth)).astype(np.float32)
    laws[laws < 0.02] = 0
    tokens = rng.integers(0, size, (rows, depth + 1)).astype(np.int32)
    law = np.broadcast_to(np.arange(-1, depth, dtype=np.int32), (rows, depth + 1)).copy()
    if kind == "mixed":
        law[:, 2] = -1
    valid = np.arange(depth + 1)[None] <= rng.integers(0, depth + 1, (rows, 1))
    draft = Draft(
        jnp.asarray(tokens),
        trees.chain_parents(rows, depth + 1),
        jnp.asarray(valid),
        None if kind == "chosen" else jnp.asarray(laws),
        None if kind == "chosen" else jnp.asarray(law),
    )
    logits = jnp.asarray(rng.normal(size=(rows, depth + 1, size)).astype(np.float32) * 2)
    sampler = sampling.sampler(sampling.Settings(jnp.full(rows, temperature)))
    length = base.chain_length(draft, depth, "token")
    keys = sampling.row_keys(jnp.arange(rows))
    once, turn = (jax.jit(rule)(sampler, (), logits, draft, length, keys) for rule in (_at_once, _in_turn))
    assert once[0].max() >= 2
    np.testing.assert_array_equal(once[0], turn[0])
    np.testing.assert_allclose(once[1], turn[1], rtol=1e-6)
