"""EAGLE and multi-token prediction: the arithmetic, the dynamic tree, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import NETWORKS, NUM_TOKENS, drafter_of, of, small
from zoo import DYNAMIC, target

from jspec import drafters, engine, models, sampling
from jspec.drafters import TreeSettings, nets
from jspec.drafters.beam import dynamic_tree
from jspec.drafters.eagle import Eagle, Eagle3
from jspec.drafters.mtp import Mtp
from jspec.drafters.nets import Weights
from jspec.drafters.pairs import build
from jspec.models import params as model_params
from jspec.round import make_context
from jspec.types import Block, Context, Draft, Prompt, Verdict

V = 11

# --- the modules, against the papers' formulas in plain numpy -------------------------------------------


def norm(x: np.ndarray, scale: dict) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(scale["scale"])


def attention(x: np.ndarray, weights: dict, heads: int, size: int) -> np.ndarray:
    """Causal, rotary at positions 0, 1, ...; as many keys as queries."""
    q, k, v = (
        (x @ np.asarray(weights[name]["kernel"])).reshape(len(x), heads, size)
        for name in ("query", "key", "value")
    )
    angle = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(0, size, 2) / size)

    def turn(a: np.ndarray) -> np.ndarray:
        first, second = np.split(a, 2, axis=-1)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    scores = np.einsum("qhd,khd->hqk", turn(q), turn(k)) / np.sqrt(size)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1) @ np.asarray(weights["out"]["kernel"])


def perceptron(x: np.ndarray, weights: dict) -> np.ndarray:
    gate, up, down = (np.asarray(weights[name]["kernel"]) for name in ("gate", "up", "down"))
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


def by_formula(kind: type, net: dict, embedded: np.ndarray, carried: np.ndarray) -> np.ndarray:
    layer = net["stack"]["layers"][0]
    both = np.concatenate([embedded, carried], -1)
    if kind is Eagle:
        x = both @ np.asarray(net["fc"]["kernel"]) + np.asarray(net["fc"]["bias"])
        read = x
    elif kind is Eagle3:
        x = carried
        parts = [norm(embedded, layer["embedding_norm"]), norm(carried, layer["attention_norm"])]
        read = np.concatenate(parts, -1)
    else:
        parts = [norm(embedded, net["embedding_norm"]), norm(carried, net["hidden_norm"])]
        x = np.concatenate(parts, -1) @ np.asarray(net["projection"]["kernel"])
        read = norm(x, layer["attention_norm"])
    x = x + attention(read, layer["attention"], heads=2, size=8)
    return x + perceptron(norm(x, layer["mlp_norm"]), layer["mlp"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("eagle", Eagle), ("eagle3", Eagle3), ("mtp", Mtp)])
def test_one_pass_is_that_of_the_paper(name, kind):
    network, weights = of(name, target(V))
    module = build(kind, network.config)(weights.net)
    rng = np.random.default_rng(0)
    embedded, carried = rng.normal(size=(2, 5, 32)).astype(np.float32)
    g, _ = module.extend(
        module.start(1, 0), module.join(embedded[None], carried[None]), jnp.arange(5, dtype=jnp.int32)[None]
    )
    np.testing.assert_allclose(g[0], by_formula(kind, weights.net, embedded, carried), atol=1e-4)
    expected = g if kind is Eagle else norm(np.asarray(g), weights.net["stack"]["norm"])
    np.testing.assert_allclose(module.read(g, 0), expected, atol=1e-5)
    np.testing.assert_array_equal(module.feed(g), g)


@pytest.mark.slow
def test_eagle_3_fuses_its_taps_and_3_1_norms_them():
    rng = np.random.default_rng(1)
    chunks = rng.normal(size=(3, 4, 32)).astype(np.float32)
    for name in ("eagle3", "eagle3.1"):
        network, weights = of(name, target(V))
        module = build(Eagle3, network.config)(weights.net)
        fused = chunks
        if network.config.fc_norm:
            fused = [norm(chunk, weights.net["fc_norm"][i]) for i, chunk in enumerate(chunks)]
        expected = np.concatenate(fused, -1) @ np.asarray(weights.net["fc"]["kernel"])
        np.testing.assert_allclose(module.fuse(np.concatenate(chunks, -1)), expected, atol=1e-5)
        fed = module.read(chunks[0], 0) if network.config.feed_normed else chunks[0]
        np.testing.assert_array_equal(module.feed(chunks[0]), fed)


# --- the dynamic tree ---------------------------------------------------------------------------------


def beam_search(log_law, settings: TreeSettings) -> set[tuple[int, ...]]:
    """EAGLE-2 on lists: paths of the kept nodes, the root's () left out. ``log_law(path) -> [V]``."""

    def children(score: float, path: tuple[int, ...]) -> list:
        law = log_law(path)
        best = sorted(range(len(law)), key=lambda token: (-law[token], token))[: settings.top_k]
        return [(score + law[token], (*path, token)) for token in best]

    level = children(0.0, ())
    seen = list(level)
    for _ in range(settings.depth - 1):
        beam = sorted(level, key=lambda node: -node[0])[: settings.top_k]
        level = [child for node in beam for child in children(*node)]
        seen += level
    ranked = sorted(seen, key=lambda node: -node[0])[: settings.num_nodes - 1]
    return {path for score, path in ranked if score > -np.inf}


def paths(draft: Draft, row: int) -> set[tuple[int, ...]]:
    """Those of the valid nodes."""
    tokens, parents, valid = (np.asarray(x[row]) for x in (draft.tokens, draft.parents, draft.valid))
    assert parents[0] == -1
    assert (parents < np.arange(len(parents))).all()
    assert valid[np.maximum(parents, 0)][valid].all()
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        found.append((*found[parents[node]], int(tokens[node])))
    kept = {path for path, ok in zip(found[1:], valid[1:], strict=True) if ok}
    assert len(kept) == valid[1:].sum()
    return kept


@pytest.mark.parametrize("settings", [TreeSettings(3, 4, 12), TreeSettings(4, 1, 4)])
def test_the_tree_of_a_markov_chain_is_that_of_a_plain_beam_search(settings):
    rng = np.random.default_rng(2)
    table = rng.normal(size=(2, 6, 6)).astype(np.float32) * 2  # one chain a row
    table[1, :, 2:] = -np.inf  # two tokens are possible: no more nodes than these make
    table[1, 1, 0] = np.nan
    roots = jnp.array([4, 0])

    def expand(level, beam, shared, tokens):
        assert tokens.shape == (2, settings.top_k)
        return beam, shared, jax.vmap(lambda t, i: t[i])(table, tokens)

    first = jnp.stack([table[0, 4], table[1, 0]])
    ids = jnp.array([0, 1, 2, 3, 4, 5])
    draft = jax.jit(lambda: dynamic_tree(roots, first, expand, (), (), settings, ids))()
    for row, given in enumerate([4, 0]):

        def log_law(path, row=row, given=given):
            logits = table[row, path[-1] if path else given]
            with np.errstate(invalid="ignore"):
                law = logits - np.log(np.exp(logits).sum())
            return np.where(np.isnan(law), -np.inf, law)

        assert paths(draft, row) == beam_search(log_law, settings)
    assert draft.tokens[:, 0].tolist() == [4, 0]
    assert bool(draft.valid[0].all())
    assert draft.laws is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3 own", "mtp", "mtp heads"])
def test_the_tree_of_a_network_is_that_of_a_plain_beam_search(name):
    """Against the laws that are taught, which know nothing of trees."""
    tiny, settings = target(V), TreeSettings(3, 3, 9)
    network, weights, _ = drafter_of(name, target, V)
    drafter = NETWORKS[name].drafter(network, weights, tree=settings)
    prompts = [[3, 1], [2, 6, 5, 3, 5, 2, 6]]
    sampler = sampling.greedy(2)
    shared = dict(target=tiny.lm, drafter=drafter, sampler=sampler)
    keys = sampling.row_keys(jnp.arange(2))
    state = engine.start(
        tiny.params, tiny.prompt(prompts), keys, max_new_tokens=jnp.array([6, 6]), capacity=16, **shared
    )

    @jax.jit
    def propose(state):
        context = make_context(tiny.params, state, tiny.lm, sampler)
        return drafter.method.propose(drafter.params, state.drafter_state, context, keys)[0]

    draft = propose(state)

    @jax.jit
    def taught(tokens, length):
        lengths = jnp.reshape(length, (1,))
        cache = tiny.lm.start(tiny.params, Prompt(tokens, lengths), 0)
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        forward = tiny.lm.extend(tiny.params, cache, Block(tokens, positions), taps=network.taps)
        text = nets.Text(tokens, lengths, lengths[:, None] - 1, forward.hidden, forward.taps)
        logits = network.teach(weights, tiny.lm, tiny.params, text, settings.depth)
        return jax.nn.log_softmax(nets.spread(weights, logits, V))[0, 0]

    for row, prompt in enumerate(prompts):

        def log_law(path, prompt=prompt):
            tokens = np.zeros((1, 12), np.int32)
            tokens[0, : len(prompt) + len(path)] = [*prompt, *path]
            return np.asarray(taught(tokens, jnp.int32(len(prompt))))[len(path)]

        assert paths(draft, row) == beam_search(log_law, settings)
        assert bool(draft.valid[row].all())


# --- sizes, dtypes, errors ----------------------------------------------------------------------------


def shapes(jaxpr) -> set[tuple[int, ...]]:
    """Of every array in a program, inner programs included."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {tuple(v.aval.shape) for v in equation.outvars}
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= shapes(inner)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3 own", "mtp", "mtp heads"])
def test_teaching_makes_logits_at_the_anchors_only(name):
    tiny, wide = target(13), 19  # 13, or 9 of them: no other size of these networks
    network, weights = of(name, tiny)
    states = jnp.zeros((2, wide, 32))
    text = nets.Text(
        jnp.zeros((2, wide), jnp.int32),
        jnp.full(2, wide),
        jnp.array([[3, 7, -1], [0, 18, 30]]),
        states,
        dict.fromkeys(network.taps, states),
    )
    program = jax.make_jaxpr(
        lambda weights, params: network.teach(weights, tiny.lm, params, text, NUM_TOKENS)
    )(weights, tiny.params)
    columns = network.config.columns
    (out,) = program.out_avals
    assert out.shape == (2, 3, NUM_TOKENS, columns)
    assert not [s for s in shapes(program.jaxpr) if wide in s and columns in s]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "eagle3 own", "mtp rows", "mtp heads"])
def test_a_network_computes_in_the_dtype_of_its_weights(name):
    """Shapes and dtypes alone: loops and branches refuse an array that changes its dtype."""
    tiny = target(V)
    params = model_params.cast(tiny.params, jnp.bfloat16)
    network, weights = of(name, tiny)
    head = None if weights.head is None else weights.head.astype(jnp.bfloat16)
    weights = weights._replace(net=model_params.cast(weights.net, jnp.bfloat16), head=head)
    for options in ({}, {"tree": DYNAMIC}):
        drafter = NETWORKS[name].drafter(network, weights, **options)
        method = drafter.method

        def twice(drafter=drafter, method=method):
            """The state before a round and after it."""
            sampler, prompt, three = (
                sampling.greedy(2),
                tiny.prompt([[3], [1, 2]]),
                jnp.zeros((2, 3), jnp.int32),
            )
            cache = tiny.lm.start(params, prompt, 16)
            forward = tiny.lm.extend(params, cache, Block(three, three), taps=network.taps)
            tokens, ones = jnp.zeros((2, 16), jnp.int32), jnp.ones(2, jnp.int32)
            history = sampler.init(tokens, ones)
            context = Context(tokens, ones, 9 * ones, history, sampler, tiny.lm, params, cache)
            before = method.init(drafter.params, prompt, 16, tiny.lm)
            draft, state = method.propose(drafter.params, before, context, sampling.row_keys(jnp.arange(2)))
            verdict = Verdict(three, ones, three, ones)
            return before, method.update(drafter.params, state, context, draft, verdict, forward)

        before, after = jax.eval_shape(twice)
        assert before == after
        cached = models.cache_dtype(jnp.bfloat16) or jnp.bfloat16  # wider where 16 bits are written slowly
        expected = {jnp.dtype(dtype) for dtype in (jnp.bfloat16, cached, jnp.int32)}
        assert {x.dtype for x in jax.tree.leaves(after)} == expected


def test_equal_settings_are_one_method():
    network, weights = of("eagle", target(V))
    assert drafters.eagle_network(network.config) is network
    first, second = (drafters.eagle(network, weights, tree=DYNAMIC, num_tokens=n) for n in (2, 3))
    assert first.method is second.method
    assert drafters.eagle(network, weights, 2).method is drafters.eagle(network, weights, 2).method
    assert first.method.draws == "chosen"
    assert (first.method.width, first.method.depth) == (6, 3)


def test_bad_configs_are_refused():
    sizes = small(target(V))

    def refused(match: str, make, **more) -> None:
        with pytest.raises(ValueError, match=match):
            make(**(sizes | more))

    eagle, eagle3, heads = drafters.EagleConfig, drafters.Eagle3Config, drafters.MtpHeadsConfig
    refused("width: expected a whole number >= 1, got 0", eagle, width=0)
    refused("head: expected 'target', 'rows' or 'own', got 'mine'", eagle, head="mine")
    refused("draft_vocab: expected a number with head='rows', got None", eagle, head="rows")
    refused("draft_vocab: expected None with head='target', got 5", eagle, draft_vocab=5)
    refused(r"draft_vocab: expected 1 to 11 \(vocab_size\), got 12", eagle, head="own", draft_vocab=12)
    refused("head_dim: expected an even number", eagle, head_dim=3)
    refused("num_kv_heads: expected a divisor of num_heads = 2, got 3", eagle, num_kv_heads=3)
    refused(r"taps: expected increasing layers of the target, got \(2, 1\)", eagle3, taps=(2, 1))
    refused("taps: expected increasing", eagle3, taps=())
    refused("tap: expected a layer of the target or None, got -1", heads, tap=-1)
    with pytest.raises(ValueError, match="config: expected an EagleConfig or an Eagle3Config, got MtpConfig"):
        drafters.eagle_network(drafters.MtpConfig(**sizes))
    with pytest.raises(ValueError, match="config: expected an MtpConfig or an MtpHeadsConfig, got Eagle"):
        drafters.mtp_network(drafters.EagleConfig(**sizes))


def test_bad_arguments_are_refused():
    tiny = target(V)
    network, weights = of("eagle", tiny)
    rows, reduced = of("eagle rows", tiny)
    heads, independent = of("mtp heads", tiny)

    def refused(match: str, make, *arguments, **more) -> None:
        with pytest.raises(ValueError, match=match):
            make(*arguments, **more)

    refused("num_tokens: expected a whole number >= 1, got 0", drafters.eagle, network, weights, 0)
    refused("config: expected an MtpConfig", drafters.mtp, network, weights)
    refused(r"num_tokens: expected at most 3 \(num_layers\), got 4", drafters.mtp, heads, independent, 4)
    deep = TreeSettings(2, 4, 6)
    refused("tree.depth: expected at most 3", drafters.mtp, heads, independent, tree=deep)
    refused(
        "proceed: expected None with a tree",
        drafters.eagle,
        network,
        weights,
        tree=DYNAMIC,
        proceed=drafters.confidence(0.5),
    )
    for tree, match in (
        (TreeSettings(12, 3, 6), r"tree.top_k: expected 1 to 11 \(columns of the head\), got 12"),
        (TreeSettings(2, 0, 6), "tree.depth: expected a whole number >= 1, got 0"),
        (TreeSettings(2, 3, 12), "tree.num_nodes: expected 2 to 11 with top_k = 2 and depth = 3, got 12"),
    ):
        refused(match, drafters.eagle, network, weights, tree=tree)
    refused(r"weights.head: expected \(32, 8\) with head='rows'", drafters.eagle, rows, weights)
    refused("weights.head: expected None with head='target'", drafters.eagle, network, reduced)
    without = Weights(reduced.net, reduced.head)
    refused(r"weights.ids: expected \(8,\) .* got None", drafters.eagle, rows, without)
    other, drafter = target(4), drafters.eagle(network, weights)
    refused(
        "target: expected vocab_size = 11 as the network has, got 4",
        drafter.method.init,
        drafter.params,
        other.prompt([[1]]),
        8,
        other.lm,
    )


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_reduced_vocabulary_in_16_bits(rows):
    """Product and scatter in one program: several rows once were more than XLA's CPU backend could do."""
    hidden, kernel = jnp.ones((rows, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
    weights = Weights({}, kernel, jnp.arange(0, 96, 3, dtype=jnp.int32))

    @jax.jit
    def law(hidden: jax.Array, weights: Weights) -> jax.Array:
        return nets.spread(weights, nets.logits(weights, None, None, hidden), 96)

    expected = np.where(np.arange(96) % 3, -np.inf, 64)
    np.testing.assert_array_equal(law(hidden, weights), np.tile(expected, (rows, 1)))
