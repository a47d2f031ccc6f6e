"""Block drafting: the best-first tree against a heap, refinement, the confidence stop, what is refused."""

from __future__ import annotations

import heapq
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import a_block, a_masked, shaken
from zoo import target

from jspec import drafters, engine, sampling, verify
from jspec.drafters import nets
from jspec.drafters.best_first import best_first, no_bias, num_candidates
from jspec.drafters.block import _Block, _reveal, teach_both
from jspec.drafters.block_network import tap_layers
from jspec.drafters.nets import Weights
from jspec.types import Block

V = 11


def read(logits: jax.Array) -> _Block:
    """What a network would say that gives these logits."""
    return _Block(SimpleNamespace(bias=no_bias), jnp.zeros((1, 1, 1)), logits)  # pyright: ignore


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def by_heap(logits: np.ndarray, bias: np.ndarray | None, first: int, count: int) -> set[tuple[int, ...]]:
    """Paths of the likeliest nodes, one by one."""
    heap, found = [(0.0, (first,))], set()
    while len(found) < count:
        score, path = heapq.heappop(heap)
        found.add(path)
        if len(path) <= len(logits):
            law = log_softmax(logits[len(path) - 1] + (0 if bias is None else bias[path[-1]]))
            for token in range(len(law)):
                heapq.heappush(heap, (score - law[token], (*path, token)))
    return found


def paths(draft) -> list[set[tuple[int, ...]]]:
    rows = []
    for tokens, parents, valid in zip(
        *map(np.asarray, (draft.tokens, draft.parents, draft.valid)), strict=True
    ):
        assert parents[0] == -1
        assert (parents[1:] < np.arange(1, len(parents))).all()
        assert (parents[1:] >= 0).all()
        of: list[tuple[int, ...]] = []
        for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
            of.append((*(of[parent] if parent >= 0 else ()), token))
        rows.append({path for path, there in zip(of, valid, strict=True) if there})
    return rows


@pytest.mark.parametrize("markov", [False, True])
def test_a_tree_holds_the_likeliest_nodes(markov):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (3, 4, 7)).astype(np.float32)
    bias = rng.normal(0, 2, (7, 7)).astype(np.float32) if markov else None
    first = np.array([2, 0, 6], np.int32)
    bias_of = (lambda token: jnp.asarray(bias)[token]) if bias is not None else no_bias
    draft = jax.jit(lambda logits: best_first(jnp.asarray(first), logits, 14, 7, 13, bias_of))(logits)
    for row, found in enumerate(paths(draft)):
        assert found == by_heap(logits[row], bias, int(first[row]), 14)


def test_a_tree_of_a_reduced_vocabulary_without_enough_tokens():
    """Columns are the head's; impossible tokens are no nodes."""
    logits = np.full((1, 2, 5), -np.inf, np.float32)
    logits[0, 0, :2], logits[0, 1, 4] = (1, 0), 0
    ids = jnp.array([1, 3, 5, 7, 9])
    tree = jax.jit(lambda logits: best_first(jnp.array([2]), logits, 8, 3, 7, ids=ids))
    assert paths(tree(logits)) == [{(2,), (2, 1), (2, 3), (2, 1, 9), (2, 3, 9)}]
    assert paths(tree(logits * np.nan)) == [{(2,)}]


def test_refinement_keeps_the_surest_tokens():
    logits = np.zeros((1, 4, 5), np.float32)
    logits[0, np.arange(4), [1, 2, 3, 4]] = [1.0, 4.0, 2.0, 3.0]
    reveal = jax.jit(
        lambda logits, known, scores, count: _reveal(
            Weights(()), read(logits), jnp.array([0]), known, scores, count, 5
        ),
        static_argnums=3,
    )
    known, scores = reveal(logits, jnp.full((1, 4), -1, jnp.int32), jnp.zeros((1, 4)), 2)
    assert known.tolist() == [[-1, 2, -1, 4]]
    # A kept token stays, with the score that it was kept for, whatever the network says of it now.
    known, later = reveal(np.roll(logits, 1, axis=2), known, scores, 3)
    assert known.tolist() == [[-1, 2, 4, 4]]
    np.testing.assert_allclose(later[0, [1, 3]], scores[0, [1, 3]])


def test_taps():
    assert tap_layers(36, 5) == (2, 10, 18, 26, 34)  # outputs of layers 1, 9, 17, 25, 33
    for layers in range(1, 9):
        for count in range(1, 7):
            taps = tap_layers(layers, count)
            assert taps == tuple(sorted(set(taps)))
            assert 0 < taps[0] <= taps[-1] <= layers
            assert len(taps) <= count


@pytest.mark.slow
def test_a_markov_head_starts_as_none():
    model = target(V)
    with_head, without = a_block("dspark", markov_rank=4)(model), a_block("dspark", markov_rank=0)(model)
    net = with_head.init(jax.random.key(0))
    plain = {k: v for k, v in net.items() if k not in ("previous", "markov")}
    plain["confidence"] = {**net["confidence"], "kernel": net["confidence"]["kernel"][:-4]}
    tokens = jnp.array([[1, 4, 1, 5]])
    hidden = jnp.ones((1, 4, 32))
    text = nets.Text(
        tokens, jnp.array([4]), jnp.array([[1, 2]]), hidden, dict.fromkeys(with_head.taps, hidden)
    )
    both = [
        jax.jit(lambda net, network=network: network.teach(Weights(net), model.lm, model.params, text, 3))(
            net
        )
        for network, net in ((with_head, net), (without, plain))
    ]
    assert both[0].shape == (1, 2, 3, V)
    np.testing.assert_allclose(both[0], both[1], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("survival", [0.0, 0.3, 1.0])
def test_the_confidence_head_stops_before_the_token_it_doubts(survival):
    model, prompt = target(V), [1, 4, 1, 5]
    network = a_block("dspark", markov_rank=4)(model)
    weights = shaken(Weights(network.init(jax.random.key(5))))
    head = weights.net["confidence"]
    weights.net["confidence"] = head | {"bias": head["bias"] - 1.5}
    rows = 16
    state = engine.generate(
        model.params,
        model.prompt([prompt] * rows),
        sampling.row_keys(jnp.arange(rows)),
        target=model.lm,
        drafter=drafters.block(network, weights, 4, survival=survival),
        verify=verify.token(),
        sampler=sampling.sampler(sampling.Settings(jnp.ones(rows))),
        max_new_tokens=6,
        record=lambda info: {
            name: jnp.broadcast_to(getattr(info.draft, name)[:, None], (rows, 5, 5))
            for name in ("tokens", "valid")
        },
    )
    drafted = np.asarray(state.record["tokens"])[:, len(prompt), 1:]
    valid = np.asarray(state.record["valid"])[:, len(prompt), 1:]
    tokens = jnp.concatenate([jnp.tile(jnp.array([prompt]), (rows, 1)), drafted], axis=1)
    positions = jnp.broadcast_to(jnp.arange(8)[None], tokens.shape)
    forward = model.lm.extend(
        model.params,
        model.lm.start(model.params, model.prompt([prompt] * rows), 0),
        Block(tokens, positions),
        taps=network.taps,
    )
    text = nets.Text(tokens, jnp.full(rows, 8), jnp.full((rows, 1), 3), forward.hidden, forward.taps)
    _, confidence = teach_both(network, weights, model.lm, model.params, text, 4)
    assert confidence is not None
    chances = np.cumprod(np.asarray(jax.nn.sigmoid(confidence))[:, 0], axis=1)
    # What follows a stop reads 0 in the draft and is of no account.
    expected = np.cumprod(chances >= survival, axis=1).astype(bool)
    np.testing.assert_array_equal(valid, expected)
    if survival == 0.3:
        assert 0 < valid.sum() < valid.size


@pytest.mark.slow
def test_gradients_reach_every_parameter_and_stay_finite():
    """Anchors at -1 and beyond the text, too, whose weight is 0."""
    model = target(V)
    for network in (a_block("dspark", markov_rank=4)(model), a_masked(shared_mask=False)(model)):
        net = shaken(Weights(network.init(jax.random.key(1)))).net
        tokens = jnp.array([[1, 4, 1, 5, 2, 6, 0, 0]])
        hidden = jax.random.normal(jax.random.key(2), (1, 8, 32))
        taps = dict.fromkeys(network.taps, hidden)
        text = nets.Text(tokens, jnp.array([6]), jnp.array([[-1, 0, 2, 7, 9]]), hidden, taps)

        def loss(net, network=network, text=text):
            logits = network.teach(Weights(net), model.lm, model.params, text, 3)
            assert logits.shape == (1, 5, 3, V)
            nll = -jax.nn.log_softmax(logits)[..., 1]
            total = (nll * jnp.array([0.0, 1, 1, 0, 0])[None, :, None]).sum()
            if network.config.__class__ is drafters.BlockConfig:
                both = teach_both(network, Weights(net), model.lm, model.params, text, 3)
                assert both[1] is not None
                total += both[1][:, 1:3].sum()
            return total

        gradients = jax.jit(jax.grad(loss))(net)
        for path, g in jax.tree_util.tree_leaves_with_path(gradients):
            assert np.isfinite(g).all(), path
            assert np.abs(g).max() > 0, path


def test_refusals():
    model = target(V)
    config = model.lm.config
    network = a_block("dflash")(model)
    net = Weights(network.init(jax.random.key(0)))
    reject = [
        (
            "kind: expected dflash, dspark, causal, got 'eagle'",
            lambda: drafters.block_config(config, "eagle"),
        ),
        ("taps: expected increasing", lambda: drafters.block_config(config, taps=(2, 1))),
        ("head_dim: expected an even number", lambda: drafters.block_config(config, head_dim=7)),
        ("num_heads: expected a multiple", lambda: drafters.block_config(config, num_kv_heads=3)),
        ("window: expected a whole number >= 1", lambda: drafters.block_config(config, window=0)),
        ("markov_rank: expected a whole number >= 0", lambda: drafters.block_config(config, markov_rank=-1)),
        ("head: expected 'target', 'rows' or 'own'", lambda: drafters.block_config(config, head="tied")),
        ("draft_vocab: expected None with", lambda: drafters.block_config(config, draft_vocab=5)),
        (
            r"draft_vocab: expected 1 to 11 \(vocab_size\), got 12",
            lambda: drafters.block_config(config, head="own", draft_vocab=12),
        ),
        ("num_tokens: expected a whole number >= 1, got 0", lambda: drafters.block(network, net, 0)),
        ("steps: expected 1 for drawn drafts", lambda: drafters.block(network, net, 3, steps=2)),
        ("survival: expected None", lambda: drafters.block(network, net, 3, survival=0.5)),
        (
            "weights.head: expected None",
            lambda: drafters.block(network, net._replace(head=jnp.ones((32, 5)))),
        ),
        ("num_nodes: expected 2 to 7", lambda: drafters.block_tree(network, net, 2, 8, branching=2)),
        ("network: expected one of masked_network", lambda: drafters.masked(network, net)),
        (
            "num_tokens: expected at most 3",
            lambda: drafters.masked(a_masked(shared_mask=False)(model), net, 4),
        ),
        (
            "head: expected 'own', the language model's, got 'target'",
            lambda: a_masked(head="target")(model),
        ),
    ]
    for message, call in reject:
        with pytest.raises(ValueError, match=message):
            call()
    assert num_candidates(2, 2, 7) == 7
