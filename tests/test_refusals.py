"""Arguments of the wrong kind: one error that names the argument, wherever a drafter is made or asked for."""

from __future__ import annotations

import jax
import pytest
from zoo import target

import jspec
from jspec import Model, drafters, trees
from jspec.drafters import kinds
from jspec.drafters.nets import Weights
from jspec.drafters.stored import Stored, drafter
from jspec.testing import tiny_decoder
from jspec.text import named_drafter

V = 11


def made(kind, stored_tokens=None, *, network=None, **settings):
    """A stored network's drafter."""
    network = kinds.find(kind).network(kinds.configure(kind, network or {}, target(V).lm.config))
    weights = Weights(network.init(jax.random.key(0)))
    return drafter(Stored(kind, network, weights, stored_tokens), **settings)


RULE = r"proceed: expected confidence\(threshold\), entropy_bound\(threshold\) or None, got "
WHOLE = "{}: expected a whole number >= {}, got {}"
ARM = "expected a drafter of jspec.drafters, got "


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: drafters.model(target(V), proceed=0.4), RULE + "0.4"),
        (lambda: drafters.model(target(V), proceed="confidence"), RULE + "'confidence'"),
        (
            lambda: drafters.early_exit(1, 2, proceed=drafters.confidence),
            RULE + "function|" + RULE + "<function",
        ),
        (lambda: made("eagle3", proceed=0.4), RULE + "0.4"),
        (lambda: made("eagle3", tree=8), "tree: expected a TreeSettings, got 8"),
        (
            lambda: made("eagle3", num_token=3),
            "num_token: expected one of num_tokens, .* for a drafter of kind 'eagle3'",
        ),
        (
            lambda: made("glide", 3, expansion={"num_nodes": 9}),
            "expansion: expected an Expansion or None, got ",
        ),
        (lambda: drafters.confidence(2), "threshold: expected a number from 0 to 1, got 2"),
        (lambda: drafters.confidence("x"), "threshold: expected a number from 0 to 1, got 'x'"),
        (lambda: drafters.entropy_bound(0.4, scale=-1), "scale: expected a number from 0 to inf, got -1"),
        (lambda: made("medusa", num_tokens=2.5), WHOLE.format("num_tokens", 1, "2.5")),
        (lambda: made("pass", num_tokens="2"), WHOLE.format("num_tokens", 1, "'2'")),
        (lambda: made("medusa", template=[[0]]), r"template: expected a tree of jspec\.trees, got \[\[0\]\]"),
        (lambda: made("dflash", num_nodes=4.5), WHOLE.format("num_nodes", 1, "4.5")),
        (lambda: made("eagle", tree=drafters.TreeSettings("4", 2, 5)), WHOLE.format("tree.top_k", 1, "'4'")),
        (
            lambda: made("eagle", network={"rope_theta": 0}),
            "rope_theta: expected a number from 1 to inf, got 0",
        ),
        (
            lambda: made("glide", 3, expansion=drafters.Expansion((1.5,), 6)),
            WHOLE.format("expansion.bins", 0, "1.5"),
        ),
        (
            lambda: made("glide", 3, expansion=drafters.Expansion(5, 6)),
            r"expansion\.bins: expected a list of numbers, got 5",
        ),
        (lambda: trees.template(((),)), r"paths: expected those of nodes below the root, got \(\)"),
        (lambda: trees.template((("a",),)), WHOLE.format("paths", 0, "'a'")),
        (lambda: trees.grow([[0.5, 0.2]] * 2, 4.5), WHOLE.format("num_nodes", 0, "4.5")),
        (lambda: drafters.heads(None, None), "network: expected a draft network, as .* got None"),
        (
            lambda: drafters.eagle(made("eagle").method.propose, {}),
            "network: expected a draft network, as .* got ",
        ),
        (lambda: named_drafter("trained", target(V), folder=5), "folder: expected a folder, got 5"),
        (lambda: drafters.suffix(factor=-1), "factor: expected a number >= 0, got -1"),
        (lambda: drafters.suffix(factor=1, offset="x"), "offset: expected a number or None, got 'x'"),
        (lambda: drafters.suffix(preset=5), "preset: expected one of .* or a Lookup, got 5"),
        (lambda: made("dspark", 3, survival=2), "survival: expected a number from 0 to 1, got 2"),
        (lambda: drafters.heuristic("suffix"), "drafter: " + ARM + "'suffix'"),
        (lambda: drafters.router("suffix", drafters.plain()), "first: " + ARM + "'suffix'"),
        (lambda: drafters.router(drafters.suffix(), target(V)), "second: " + ARM + "Tiny"),
        (lambda: drafters.model("smollm2-135m"), "draft_model: expected a model .*, got 'smollm2-135m'"),
        (lambda: jspec.generate("smollm2-135m", ["x"]), "model: expected a model .*, got 'smollm2-135m'"),
        (lambda: jspec.stream("smollm2-135m", "x"), "model: expected a model .*, got 'smollm2-135m'"),
        (lambda: jspec.Session("smollm2-135m"), "model: expected a model .*, got 'smollm2-135m'"),
    ],
)
def test_an_argument_of_the_wrong_kind(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_drafter_that_is_nowhere(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = Model(*target(V)[:2], name="tiny")
    with pytest.raises(FileNotFoundError, match="folder_or_name: 'nope' is neither a folder nor a Hub model"):
        drafters.load("nope", model)


def test_accuracies_may_be_lists():
    assert trees.grow([[0.6, 0.3], [0.5, 0.1]], 4).parents == (-1, 0, 0, 1)


def test_lists_where_tuples_are_meant():
    """They make the same network."""
    c = target(V).lm.config
    sizes = {"width": c.width, "vocab_size": V, "head_dim": 8, "num_heads": 4, "num_kv_heads": 2}
    configs = [drafters.Eagle3Config(taps=taps, mlp_width=16, **sizes) for taps in ((0, 1), [0, 1])]
    assert configs[0] == configs[1]
    assert drafters.eagle_network(configs[0]) is drafters.eagle_network(configs[1])
    assert drafters.block_config(c, taps=[1, 2]) == drafters.block_config(c, taps=(1, 2))
    assert drafters.attend_config(c, layers=[1]) == drafters.attend_config(c, layers=(1,))
    network, weights = drafters.attend_network(drafters.attend_config(c)), made("glide", 3).params.weights
    wide = [
        drafters.attend(network, weights, 2, expansion=drafters.Expansion(bins, 6))
        for bins in ((2, 1), [2, 1])
    ]
    assert wide[0].method is wide[1].method


def stored_block(**sizes):
    config = drafters.block_config(target(V).lm.config, "causal", **sizes)
    network = drafters.block_network(config)
    return Stored("causal_block", network, Weights(network.init(jax.random.key(0))), 3)


def test_a_block_for_another_target():
    made = drafter(stored_block())
    other = tiny_decoder(vocab_size=V + 1)[0]
    with pytest.raises(ValueError, match="target: expected vocab_size = 11 as the network has, got 12"):
        made.method.init(made.params, target(V).prompt([[1]]), 8, other)


def test_a_stored_block_drafts_trees_too():
    tree = drafter(stored_block(), num_nodes=5)
    assert (tree.method.width, tree.method.depth, tree.method.draws) == (5, 3, "chosen")
    assert drafter(stored_block(), 2, num_nodes=5).method.depth == 2
    with pytest.raises(
        ValueError, match="sample: expected one of num_tokens, num_nodes, branching, beam for"
    ):
        drafter(stored_block(), num_nodes=5, sample=False)


def test_a_folder_comes_before_what_the_package_has(tmp_path, monkeypatch):
    model = Model(*target(V)[:2], name="tiny")
    for folder, depth in ((tmp_path / "package" / "tiny", 2), (tmp_path / "here" / "tiny", 3)):
        block = stored_block()
        drafters.save(folder, block.kind, block.network, block.weights, num_tokens=depth)
    monkeypatch.setattr(drafters.files, "SHIPPED", tmp_path / "package")
    assert drafters.load("tiny", model).method.depth == 2
    monkeypatch.chdir(tmp_path / "here")
    assert drafters.load("tiny", model).method.depth == 3
    assert named_drafter("trained", model).method.depth == 2
