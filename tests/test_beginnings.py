"""Draft networks that begin as layers of their target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import Tiny, full_logits, target

from jspec.drafters import kinds, nets
from jspec.drafters.nets import Text, Weights
from jspec.testing import tiny_decoder
from training import drafter, init

V, WIDTH = 11, 12
leaves = jax.tree_util.tree_leaves_with_path


def text_of(model: Tiny, taps: tuple[int, ...]) -> tuple[Text, np.ndarray]:
    """Two texts with two anchors each, what the target shows of them, and its logits."""
    tokens = jax.random.randint(jax.random.key(1), (2, WIDTH), 0, V)
    lengths, anchors = jnp.full(2, WIDTH, jnp.int32), jnp.array([[3, 8], [1, 6]])
    text = Text(tokens, lengths, anchors, jnp.zeros((2, WIDTH, 32)), {})
    cache = model.lm.start(model.params, model.prompt(tokens.tolist()), 0)
    positions = jnp.broadcast_to(jnp.arange(WIDTH)[None], tokens.shape)
    shown = model.lm.extend(model.params, cache, nets.Block(tokens, positions), taps=taps)
    text = text._replace(hidden=shown.hidden, taps=dict(shown.taps))
    return text, full_logits(model, np.asarray(tokens))


def begun(kind: str, settings: dict, layers: tuple[int, ...], model: Tiny):
    network = kinds.find(kind).network(kinds.configure(kind, settings, model.lm.config))
    net = init.as_layers(network.init(jax.random.key(0)), model.lm.config, model.params, layers)
    return network, Weights(net)


@pytest.mark.parametrize(
    ("kind", "settings"), [("eagle3", {"taps": (0, 1)}), ("mtp_heads", {"num_layers": 1, "tap": 1})]
)
def test_the_layer_above_the_tap_gives_the_target_s_own_law(kind, settings):
    """At anchor a the first law comes from the pair before it: it is that of token a, which is known already.
    What is left to learn is to look one token further."""
    model = target(V)
    network, weights = begun(kind, settings, (1,), model)
    text, logits = text_of(model, network.taps)
    found = network.teach(weights, model.lm, model.params, text, 1)[:, :, 0]
    expected = np.take_along_axis(logits, np.asarray(text.anchors)[:, :, None] - 1, axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["mtp", "dflash", "glide"])
def test_other_networks_take_what_has_a_counterpart(kind):
    model = target(V)
    settings, layers = ({}, (1,)) if kind == "glide" else ({"num_layers": 2}, (0, 1))
    network = kinds.find(kind).network(kinds.configure(kind, settings, model.lm.config))
    random = network.init(jax.random.key(0))
    net = init.as_layers(random, model.lm.config, model.params, layers)
    assert jax.tree.map(jnp.shape, net) == jax.tree.map(jnp.shape, random)
    own = net.get("stack", net)["layers"]
    for i, layer in enumerate(layers):
        copied = {jax.tree_util.keystr(path): leaf for path, leaf in leaves(own[i])}
        for path, leaf in leaves(model.params["layers"][layer]):
            np.testing.assert_array_equal(copied[jax.tree_util.keystr(path)], leaf)
    if kind == "glide":
        jax.tree.map(np.testing.assert_array_equal, own[0]["look"], random["layers"][0]["look"])
    fusion = {"mtp": "projection", "dflash": "fuse"}.get(kind)
    if fusion is not None:
        kernel = np.asarray(net[fusion]["kernel"])
        np.testing.assert_array_equal(kernel[-32:], np.eye(32))
        assert not kernel[:-32].any()


@pytest.mark.parametrize(
    ("kind", "settings", "layers", "message"),
    [
        ("medusa", {}, (1,), "layers: expected none, the network has no layers"),
        ("eagle3", {}, (0, 1), r"layers: expected one for each of the network's 1, got \[0, 1\]"),
        ("eagle", {}, (1,), "layers: expected a network .* got none with attention_norm"),
        ("eagle3", {}, (2,), r"layers: expected indices in 0 \.\. 1, got \[2\]"),
        (
            "mtp",
            {"mlp_width": 8},
            (1,),
            r"layers: expected a network .* mlp\.\w+\.kernel is .*8.*target's .*64",
        ),
    ],
)
def test_what_cannot_begin_so_is_refused(kind, settings, layers, message):
    with pytest.raises(ValueError, match=message):
        begun(kind, settings, layers, target(V))


def test_a_configuration_says_so_once():
    loop = {"steps": 1}
    with pytest.raises(ValueError, match=r"layers: expected none with init, got \[1\]"):
        drafter.Drafter(kind="eagle3", layers=(1,), init="x", training=loop)
    with pytest.raises(ValueError, match=r"layers: expected none with model, got \[1\]"):
        drafter.Drafter(kind="masked", layers=(1,), model={"layers": [0]}, training=loop)


def test_parts_that_the_network_lacks_are_told():
    """Without them it would not begin as that layer."""
    lm, params = tiny_decoder(seed=1, vocab_size=V, qkv_bias=True)
    biased = kinds.find("eagle3").network(kinds.configure("eagle3", {"taps": (0, 1)}, lm.config))
    assert biased.config.qkv_bias  # by default it is shaped as the target
    net = biased.init(jax.random.key(0))
    plain = kinds.configure("eagle3", {"taps": (0, 1), "qkv_bias": False}, lm.config)
    without = kinds.find("eagle3").network(plain).init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"layers: .* got none with attention\.key\.bias"):
        init.as_layers(without, lm.config, params, (1,))
    begun = init.as_layers(net, lm.config, params, (1,))
    bias = begun["stack"]["layers"][0]["attention"]["query"]["bias"]
    np.testing.assert_array_equal(bias, params["layers"][1]["attention"]["query"]["bias"])
