"""Draft networks compared: one command trains them on the same text and measures them in one table."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import pytest
import rich.console
from linear_network import LINEAR

from experiments import config, drafters, study, table
from experiments.drafters import Point, Trained
from experiments.stages import Stages
from jspec import drafters as methods
from jspec import generate, models, testing, text
from jspec.checkpoint import Model
from jspec.drafters import kinds, nets
from jspec.models.rotary import Rotary
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
    shared = ("sources", "data", "limits", "chat", "max_new_tokens", "features", "kept_taps")
    smollm2 = models.DecoderConfig(
        vocab_size=49152,
        width=576,
        mlp_width=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        context_length=8192,
        rotary=Rotary((1.0,) * 32),
    )
    for found in recipes:
        assert [getattr(found, key) for key in shared] == [getattr(recipes[0], key) for key in shared]
        settings = found.network | ({} if found.model is None else {"lm": dataclasses.asdict(smollm2)})
        sizes = {"head": found.head, "draft_vocab": found.draft_vocab}
        network = kinds.find(found.kind).network(kinds.configure(found.kind, settings, smollm2, **sizes))
        assert {*network.taps} <= {*(network.taps if found.kept_taps is None else found.kept_taps)}
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
    built = table.build(own, target())
    prompt = [[4, 2, 5]]
    expected = generate(target(), prompt, max_new_tokens=8).tokens
    assert generate(target(), prompt, max_new_tokens=8, drafter=built.drafter).tokens == expected


def test_what_a_row_asks_of_its_network_is_found_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "given", lambda *named: target())
    early = drafters.rehearsed(config.Drafters.model_validate(content()), tmp_path)
    own, other = early.drafters
    assert table.build(own, target()).drafter.method.depth == 1
    assert other.arguments == {"folder": "smollm2-135m"}
    wrong = {"name": "own", "drafter": "trained", "arguments": {"folder": "taps", "steps": 2}}
    early = drafters.rehearsed(config.Drafters.model_validate(content(table={"drafters": [wrong]})), tmp_path)
    with pytest.raises(ValueError, match="drafters: 'own': steps: expected one of num_tokens, sample"):
        table.build(early.drafters[0], target())
    beyond = config.Drafters.model_validate(content(methods={"hidden": {"network": {"taps": [9]}}}))
    with pytest.raises(ValueError, match=r"network: expected taps in 0 \.\. 2 .* got \(9,\)"):
        drafters.rehearsed(beyond, tmp_path)


def test_a_method_that_is_trained_anew_has_a_time_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "given", lambda *named: target())
    monkeypatch.setattr(recipe, "read", lambda data, folder: recipe.Corpus(EXAMPLES, EXAMPLES))
    settings = config.Drafters.model_validate(content())
    console = rich.console.Console(width=160, record=True)
    stages = Stages(tmp_path, console)
    drafters.train(settings, tmp_path, tmp_path, stages, console)
    stages.times["taps"]["seconds"] = 1e6
    shutil.rmtree(tmp_path / "taps")
    assert drafters.train(settings, tmp_path, tmp_path, stages, console)["taps"].seconds < 1e5
    assert stages.times["taps"]["attempts"] == 1


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
