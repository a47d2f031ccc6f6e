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

V = 11


def eagle3(**settings):
    """A stored network's drafter."""
    network = kinds.find("eagle3").network(kinds.configure("eagle3", {}, target(V).lm.config))
    return drafter(Stored("eagle3", network, Weights(network.init(jax.random.key(0))), None), **settings)


RULE = r"proceed: expected confidence\(threshold\), entropy_bound\(threshold\) or None, got "
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
        (lambda: eagle3(proceed=0.4), RULE + "0.4"),
        (lambda: eagle3(tree=8), "tree: expected a TreeSettings, got 8"),
        (
            lambda: eagle3(num_token=3),
            "num_token: expected one of num_tokens, .* for a drafter of kind 'eagle3'",
        ),
        (lambda: drafters.confidence(2), "threshold: expected a number from 0 to 1, got 2"),
        (lambda: drafters.confidence("x"), "threshold: expected a number from 0 to 1, got 'x'"),
        (lambda: drafters.entropy_bound(0.4, scale=-1), "scale: expected a number from 0 to inf, got -1"),
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
