"""Networks that look at the target's cache, and look-ahead tokens: what the shared tests do not show."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import NETWORKS, of
from test_draft_laws import check
from zoo import Tiny, target

import jspec
from jspec import drafters, engine, sampling, verify
from jspec.drafters import stored
from jspec.drafters.attend import expand
from jspec.models.decoder import language_model
from jspec.models.rotary import Rotary
from jspec.testing import tiny_decoder
from training import drafter as recipe_drafter
from training import metrics, recipe, text
from training.data import Example

V = 11


@functools.cache
def windowed(vocab_size: int) -> Tiny:
    """Keys are normalised, and turned otherwise in the windowed layer, which the first layer looks at."""
    own = {"windows": (None, 3), "local_rotary": Rotary((1.0, 0.3)), "qk_norm": True}
    return Tiny(*tiny_decoder(seed=3, vocab_size=vocab_size, **own))


@functools.cache
def learned(vocab_size: int) -> Tiny:
    """Positions are a table, and end."""
    own = {"rotary": None, "bounded": True, "context_length": 24}
    return Tiny(*tiny_decoder(seed=4, vocab_size=vocab_size, **own))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glide", "assistant", "bita own"])
@pytest.mark.parametrize("model", [windowed, learned])
def test_other_positions_of_the_target(name, model):
    check(name, model)


def test_siblings_stand_where_the_chain_is_unsure():
    """By bins of a third each; those of later steps give way first."""
    bins = (3, 1, 0)
    rng = np.random.default_rng(0)
    tokens = np.argsort(rng.random((4, 3, 9)), axis=2)[..., :4].astype(np.int32)
    confidence = np.array(
        [[0.1, 0.5, 0.9], [0.2, 0.3, 0.4], [1.0, 0.99, 0.7], [np.nan, 0.0, 0.5]], np.float32
    )
    root = jnp.arange(4, dtype=jnp.int32)
    for num_nodes in (6, 13):
        made = jax.jit(functools.partial(expand, expansion=drafters.Expansion(bins, num_nodes)))
        draft = jax.device_get(made(root, tokens, confidence))
        for row in range(4):
            expected = [(row, -1), *((tokens[row, k, 0], k) for k in range(3))]
            for k in range(3):
                c = confidence[row, k]
                count = bins[min(int(3 * c), 2)] if c == c else bins[0]
                expected += [(tokens[row, k, r + 1], k) for r in range(count)]
            expected = expected[:num_nodes]
            real = draft.valid[row]
            assert real.tolist() == [True] * len(expected) + [False] * (num_nodes - len(expected))
            assert list(zip(draft.tokens[row][real], draft.parents[row][real], strict=True)) == expected


@pytest.mark.slow
def test_an_expanded_draft_holds_the_greedy_chain():
    network, weights = of("glide", target(V))
    plain = drafters.attend(network, weights, 3, sample=False)
    wide = drafters.attend(network, weights, 3, expansion=drafters.Expansion((3, 2, 1), 9))
    found = []
    for drafter in (plain, wide):
        state = engine.start(
            target(V).params,
            target(V).prompt([[2, 6, 5, 3], [1]]),
            sampling.row_keys(jnp.arange(2)),
            target=target(V).lm,
            drafter=drafter,
            sampler=sampling.greedy(2),
            max_new_tokens=8,
        )
        options = dict(target=target(V).lm, verify=verify.target_only(), sampler=sampling.greedy(2))
        _, info = engine.round(
            target(V).params, state, drafter=drafter, stops=engine.no_stops(), widths=(9,), **options
        )
        found.append(info.draft.tokens[:, :4])
    np.testing.assert_array_equal(*found)


def test_wrong_arguments():
    (network, weights), (rows, _) = of("glide", target(V)), of("glide rows", target(V))
    ahead, vectors = of("pass", target(V))
    attend, tokens, expansion = drafters.attend, drafters.lookahead_tokens, drafters.Expansion((3, 2), 9)
    config = functools.partial(drafters.attend_config, target(V).lm.config)
    assistant = functools.partial(config, "assistant")

    def expanded(more=None, **changes):
        return attend(network, weights, 3, expansion=expansion._replace(**changes), proceed=more)

    for make, message in (
        (lambda: attend(ahead, vectors), "config: expected a GlideConfig or an AssistantConfig"),
        (lambda: attend(network, weights, 0), "num_tokens: expected a whole number >= 1, got 0"),
        (lambda: attend(rows, weights), r"weights\.head: expected \(32, 8\) with head='rows'"),
        (lambda: expanded(bins=(11,)), r"expansion\.bins: expected numbers in 0 \.\. 10"),
        (lambda: expanded(num_nodes=14), r"expansion\.num_nodes: expected 5 to 13 with 3 tokens"),
        (lambda: expanded(drafters.confidence(0.5)), "proceed: expected None with an expansion"),
        (lambda: config("glider"), "kind: expected glide or assistant, got 'glider'"),
        (lambda: config(layers=()), "layers: expected layers of the target"),
        (lambda: config(num_heads=4, num_kv_heads=3), "num_kv_heads: expected a divisor of num_heads = 4"),
        (lambda: config(head_dim=7), "head_dim: expected an even number"),
        (lambda: assistant(inner=0), "inner: expected a whole number >= 1, got 0"),
        (lambda: config(head="rows"), "draft_vocab: expected a number with head='rows'"),
        (lambda: tokens(network, weights), "network: expected one of lookahead_network"),
        (lambda: tokens(ahead, vectors, 4), r"num_tokens: expected 1 to 3 \(look-ahead tokens\), got 4"),
        (
            lambda: drafters.LookaheadConfig(width=4, vocab_size=8, num_prompts=-1),
            "num_prompts: expected a whole number >= 0, got -1",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def test_another_target_is_refused():
    glide, ahead = drafters.attend(*of("glide", target(V))), drafters.lookahead_tokens(*of("pass", target(V)))
    for drafter, size, message in (
        (glide, {"num_heads": 2}, "expected num_heads = 4 as the network has, got 2"),
        (glide, {"width": 64}, "expected width = 32 as the network has, got 64"),
        (glide, {"num_layers": 1}, "expected more than 1 layers, which the network looks at, got 1"),
        (ahead, {"vocab_size": V + 1}, "expected vocab_size = 11 as the network has, got 12"),
    ):
        lm = language_model(dataclasses.replace(target(V).lm.config, **size))
        with pytest.raises(ValueError, match=f"target: {message}"):
            drafter.method.init(drafter.params, target(V).prompt([[1]]), 8, lm)


# --- training ---------------------------------------------------------------------------------------

VOCAB, END = 24, 1
EXAMPLES = [Example([4 + i % 18, 2 + i % 3], [5 + i % 7, 6, 7, 8, END]) for i in range(16)]
SMALL = {"layers": [1], "mlp_width": 16}
TRAINED = {
    "glide": {"network": SMALL | {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}},
    "assistant": {"network": SMALL | {"inner": 16}, "head": "own", "draft_vocab": 16},
    "pass": {},
    "bita": {"head": "rows", "draft_vocab": 16},
}


@functools.cache
def model() -> jspec.Model:
    return jspec.Model(*tiny_decoder(vocab_size=VOCAB), eos=(END,))


def settings(kind: str, **more) -> recipe_drafter.Drafter:
    rate = 0.1 if kind in ("pass", "bita") else 0.01
    given = {
        "kind": kind,
        "num_tokens": 3,
        "anchors": 3,
        "features": None,
        "batching": {"batch_size": 8, "buckets": 1},
        "training": {"steps": 16, "optimizer": {"learning_rate": rate}},
    }
    return recipe_drafter.Drafter.model_validate(given | TRAINED[kind] | more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_a_kind_is_trained_stored_and_served(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "answered", lambda model, examples, *_, **__: list(examples))
    corpus = recipe.Corpus(EXAMPLES, EXAMPLES[:8])
    found = recipe_drafter.run(settings(kind), corpus, tmp_path / "run", target=model())
    losses = [row["loss"] for row in metrics.read(tmp_path / "run" / metrics.FILE) if "loss" in row]
    assert np.mean(losses[-3:]) < 0.95 * np.mean(losses[:3])
    again = stored.load(tmp_path / "run", model())
    assert again.network is found.network
    jax.tree.map(np.testing.assert_array_equal, again.weights, found.weights)
    sources = [e.source for e in EXAMPLES[:2]]
    plain = jspec.generate(model(), sources, max_new_tokens=6)
    drafted = jspec.generate(model(), sources, max_new_tokens=6, drafter=stored.drafter(again))
    assert drafted.tokens == plain.tokens


def test_stored_features_are_refused():
    for kind in ("pass", "bita"):
        assert recipe_drafter.network_of(settings(kind), model()).runs_target
        with pytest.raises(ValueError, match=f"features: expected none for a drafter of kind '{kind}'"):
            recipe_drafter.network_of(settings(kind, features="float16"), model())
    for name in ("eagle", "glide", "assistant"):
        assert not NETWORKS[name].network(target(V)).runs_target


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["glide", "assistant"])
def test_stored_features_teach_the_same(kind, tmp_path):
    """Keys and values made from stored hidden states are those of the target."""
    found = []
    for features in (None, "float16"):
        changed = settings(kind, features=features, sources=[{"text": "references"}])
        corpus, output = recipe.Corpus(EXAMPLES, EXAMPLES[:8]), tmp_path / str(features)
        recipe_drafter.run(changed, corpus, output, target=model())
        found.append([row["loss"] for row in metrics.read(output / metrics.FILE) if "loss" in row])
    np.testing.assert_allclose(*found, rtol=2e-3)
