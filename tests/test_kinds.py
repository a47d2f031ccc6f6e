"""Every kind of draft network, through training to a folder and from there into the engine."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jspec
from jspec import drafters, trees
from jspec.drafters import kinds, nets, stored
from jspec.models.rotary import rotary
from jspec.testing import tiny_decoder
from training import config as configs
from training import drafter, metrics, recipe, text
from training.data import Example

VOCAB, END = 24, 1
EXAMPLES = [Example([4 + i % 18, 2 + i % 3], [5 + i % 7, 6, 7, 8, END]) for i in range(16)]
SMALL = {"num_layers": 1, "head_dim": 8, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}
CASES = {
    "blockwise": {"network": {"mlp_width": 16}},
    "medusa": {"head": "own", "draft_vocab": 16},
    "hydra": {"head": "rows", "draft_vocab": 16},
    "eagle": {"network": SMALL, "loss": {"regression": 1.0, "terms": [{"weight": 0.1}]}},
    "eagle3": {"network": SMALL, "head": "rows", "draft_vocab": 16},
    "mtp": {"network": SMALL, "loss": {"terms": [{"loss": "cross_entropy"}]}},
    "mtp_heads": {"network": SMALL | {"num_layers": 3}},
    "dflash": {
        "network": SMALL,
        "head": "rows",
        "draft_vocab": 16,
        "loss": {"weighting": {"kind": "dflash"}},
    },
    "dspark": {"network": SMALL | {"markov_rank": 4}, "loss": {"confidence": 1.0}},
    "causal_block": {"network": SMALL, "head": "own"},
}


@functools.cache
def target():
    lm, params = tiny_decoder(vocab_size=VOCAB)
    return jspec.Model(lm, params, eos=(END,))


def references(model, examples, writing, temperature, seed, **_):
    return list(examples)


def settings(kind):
    given = {
        "kind": kind,
        "num_tokens": 3,
        "anchors": 3,
        "batching": {"batch_size": 8, "buckets": 1},
        "training": {"steps": 12, "optimizer": {"learning_rate": 0.01}},
    }
    return drafter.Drafter.model_validate(given | CASES[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_kind_is_trained_stored_and_served(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "answered", references)
    corpus = recipe.Corpus(EXAMPLES, EXAMPLES[:8])
    found = drafter.run(settings(kind), corpus, tmp_path / "run", target=target())
    losses = [row["loss"] for row in metrics.read(tmp_path / "run" / metrics.FILE) if "loss" in row]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    again = stored.load(tmp_path / "run", target())
    assert again.network is found.network
    jax.tree.map(np.testing.assert_array_equal, again.weights, found.weights)
    sources = [e.source for e in EXAMPLES[:2]]
    plain = jspec.generate(target(), sources, max_new_tokens=6)
    loaded = drafters.load(tmp_path / "run", target())
    assert loaded.method.depth == 3
    assert jspec.generate(target(), sources, max_new_tokens=6, drafter=loaded).tokens == plain.tokens


def test_the_configuration_for_smollm2():
    """Its sizes; what is trained is a tenth of the target, and fits into 24 MB of bfloat16."""
    folder = Path(__file__).parent.parent / "configs"
    config = configs.load(folder / "drafter_eagle3_smollm2.yaml", drafter.Drafter)
    sizes = {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3, "mlp_width": 1536}
    model = SimpleNamespace(width=576, vocab_size=49152, num_layers=30, **sizes)
    options = {"head": config.head, "draft_vocab": config.draft_vocab}
    network = kinds.find(config.kind).network(kinds.configure(config.kind, config.network, model, **options))
    assert network.taps == drafters.eagle3_taps(30) == (2, 15, 27)
    assert network.config == kinds.configure(config.kind, {}, model, **options)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) < 12_000_000


def test_rotary_positions_are_the_target_s():
    """A net that is written for another server is refused by its own target if they differ."""
    lm, _ = tiny_decoder(vocab_size=VOCAB, num_heads=2, rotary=rotary({"rope_theta": 5e5}, 16, 64)[0])
    for kind in ("eagle", "eagle3", "mtp", "mtp_heads", "dflash", "dspark", "causal_block", "glide"):
        assert kinds.configure(kind, {}, lm.config).rope_theta == 5e5
        assert kinds.configure(kind, {"rope_theta": 1e4}, lm.config).rope_theta == 1e4


def test_an_unknown_key_within_a_nested_config_is_an_error():
    config = tiny_decoder(vocab_size=VOCAB)[0].config
    lm = dataclasses.asdict(config)
    made = kinds.configure("masked", {"lm": lm}, config, head="own")
    assert made.lm == config
    with pytest.raises(
        ValueError, match=r"network: unknown key 'lm\.qk_nrom' for a drafter of kind 'masked'"
    ):
        kinds.configure("masked", {"lm": lm | {"qk_nrom": True}}, config, head="own")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "mtp_heads", "network": SMALL}, r"num_tokens: expected at most 1 \(num_layers\), got 3"),
        ({"kind": "medusa", "num_tokens": 5}, "num_tokens: expected .* got 5"),
        ({"kind": "pass", "num_tokens": 5, "features": None}, "num_tokens: expected .* got 5"),
        ({"kind": "dspark", "network": SMALL, "loss": {"regression": 1.0}}, r"loss\.regression: expected 0"),
        ({"kind": "eagle3", "network": SMALL, "loss": {"confidence": 1.0}}, r"loss\.confidence: expected 0"),
    ],
)
def test_what_a_network_cannot_do_is_told_before_any_text_is_written(changes, message):
    given = {"num_tokens": 3, "training": {"steps": 1}} | changes
    with pytest.raises(ValueError, match=message):
        drafter.network_of(drafter.Drafter.model_validate(given), target())


def test_every_kind_is_configured_by_its_target():
    for kind in CASES:
        config = settings(kind)
        network = drafter.network_of(config, target())
        values = kinds.build(kind, dataclasses.asdict(network.config))
        assert values == network.config
    # These are trained in tests of their own.
    elsewhere = {"masked", "glide", "assistant", "pass", "bita"}
    assert kinds.KINDS.keys() == CASES.keys() | elsewhere


def test_a_static_tree_grows_from_the_accuracies_that_are_stored(tmp_path):
    accuracies = [[0.5, 0.2, 0.1], [0.3, 0.2, 0.1], [0.1, 0.1, 0.1]]
    network = drafter.network_of(settings("medusa"), target())
    ids = np.arange(16, dtype=np.int32)
    weights = nets.Weights(network.init(jax.random.key(0)), ids=jax.numpy.asarray(ids))
    stored.save(tmp_path, "medusa", network.config, weights, num_tokens=3, accuracies=accuracies)
    found = drafters.load(tmp_path, target(), num_nodes=5)
    assert (
        found.method == drafters.heads(network, weights, template=trees.grow(np.array(accuracies), 5)).method
    )
    assert (found.method.width, found.method.depth) == (5, 2)
    with pytest.raises(ValueError, match="num_tokens: expected None with a template"):
        drafters.load(tmp_path, target(), num_nodes=5, num_tokens=2)
    stored.save(tmp_path, "medusa", network.config, weights, num_tokens=3)
    with pytest.raises(ValueError, match="num_nodes: expected none, for no accuracies are stored"):
        drafters.load(tmp_path, target(), num_nodes=5)
