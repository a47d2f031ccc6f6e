"""Acceptance rules against the exact law of a round, by enumeration; lossy rules must fail the same test."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import enumeration as enum
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Source, Target, Tree, chain, chosen, drawn

from jspec import sampling, trees, verify
from jspec.types import Draft, Verifier

EXACT = 1e-6
LOSSY = 1e-3
SIZE, DEPTH = 3, 3


# --- the table of rules: a new rule is a line here ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rule:
    make: Callable[[], Verifier]
    coins: Callable[[Tree], int]
    draws: Callable[[Tree], int] = lambda tree: 1
    chain: bool = False


LOSSLESS = {
    "token": Rule(verify.token, lambda tree: tree.depth + 1, chain=True),
    "block": Rule(verify.block, lambda tree: tree.depth + 1, chain=True),
    "tree": Rule(verify.tree, lambda tree: tree.visits),
    "with_replacement": Rule(verify.with_replacement, lambda tree: tree.visits),
    "kseq": Rule(verify.kseq, lambda tree: tree.visits),
    "target_only": Rule(verify.target_only, lambda tree: 0, lambda tree: tree.depth + 1),
}
IN_LAW = {
    "lenience": Rule(lambda: verify.lenience(0.5), lambda tree: tree.visits),
    "typical": Rule(verify.typical, lambda tree: 0),
    "top_beta": Rule(lambda: verify.top_beta(2, 1.0), lambda tree: 0, lambda tree: 0),
    "blockwise": Rule(lambda: verify.blockwise(1, 1), lambda tree: 0, lambda tree: 0),
    "rollback": Rule(lambda: verify.rollback(1.0), lambda tree: 0, lambda tree: 0),
    "synthetic": Rule(lambda: verify.synthetic([0.5, 0.6, 0.7, 0.8, 0.9]), lambda tree: tree.depth + 1),
}
RULES = LOSSLESS | IN_LAW
TREE_RULES = [name for name, rule in LOSSLESS.items() if not rule.chain]

WIDE = (-1, 0, 0, 1, 1, 2, 2)
TREES = {
    "chain": chain(DEPTH),
    "3": (-1, 0, 0, 0),
    "2, then 1 each": (-1, 0, 0, 1, 2),
    "2, then 2 under the second": (-1, 0, 0, 2, 2),
    "2, 1, 2": (-1, 0, 0, 1, 3, 3),
    "2, then 2 each": WIDE,
}


def judge(name: str, tree: Tree, target: Target, verifier: Verifier | None = None) -> enum.Result:
    """Enumerate a round. All chains have one shape and all trees another: a rule compiles once or twice."""
    rule = RULES[name]
    shape = (max(DEPTH, tree.depth) + 1 if rule.chain else max(7, tree.width), max(DEPTH, tree.depth))
    return enum.law_of_round(verifier or rule.make(), tree, target, rule.coins(tree), rule.draws(tree), shape)


def laws(seed: int = 0, zeros: float = 0.0, size: int = SIZE, depth: int = DEPTH) -> tuple[Target, enum.Law]:
    """A target and an independent drafting law."""
    target = enum.damped(enum.random_tables(size, depth, 2 * seed, zeros))
    return target, enum.table_law(enum.random_tables(size, depth, 2 * seed + 1, zeros))


def suited(name: str) -> tuple[int, ...]:
    """A chain for rules that want one, else a tree."""
    return chain(DEPTH) if RULES[name].chain else WIDE


# --- drafts by kind -----------------------------------------------------------------------------------


def _with_law(parents: tuple[int, ...], law: list[int], q: enum.Law) -> Tree:
    return Tree(parents, tuple(law), tuple(Source(i, q) for i in range(len(parents))), distinct=True)


def first_chosen(parents: tuple[int, ...], q: enum.Law) -> Tree:
    """The first child of a node is chosen, the others are drawn from q without replacement."""
    return _with_law(parents, [p if p in parents[1:i] else -1 for i, p in enumerate(parents)], q)


def last_chosen(parents: tuple[int, ...], q: enum.Law) -> Tree:
    """The last child of a node is chosen and may repeat a drawn one."""
    return _with_law(parents, [p if p in parents[i + 1 :] else -1 for i, p in enumerate(parents)], q)


def alternating(parents: tuple[int, ...], q: enum.Law) -> Tree:
    """Odd nodes are drawn, even nodes chosen."""
    return _with_law(parents, [p if i % 2 else -1 for i, p in enumerate(parents)], q)


def two_drafters(parents: tuple[int, ...], q: enum.Law) -> Tree:
    """The first child of a node is drawn from q, the others from a law that depends on nothing (a merge)."""
    size = q(np.zeros((1, 0), int)).shape[1]
    other = enum.table_law(enum.random_tables(size, 0, 77))
    width = len(parents)
    law = [width - 1 if p in parents[1:i] else p for i, p in enumerate(parents)]
    sources = (*(Source(i, q) for i in range(width - 1)), Source(None, other))
    return Tree(parents, tuple(law), sources, distinct=True)


KINDS: dict[str, dict[str, Callable[[tuple[int, ...], enum.Law], Tree]]] = {
    "chosen": {"chosen": lambda parents, q: chosen(parents)},
    "iid": {"iid": drawn},
    "distinct": {"distinct": lambda parents, q: drawn(parents, q, distinct=True)},
    "mixed": {
        "first chosen": first_chosen,
        "last chosen": last_chosen,
        "two drafters": two_drafters,
        "alternating": alternating,
    },
}
FITTING = [(name, kind) for name, rule in LOSSLESS.items() for kind in KINDS if kind in rule.make().draws]


# --- exact law ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), FITTING)
def test_lossless_rules_give_the_target_law(name, kind):
    shapes = {"chain": TREES["chain"]} if LOSSLESS[name].chain else TREES
    for seed, (shape, variant) in enumerate(itertools.product(shapes, KINDS[kind])):
        target, q = laws(seed, zeros=0.4 if seed % 2 else 0.0)
        result = judge(name, KINDS[kind][variant](shapes[shape], q), target)
        assert result.error < EXACT, (shape, variant, seed)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("name", "kind"), FITTING)
def test_lossless_rules_give_the_target_law_full(name, kind, size):
    """Up to six drafted nodes of two to four tokens, several laws."""
    shapes = TREES | {"3, then 1 each": (-1, 0, 0, 0, 1, 2, 3), "2, 2, 2": (-1, 0, 0, 1, 1, 3, 3)}
    if LOSSLESS[name].chain:
        shapes = {f"chain of {depth}": chain(depth) for depth in (1, 2, 3, 4, 6)}
    cases = itertools.product(shapes, KINDS[kind], range(4 - size // 2))
    for seed, (shape, variant, _) in enumerate(cases):
        target, q = laws(100 + seed, 0.4 * (seed % 2), size, depth=6)
        tree = KINDS[kind][variant](shapes[shape], q)
        if size ** (tree.law.count(-1) + tree.depth) < 1 << 22:  # numbers in the joint law of all instances
            assert judge(name, tree, target).error < EXACT, (shape, variant, seed)


def nudged(law: enum.Law, ulps: int) -> enum.Law:
    """A law whose float32 entries, all but the first, lie ``ulps`` units in the last place off."""

    def near(prefix: np.ndarray) -> np.ndarray:
        values = law(prefix).astype(np.float32)
        for _ in range(abs(ulps)):
            values[:, 1:] = np.nextafter(values[:, 1:], np.float32(2 if ulps > 0 else -1))
        return values

    return near


def one_hot(tables: list[np.ndarray]) -> list[np.ndarray]:
    return [np.eye(table.shape[-1])[table.argmax(-1)] for table in tables]


@pytest.mark.parametrize(("name", "kind"), [pair for pair in FITTING if pair[1] in ("iid", "distinct")])
def test_equal_disjoint_and_one_hot_laws(name, kind):
    """p = q exactly and within rounding, supports that do not meet, greedy rows: no NaN, nothing lost."""
    tables = enum.random_tables(SIZE, DEPTH, 5)
    some = enum.damped([t * [1, 1, 0] / (t * [1, 1, 0]).sum(-1, keepdims=True) for t in tables])
    other = enum.table_law([np.broadcast_to(np.eye(SIZE)[2], table.shape) for table in tables])
    target, greedy = enum.damped(tables), enum.damped(one_hot(tables))
    sure = {
        "equal": (target, target.law),
        "one ulp above": (target, nudged(target.law, 1)),
        "one ulp below": (target, nudged(target.law, -1)),
        "three ulps below": (target, nudged(target.law, -3)),
        "both greedy": (greedy, greedy.law),
    }
    cases = sure | {
        "disjoint": (some, other),
        "greedy target": (greedy, enum.table_law(tables)),
        "greedy draft": (target, enum.table_law(one_hot(tables))),
    }
    for case, (p, q) in cases.items():
        tree = drawn(suited(name), q, kind == "distinct")
        result = judge(name, tree, p)
        assert result.error < EXACT, case
        assert (result.joint[:, result.expected == 0] == 0).all(), case
        if name != "target_only" and case in sure:
            assert abs(result.length[0] - 1 - tree.depth) < 1e-5, case
        # Siblings that outlive their law are skipped, except by the rule that does not look at laws.
        if case == "disjoint" and (name, kind) != ("target_only", "distinct"):
            assert abs(result.length[0] - 1) < EXACT


@pytest.mark.parametrize("name", [name for name in LOSSLESS if name != "kseq"])
def test_length_settled_before_the_draw(name):
    """Nodes may be missing because of tokens drawn before them."""

    def no_children_of_zero(tokens: np.ndarray) -> np.ndarray:
        valid = np.ones(tokens.shape, bool)
        for i in range(1, tokens.shape[1]):
            parent = tree.parents[i]
            valid[:, i] = valid[:, parent] & ((parent == 0) | (tokens[:, parent] != 0))
        return valid

    def no_sibling_after_one(tokens: np.ndarray) -> np.ndarray:
        valid = np.ones(tokens.shape, bool)
        for i in range(1, tokens.shape[1]):
            before = [j for j in range(1, i) if tree.parents[j] == tree.parents[i]][-1:]
            valid[:, i] = valid[:, tree.parents[i]] & (tokens[:, before] != 1).all(1)
        return valid

    target, q = laws(3)
    for valid, kind in itertools.product((no_children_of_zero, no_sibling_after_one), ("iid", "distinct")):
        if kind in LOSSLESS[name].make().draws:
            tree = dataclasses.replace(drawn(suited(name), q, kind == "distinct"), valid=valid)
            assert judge(name, tree, target).error < EXACT


def test_number_of_siblings_settled_before_the_first():
    """K-SEQ must know it by then; later is too late, and seen."""

    def by_parent(tokens: np.ndarray) -> np.ndarray:
        valid = np.ones(tokens.shape, bool)
        valid[:, 4], valid[:, 6] = tokens[:, 1] != 0, tokens[:, 2] != 1
        return valid

    def by_sibling(tokens: np.ndarray) -> np.ndarray:
        return (np.arange(4) < 3) | (tokens[:, [1]] != 1)

    target, q = laws(5)
    assert judge("kseq", dataclasses.replace(drawn(WIDE, q), valid=by_parent), target).error < EXACT
    three = dataclasses.replace(drawn(TREES["3"], q), valid=by_sibling)
    assert judge("kseq", three, target).deviation > LOSSY
    assert judge("tree", three, target).error < EXACT


@pytest.mark.parametrize("name", ["token", "block", "tree", "with_replacement", "kseq"])
def test_a_drafter_of_which_nothing_is_allowed(name):
    """Its law is NaN where the sampler leaves nothing of its vocabulary: the token that stands for the draw
    is never kept, and what comes before it has the target's law."""
    rows, p, q = 20_000, np.array([0.42, 0.25, 0.17, 0.16]), np.array([0.1, 0.1, 0.3, 0.5])
    first = sampling.draw(sampling.row_keys(jnp.arange(rows)), jnp.tile(q, (rows, 1)))
    tokens = jnp.stack([jnp.zeros_like(first), first, jnp.zeros_like(first)], axis=1)
    laws = jnp.tile(jnp.stack([jnp.asarray(q), jnp.full(4, jnp.nan)]), (rows, 1, 1))
    draft = Draft(tokens, trees.chain_parents(rows, 3), jnp.ones((rows, 3), bool), laws)
    sampler = sampling.sampler(sampling.Settings(jnp.ones(rows)))
    logits = jnp.tile(jnp.log(p), (rows, 3, 1)).astype(jnp.float32)
    keys = sampling.row_keys(jnp.arange(rows, 2 * rows))
    found = LOSSLESS[name].make().rule(sampler, (), logits, draft, 2, keys)
    emitted, kept = np.asarray(found.tokens), np.asarray(found.num_accepted)
    assert set(kept.tolist()) == {0, 1}
    for counts in (np.bincount(emitted[:, 0], minlength=4), np.bincount(emitted[kept == 1, 1], minlength=4)):
        expected = p * counts.sum()
        assert ((counts - expected) ** 2 / expected).sum() < 22  # 3 degrees of freedom: by chance 1 in 15,000


@pytest.mark.parametrize("name", ["token", "block", "tree"])
def test_length_settled_by_the_drawn_token_is_seen(name):
    """Dropping a node because of its own token changes the law: this test can fail."""
    target, q = laws(3)
    own = dataclasses.replace(
        drawn(chain(DEPTH), q), valid=lambda tokens: np.cumprod(tokens != 1, axis=1).astype(bool)
    )
    assert judge(name, own, target).deviation > LOSSY


@pytest.mark.parametrize("name", TREE_RULES)
def test_laws_shared_by_nodes_and_left_to_the_default(name):
    """One law for all nodes of a level (independent heads); `Draft.law` given or not."""
    target, q = laws(4)
    heads = Tree(WIDE, (-1, 0, 0, 1, 1, 1, 1), (Source(0, q), Source(None, q)))
    assert judge(name, heads, target).error < EXACT
    if "distinct" in LOSSLESS[name].make().draws:
        assert judge(name, dataclasses.replace(heads, distinct=True), target).error < EXACT
    implied = judge(name, drawn(WIDE, q), target)
    given = judge(name, dataclasses.replace(drawn(WIDE, q), explicit=True), target)
    assert np.array_equal(implied.joint, given.joint)


@pytest.mark.parametrize("name", ["block", "tree", "target_only", "token"])
def test_the_sampler_pipeline_at_every_node(name):
    """Penalties, temperature and top-p of the package's own sampler, against their plain definition."""
    rng = np.random.default_rng(8)
    tables = [rng.normal(size=(SIZE,) * (k + 1)) * 2 for k in range(DEPTH + 1)]
    prompt = np.arange(SIZE) == 0

    def law(prefix: np.ndarray) -> np.ndarray:
        counts = (prefix[:, :, None] == np.arange(SIZE)).sum(1)
        logits = enum.lookup(tables, prefix)
        factor = np.where(prompt | (counts > 0), 1.5, 1)
        logits = np.where(logits > 0, logits / factor, logits * factor) - 0.3 * (counts > 0) - 0.2 * counts
        p = np.exp(logits / 0.8)
        p /= p.sum(-1, keepdims=True)
        for row in p:  # a token goes if those above it already have the mass
            order = np.argsort(-row)
            row[order[1:][np.cumsum(row[order])[:-1] >= 0.85]] = 0
        return p / p.sum(-1, keepdims=True)

    one = jnp.ones(1)
    penalty = sampling.penalties(SIZE, 1.5 * one, 0.3 * one, 0.2 * one)
    sampler = sampling.sampler(sampling.Settings(0.8 * one, top_p=0.85 * one), [penalty])

    def history(rows: int) -> object:
        return sampler.init(jnp.zeros((rows, 1), jnp.int32), jnp.ones(rows, jnp.int32))

    target = Target(tables, law, sampler, history)
    _, q = laws(9)
    tree = chosen(WIDE) if name == "target_only" else drawn(suited(name), q)
    result = judge(name, tree, target)
    assert result.error < EXACT
    assert (result.expected == 0).any()


# --- lossy rules and wrong pairs ----------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_LAW)
def test_lossy_rules_deviate(name):
    target, q = laws(6)
    verifier = IN_LAW[name].make()
    assert not verifier.lossless
    assert verifier.draws == {"chosen", "iid", "distinct", "mixed"}
    for variant, make in itertools.chain.from_iterable(variants.items() for variants in KINDS.values()):
        deviation = judge(name, make(WIDE, q), target).deviation
        print(f"{name:10s} {variant:13s} total variation {deviation:.4f}")
        assert deviation > LOSSY, variant


@pytest.mark.parametrize("name", ["typical", "top_beta", "blockwise", "rollback"])
def test_lossy_rules_are_exact_at_temperature_zero(name):
    target = enum.damped(one_hot(enum.random_tables(SIZE, DEPTH, 6)))
    for tree in (drawn(WIDE, laws(6)[1]), chosen(WIDE)):
        assert judge(name, tree, target).error < EXACT


def test_blockwise_by_rank_is_top_beta_without_tolerance():
    target, q = laws(6)
    ranks, beta = verify.blockwise(2), verify.top_beta(2, 1e9)
    one, other = (judge("blockwise", drawn(WIDE, q), target, rule) for rule in (ranks, beta))
    assert np.array_equal(one.joint, other.joint)


def test_lenience():
    """At l = 1 it is the tree rule. On a chain no token comes out with more than p / l."""
    target, q = laws(6)
    tree = drawn(WIDE, q, distinct=True)
    one, reference = judge("lenience", tree, target, verify.lenience(1.0)), judge("tree", tree, target)
    assert np.abs(one.joint - reference.joint).max() < 1e-12
    for factor in (0.3, 0.7):
        result = judge("lenience", drawn(chain(1), q), target, verify.lenience(factor))
        first = result.joint.reshape(SIZE, -1).sum(1)
        p, q_root = (law(np.zeros((1, 0), int))[0] for law in (target.law, q))
        assert (first <= p / factor + EXACT).all()
        assert abs(result.length[0] - 1 - np.minimum(p / factor, q_root).sum()) < EXACT


def test_lenience_at_temperature_zero():
    """Appendix A.5: a token passes if it has l times the best probability, after penalties and bans."""
    p = jnp.array([0.1, 0.5, 0.3, 0.06, 0.04])
    draft = Draft(jnp.array([[0, 2, 3]]), jnp.array([[-1, 0, 1]]), jnp.ones((1, 3), bool))
    siblings = Draft(jnp.array([[0, 3, 0, 2]]), jnp.array([[-1, 0, 0, 0]]), jnp.ones((1, 4), bool))
    keys = sampling.row_keys(jnp.arange(1))

    @jax.jit
    def run(verifier, sampler, draft):
        history = sampler.init(jnp.array([[0]]), jnp.array([1]))
        width = draft.tokens.shape[1]
        logits = jnp.broadcast_to(jnp.log(p)[None, None], (1, width, 5))
        return verifier.rule(sampler, history, logits, draft, width - 1, keys)

    def judge(factor, draft, processors=(), temperature=0.0, top_k=0):
        settings = sampling.Settings(jnp.array([temperature]), jnp.array([top_k]))
        verdict = run(verify.lenience(factor), sampling.sampler(settings, processors), draft)
        return verdict.tokens[0, : int(verdict.num_emitted[0])].tolist()

    assert judge(1.0, draft) == judge(0.61, draft) == [1]
    assert judge(0.59, draft) == judge(0.13, draft) == [2, 1]  # 0.3 >= 0.59 * 0.5; then the best
    assert judge(0.11, draft) == [2, 3, 1]
    assert judge(0.59, siblings) == judge(0.1, siblings) == [2, 1]  # the likeliest of those that pass
    banned = sampling.allow(jnp.array([[True, True, False, True, True]]))
    assert judge(0.01, draft, [banned]) == [1]
    # Once token 1 is out, its 0.5 counts as 0.1, and the best is token 2's 0.3.
    once = [sampling.penalties(5, *(jnp.array([x]) for x in (1.0, np.log(5).item(), 0.0)))]
    again = draft._replace(tokens=jnp.array([[0, 1, 1]]))
    assert (judge(0.35, again, once), judge(0.3, again, once)) == ([1, 2], [1, 1, 2])
    assert judge(0.59, draft, temperature=1.0, top_k=1) == [2, 1]  # a one-hot law, too


def test_synthetic_rates():
    """The mean length is 1 + r1 + r1 r2 + ..., whatever the draft."""
    target, q = laws(6)
    for tree in (drawn(WIDE, q), drawn(chain(DEPTH), q)):
        length = judge("synthetic", tree, target).length[0]
        assert abs(length - np.cumprod([1, 0.5, 0.6, 0.7])[: tree.depth + 1].sum()) < EXACT


def test_rates_must_reach_the_depth():
    with pytest.raises(ValueError, match=r"rates: expected one for each depth 1 \.\.\. 3, got 2"):
        judge("synthetic", chosen(chain(DEPTH)), laws()[0], verify.synthetic([0.5, 0.5]))


WRONG = [
    ("with_replacement", "distinct"),
    ("with_replacement", "mixed"),
    ("kseq", "distinct"),
    ("kseq", "mixed"),
]


@pytest.mark.parametrize(("name", "kind"), WRONG)
def test_wrong_pairs_deviate_and_are_refused(name, kind):
    target, q = laws(5)
    assert kind not in LOSSLESS[name].make().draws
    for variant, make in KINDS[kind].items():
        deviation = judge(name, make(TREES["3"], q), target).deviation
        print(f"{name:17s} {variant:13s} total variation {deviation:.4f}")
        assert deviation > LOSSY, variant


def test_every_kind_of_draft_is_right_or_refused():
    """FITTING and WRONG are all pairs, but for one that cannot run at all."""
    every = {(name, kind) for name in LOSSLESS for kind in KINDS}
    assert every - {*FITTING, *WRONG} == {("kseq", "chosen")}
    with pytest.raises(ValueError, match="laws = None"):
        judge("kseq", chosen(TREES["3"]), laws()[0])


@pytest.mark.parametrize("name", ["token", "block", "tree"])
def test_chosen_children_judged_as_drawn_deviate(name, monkeypatch):
    """The commonest bug of all: the top child with the drafter's softmax as its law."""
    target, q = laws(6)
    top = q(np.zeros((1, 0), int)).argmax()
    monkeypatch.setattr(enum, "_weights", lambda tree, tokens, laws: (tokens[:, 1] == top).astype(float))
    assert judge(name, drawn(chain(1), q), target).deviation > 0.1


@pytest.mark.parametrize("name", ["token", "block"])
def test_chain_rules_refuse_trees(name):
    target, q = laws()
    rule, tree = LOSSLESS[name], drawn(WIDE, q)
    with pytest.raises(ValueError, match=rf"verify.{name} .* N = depth \+ 1 = 3 nodes, got N = 7"):
        enum.law_of_round(rule.make(), tree, target, rule.coins(tree), 1, (7, 2))


@pytest.mark.parametrize("name", ["token", "block"])
def test_chain_rules_cut_a_tree_of_chain_width(name):
    """N = depth + 1 nodes that are no chain (a dynamic tree): the chain ends where the links do."""
    target, q = laws(2)
    for parents, length in (((-1, 0, 0, 1), 1), ((-1, 0, 1, 1), 2), ((-1, 0, 0, 2), 1)):
        result = judge(name, drawn(parents, q), target)
        assert result.error < EXACT
        assert abs(result.length[0] - judge(name, drawn(chain(length), q), target).length[0]) < EXACT


# --- how much is accepted -----------------------------------------------------------------------------


def test_block_is_never_below_token():
    gains = []
    for seed, zeros, near in itertools.product(range(15), (0.0, 0.3), (0.0, 0.8)):
        target, far = laws(1000 + seed, zeros)

        def q(prefix: np.ndarray, target=target, far=far, near=near) -> np.ndarray:
            return near * target.law(prefix) + (1 - near) * far(prefix)

        tree = drawn(chain(DEPTH), q)
        gains.append(judge("block", tree, target).length[0] - judge("token", tree, target).length[0])
    print(f"block over token, tokens a round: least {min(gains):.2e}, mean {np.mean(gains):.4f}")
    assert min(gains) > -EXACT
    assert np.mean(gains) > 0.01


def test_block_is_token_for_chosen_tokens():
    target, _ = laws(2)
    block, token = (judge(name, chosen(chain(DEPTH)), target) for name in ("block", "token"))
    assert np.abs(block.length - token.length).max() < EXACT


def test_expected_length_of_the_token_rule():
    """1 + the sum over prefixes of prod min(p, q)."""
    target, q = laws(2)
    length = 1.0
    for k in range(1, DEPTH + 1):
        words = enum._grid(SIZE, k)
        mass = np.ones(len(words))
        for i in range(k):
            mass *= np.minimum(target.law(words[:, :i]), q(words[:, :i]))[np.arange(len(words)), words[:, i]]
        length += mass.sum()
    assert abs(judge("token", drawn(chain(DEPTH), q), target).length[0] - length) < EXACT


def test_target_only_accepts_every_drafted_path():
    """The expected length is 1 + the mass of the distinct drafted prefixes, copies counted once."""
    target, _ = laws(2)
    tree = chosen(WIDE)
    lengths, in_turn = (judge(name, tree, target).length for name in ("target_only", "tree"))
    for row, word in enumerate(enum._grid(SIZE, 6)):
        spelled = {tuple(word[np.array(tree.path(i)) - 1]) for i in range(1, 7)}
        mass = 0.0
        for path in spelled:
            prefix = np.array([path])
            mass += np.prod([target.law(prefix[:, :k])[0, path[k]] for k in range(len(path))])
        assert abs(lengths[row] - 1 - mass) < EXACT
        assert in_turn[row] < lengths[row] + EXACT
        assert word[0] == word[1] or abs(in_turn[row] - lengths[row]) < EXACT
