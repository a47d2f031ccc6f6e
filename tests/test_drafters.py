"""Draft networks compared: one command trains them on the same text and measures them in one table."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import pytest
import rich.console
from linear_network import LINEAR

from experiments import config, drafters, study, table
from experiments.drafters import Point, Trained
from experiments.stages import Stages
from jspec import drafters as methods
from jspec import generate, testing, text
from jspec.checkpoint import Model
from jspec.drafters import kinds, nets
from training import metrics, recipe
from training.data import Example

CONFIGS = Path(__file__).parents[1] / "configs"
EXAMPLES = [Example([4 + i % 14, 2 + i % 3], [5, 6, 1][i % 2 :]) for i in range(12)]
CONTENT = {
    "kind": "drafters",
    "base": {
        "target": "tiny",
        "kind": "linear",
        "num_tokens": 2,
        "batching": {"batch_size": 4, "buckets": 1},
        "sources": [{"text": "references"}],
        "validation_examples": 4,
        "max_new_tokens": 4,
        "training": {"steps": 4, "evaluate_every": 1},
    },
    "methods": {
        "taps": {"network": {"taps": [1, 2]}, "training": {"steps": 3}},
        "hidden": {"network": {"taps": []}},
    },
    "table": {
        "target": "tiny",
        "prompts": {"file": "x.jsonl"},
        "drafters": [
            {"name": "own", "drafter": "trained", "arguments": {"folder": "taps", "num_tokens": 1}},
            {"name": "other", "drafter": "trained", "arguments": {"folder": "smollm2-135m"}},
        ],
    },
}


def content(**changes):
    return config.overlaid(CONTENT, changes)


@pytest.fixture(autouse=True, scope="module")
def linear_kind():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kinds.KINDS, "linear", LINEAR)
        yield


@functools.cache
def target():
    return Model(*testing.tiny_decoder(vocab_size=18), eos=(1,), name="tiny")


@pytest.mark.parametrize(
    ("name", "smoke"),
    [("drafters_smollm2", False), ("drafters_smollm2_gpu", False), ("drafters_smollm2_gpu", True)],
)
def test_the_project_s_own(name, smoke):
    """All methods learn from the same text and share one cache; no Spec-Bench row is trained on."""
    loaded = study.load(CONFIGS / f"{name}.yaml", smoke=smoke)
    recipes = list(loaded.recipes().values())
    for found in recipes:
        assert (found.sources, found.data, found.limits) == (
            recipes[0].sources,
            recipes[0].data,
            recipes[0].limits,
        )
        assert "spec_bench" not in found.data.model_dump_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {"taps": {"step": 1}}}, r"methods\.taps: step: unknown key"),
        ({"table": {"target": "other"}}, r"table\.target: expected that of all methods, got other"),
        ({"methods": {"text": {}}}, "methods: expected names of folders, and not text, got 'text'"),
        ({"methods": {"../x": {}}}, "methods: expected names of folders, .* got '../x'"),
        (
            {"table": {"drafters": [{"name": "x", "drafter": "trained", "arguments": {"folder": ["a"]}}]}},
            r"table\.drafters: 'x': expected a folder, got",
        ),
        ({"base": {"training": {"steps": 0}}}, r"methods\.hidden: training\.steps: .*greater"),
        (
            {"base": {"training": {"best": True, "evaluate_every": 1}}},
            r"methods\.taps: training\.best: expected false in a comparison, got true",
        ),
        (
            {"base": {"training": {"optimizer": {"learning_rate": float("inf")}}}},
            r"methods\.taps: training\.optimizer\.learning_rate: .*finite",
        ),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        config.Drafters.model_validate(content(**changes))


def test_methods_are_trained_once_and_written_about(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "given", lambda *named: target())
    monkeypatch.setattr(recipe, "read", lambda data, folder: recipe.Corpus(EXAMPLES, EXAMPLES))
    settings = config.Drafters.model_validate(content())
    console = rich.console.Console(width=160, record=True)
    found = drafters.train(settings, tmp_path, tmp_path, Stages(tmp_path, console), console)
    for name, steps in (("taps", 3), ("hidden", 4)):
        rows = [row for row in metrics.read(tmp_path / name / metrics.FILE) if "tau_0" in row]
        assert [point.tau_0 for point in found[name].curve] == [row["tau_0"] for row in rows]
        assert len(rows) == steps
        assert found[name].accepted == [rows[-1]["accepted_1"], rows[-1]["accepted_2"]]
    before = (tmp_path / "taps" / "model.safetensors").stat().st_mtime_ns
    again = drafters.train(settings, tmp_path, tmp_path, Stages(tmp_path, console), console)
    assert again == found
    assert (tmp_path / "taps" / "model.safetensors").stat().st_mtime_ns == before

    drafters.write(tmp_path, settings, found, Stages(tmp_path, console), console)
    text = (tmp_path / "drafters.md").read_text()
    assert f"| taps | {found['taps'].parameters / 1e6:.1f}M |" in text
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((tmp_path / "drafters.json").read_text())["methods"].keys() == {"taps", "hidden"}

    own, other = drafters.rows(settings, tmp_path).drafters
    assert own.arguments == {"folder": str(tmp_path / "taps"), "num_tokens": 1}
    assert other.arguments == {"folder": "smollm2-135m"}
    assert [row.name for row in drafters.untrained(settings).drafters] == ["other"]
    built = table.build(own, target())
    prompt = [[4, 2, 5]]
    expected = generate(target(), prompt, max_new_tokens=8).tokens
    assert generate(target(), prompt, max_new_tokens=8, drafter=built.drafter).tokens == expected


def test_ten_times_the_text_is_read_off_the_end_of_the_curve():
    curve = [Point(10, 5.0, 1), Point(100, 1.2, 1), Point(1000, 1.5, 1), Point(10_000, 1.8, 1)]
    assert Trained(1, 1.0, 1.0, curve, []).at_ten_times() == pytest.approx(2.1)
    assert Trained(1, 1.0, 1.0, curve[:1], []).at_ten_times() == 5.0


@pytest.mark.slow
def test_trees_of_a_trained_row(tmp_path):
    for name, kind, arguments in (
        ("dynamic", "eagle3", {"tree": {"top_k": 2, "depth": 2, "num_nodes": 4}}),
        ("static", "medusa", {"template": [[0], [1], [0, 0]]}),
    ):
        taps = {"taps": [1]} if kind == "eagle3" else {}
        network = kinds.find(kind).network(kinds.configure(kind, taps, target().lm.config))
        weights = nets.Weights(network.init(jax.random.key(0)))
        methods.save(tmp_path / name, kind, network, weights, num_tokens=2)
        row = config.Row(
            name=name, drafter="trained", arguments={"folder": str(tmp_path / name), **arguments}
        )
        built = table.build(row, target())
        assert built.widths[-1] == 4
        expected = generate(target(), [[4, 2, 5]], max_new_tokens=8).tokens
        assert generate(target(), [[4, 2, 5]], max_new_tokens=8, drafter=built.drafter).tokens == expected
    for name, settings, message in (
        ("dynamic", {"tree": {"nodes": 4}}, "nodes"),
        ("static", {"proceed": {"confident": 0.5}}, "proceed: expected one of confidence, entropy_bound"),
        ("static", {"proceed": 0.5}, "proceed: expected a rule and its threshold, got 0.5"),
    ):
        wrong = {"folder": str(tmp_path / name), **settings}
        with pytest.raises(ValueError, match=f"drafters: 'x': .*{message}"):
            table.build(config.Row(name="x", drafter="trained", arguments=wrong), target())
    stops = {"folder": str(tmp_path / "static"), "num_tokens": 2, "proceed": {"confidence": 1.0}}
    built = table.build(config.Row(name="x", drafter="trained", arguments=stops), target())
    never = generate(target(), [[4, 2, 5]], max_new_tokens=8, drafter=built.drafter)
    assert never.stats.mean_accepted_length == 1


def test_a_trained_drafter_by_name(tmp_path, monkeypatch):
    """The one that comes with the package, or a folder's; both keep the answer."""
    named = dataclasses.replace(target(), name="tiny")
    network = kinds.find("medusa").network(kinds.configure("medusa", {}, named.lm.config))
    methods.save(
        tmp_path / "tiny", "medusa", network, nets.Weights(network.init(jax.random.key(0))), num_tokens=2
    )
    with pytest.raises(ValueError, match=r"folder: expected a draft network's, .* for 'tiny', got None"):
        generate(named, [[4, 2, 5]], drafter="trained")
    monkeypatch.setattr(methods.files, "SHIPPED", tmp_path)
    plain = generate(named, [[4, 2, 5]], max_new_tokens=8)
    found = generate(named, [[4, 2, 5]], max_new_tokens=8, drafter="trained")
    assert found.tokens == plain.tokens
    assert len(found.stats.proposed_by_position) == 2
    folder = str(tmp_path / "tiny")
    longer = text.named_drafter("trained", named, folder=folder, num_tokens=3)
    assert longer.method.depth == 3
    routed = text.named_drafter("trained", named, folder=folder, router={"num_tokens": 5})
    assert routed.method.depth == 5
    for settings, message in (
        ({"router": {"tokens": 5}}, r"router: expected arguments among \['num_tokens', .*got 'tokens'"),
        ({"router": 5}, r"router: expected arguments among \['num_tokens', .*got 5"),
        ({"tree": {"nodes": 4}}, "tree: expected arguments among .*got 'nodes'"),
        ({"depth": 3}, "depth: expected one of num_tokens, .* for a drafter of kind 'medusa'"),
    ):
        with pytest.raises(ValueError, match=message):
            text.named_drafter("trained", named, folder=folder, **settings)
    with pytest.raises(FileNotFoundError):
        text.named_drafter("trained", named, folder=str(tmp_path / "none"))
