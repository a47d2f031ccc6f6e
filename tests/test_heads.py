"""Heads on the last hidden state: what a tree holds, how they begin, what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import shaken
from zoo import BUSHY, head_network, target

from jspec import drafters, sampling, trees
from jspec.drafters.nets import Text, Weights, rows_of_head
from jspec.types import Context

V, BATCH, SLOTS = 11, 3, 9
LENGTHS = np.array([1, 4, 6])  # roots at 0, 3, 5


@functools.cache
def made(kind: str, head: str = "target"):
    """A network of three heads, and shaken weights."""
    model = target(V)
    network = head_network(kind, head=head)(model)
    weights = shaken(Weights(network.init(jax.random.key(1))), seed=2)
    if head == "rows":
        ids = jnp.array([0, 1, 3, 4, 6, 8, 9, 10])
        weights = weights._replace(head=rows_of_head(model.lm, model.params, ids), ids=ids)
    return model, network, weights


def context_of(model, tokens: np.ndarray) -> Context:
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    settings = sampling.Settings(jnp.ones(BATCH))
    return Context(
        jnp.asarray(tokens, jnp.int32),
        lengths,
        jnp.full(BATCH, 99),
        (),
        sampling.sampler(settings),
        model.lm,
        model.params,
        None,
    )


def proposed(drafter, model, tokens, hidden):
    @jax.jit
    def propose(params, hidden):
        keys = sampling.row_keys(jnp.arange(BATCH))
        return drafter.method.propose(params, hidden, context_of(model, tokens), keys)[0]

    return propose(drafter.params, hidden)


def hidden_states(model, dtype=jnp.float32) -> jax.Array:
    states = jax.random.normal(jax.random.key(3), (BATCH, SLOTS, model.lm.config.width), dtype)
    return states.at[0].set(0)  # row 0's root is its first token


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("hydra", "rows"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("medusa", "target"), ("medusa", "own"), ("hydra", "own"), ("blockwise", "rows"))
        ),
    ],
)
def test_a_tree_holds_the_best_tokens_after_every_path(kind, head):
    """Node by node, by what the network is taught with the node's path for a text."""
    model, network, weights = made(kind, head)
    tokens = np.random.default_rng(0).integers(0, V, (BATCH, SLOTS))
    hidden = hidden_states(model)
    before = np.maximum(LENGTHS - 2, 0)
    drafter = drafters.heads(network, weights, template=BUSHY)
    assert (drafter.method.width, drafter.method.depth, drafter.method.draws) == (11, 3, "chosen")
    draft = proposed(drafter, model, tokens, hidden[jnp.arange(BATCH), before])
    assert draft.laws is None
    assert bool(draft.valid.all())
    assert np.array_equal(draft.parents, np.broadcast_to(BUSHY.parents, (BATCH, 11)))
    drafted = np.asarray(draft.tokens)
    assert np.array_equal(drafted[:, 0], tokens[np.arange(BATCH), LENGTHS - 1])

    @jax.jit
    def taught(texts):  # [B, N, T]: one text a node
        def one(text):
            whole = Text(text, jnp.asarray(LENGTHS), jnp.asarray(LENGTHS - 1)[:, None], hidden, {})
            return network.teach(weights, model.lm, model.params, whole, 3)[:, 0]

        return jax.vmap(one, in_axes=1, out_axes=1)(texts)

    texts = np.repeat(tokens[:, None], 11, axis=1)
    for node in range(1, 11):
        parent = BUSHY.parents[node]
        texts[:, node] = texts[:, parent]
        for row in range(BATCH):
            texts[row, node, LENGTHS[row] - 1 + BUSHY.depths[node]] = drafted[row, node]
    logits = np.asarray(taught(jnp.asarray(texts)))
    ids = np.arange(V) if weights.ids is None else np.asarray(weights.ids)
    for node in range(1, 11):
        depth, rank = BUSHY.depths[node], BUSHY.ranks[node]
        order = np.argsort(-logits[:, BUSHY.parents[node], depth - 1], axis=1)
        assert np.array_equal(drafted[:, node], ids[order[:, rank]]), node


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "hydra", "blockwise"])
def test_every_head_begins_as_the_target_s(kind):
    """Where nothing is learned yet, a head's logits are those of the target's head on the state it reads."""
    model, network, _ = made(kind)
    hidden = hidden_states(model)
    text = Text(
        jnp.zeros((BATCH, SLOTS), jnp.int32), jnp.full(BATCH, SLOTS), jnp.array([[2, 5]] * BATCH), hidden, {}
    )
    weights = Weights(network.init(jax.random.key(0)))
    logits = network.teach(weights, model.lm, model.params, text, 2)
    expected = model.lm.head(model.params, hidden[:, jnp.array([1, 4])])
    assert logits.shape == (BATCH, 2, 2, V)
    np.testing.assert_allclose(logits, jnp.broadcast_to(expected[:, :, None], logits.shape), atol=1e-5)


@pytest.mark.slow
def test_anchors_outside_the_text_give_finite_logits():
    model, network, weights = made("hydra")
    anchors = jnp.array([[-1, 0, SLOTS - 1, SLOTS + 5]] * BATCH)
    text = Text(jnp.zeros((BATCH, SLOTS), jnp.int32), jnp.full(BATCH, 4), anchors, hidden_states(model), {})
    logits = network.teach(weights, model.lm, model.params, text, 3)
    assert bool(jnp.isfinite(logits).all())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_the_weights_dtype_is_computed_in(kind):
    model, network, weights = made(kind, "own")
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    drafter = drafters.heads(network, weights, 2)
    state = drafter.method.init(drafter.params, model.prompt([[1]] * BATCH), 8, model.lm)
    assert (state.shape, state.dtype) == ((BATCH, model.lm.config.width), jnp.bfloat16)
    tokens = np.zeros((BATCH, SLOTS), np.int32)
    draft = proposed(drafter, model, tokens, state)
    assert draft.laws is not None
    assert (draft.laws.shape, draft.laws.dtype) == ((BATCH, 2, V), jnp.float32)


def config(**fields) -> drafters.HeadsConfig:
    return drafters.HeadsConfig(**({"kind": "medusa", "width": 8, "vocab_size": V} | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "media"}, "kind: expected one of medusa, hydra, blockwise, got 'media'"),
        ({"num_heads": 0}, "num_heads: expected a whole number >= 1, got 0"),
        ({"kind": "blockwise", "layers": 2}, "layers: expected 1 for blockwise heads, got 2"),
        ({"mlp_width": 8}, "mlp_width: expected a number >= 1 for blockwise heads, None for others, got 8"),
        ({"head": "mine"}, "head: expected 'target', 'rows' or 'own', got 'mine'"),
        ({"head": "rows"}, "draft_vocab: expected a number with head='rows'"),
        ({"draft_vocab": 5}, "draft_vocab: expected None with head='target', got 5"),
        (
            {"head": "own", "draft_vocab": V + 1},
            rf"draft_vocab: expected 1 to {V} \(vocab_size\), got {V + 1}",
        ),
    ],
)
def test_bad_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)


LATE = trees.Template((-1, 0, 1, 0), (0, 0, 0, 1), (0, 1, 2, 1))
DEEP = trees.template(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)))


@pytest.mark.parametrize(
    ("head", "changes", "options", "message"),
    [
        ("target", {}, {"num_tokens": 4}, "num_tokens: expected 1 to 3, got 4"),
        ("target", {}, {"num_tokens": 2, "template": BUSHY}, "num_tokens: expected None with a template"),
        ("target", {}, {"template": DEEP}, "template: expected a depth of 1 to 3, got 4"),
        ("target", {}, {"template": LATE}, "template: expected nodes in order of depth"),
        ("rows", {}, {"template": trees.template(tuple((r,) for r in range(9)))}, "template: expected ranks"),
        ("target", {"head": jnp.ones((32, V))}, {}, "weights.head: expected None with head='target'"),
        ("rows", {"head": None}, {}, r"weights.head: expected \(32, 8\) with head='rows'"),
        ("rows", {"ids": jnp.arange(4)}, {}, r"weights.ids: expected \(8,\)"),
        ("own", {"net": {}}, {}, r'weights.net\["head"\]: expected \(3, 32, 11\)'),
    ],
)
def test_bad_arguments_are_refused(head, changes, options, message):
    _, network, weights = made("medusa", head)
    with pytest.raises(ValueError, match=message):
        drafters.heads(network, weights._replace(**changes), **options)


def test_a_target_of_another_width_is_refused():
    network = drafters.heads_network(config())
    drafter = drafters.heads(network, Weights(network.init(jax.random.key(0))))
    model = target(V)
    with pytest.raises(ValueError, match="target: expected width = 8 as the network has, got 32"):
        drafter.method.init(drafter.params, model.prompt([[1]]), 8, model.lm)


def test_equal_settings_are_one_method():
    """One compilation for all weights."""
    _, network, weights = made("medusa")
    one, other = (drafters.heads(network, shaken(weights, seed), 2) for seed in (3, 4))
    assert one.method is other.method
