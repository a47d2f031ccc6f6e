"""Training of draft networks, end to end with the smallest one."""

import dataclasses
import functools
import io
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_network import LINEAR, LinearConfig, linear_network

import jspec
from jspec.drafters import kinds, nets, stored
from jspec.testing import tiny_decoder, tiny_seq2seq
from training import __main__ as command
from training import drafter, forward, metrics, plan, recipe, teaching, text
from training.data import Example

VOCAB, END = 24, 1
EXAMPLES = [Example([4 + i % 18, 2 + i % 3, 3][: 1 + i % 3], [5, 6, END][i % 2 :]) for i in range(24)]
CORPUS = recipe.Corpus(EXAMPLES[:16], EXAMPLES[16:])


@pytest.fixture(autouse=True, scope="module")
def linear_kind():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kinds.KINDS, "linear", LINEAR)
        yield


@functools.cache
def target(kind="decoder"):
    if kind == "encoder-decoder":
        lm, params = tiny_seq2seq(vocab_size=VOCAB)
        return jspec.Model(lm, params, eos=(END,), decoder_start=(0,))
    lm, params = tiny_decoder(vocab_size=VOCAB)
    return jspec.Model(lm, params, eos=(END,), vocab_size=VOCAB - 2)


def settings(**changes):
    given = {
        "kind": "linear",
        "network": {"taps": [1, 2]},
        "head": "rows",
        "draft_vocab": 18,
        "num_tokens": 3,
        "anchors": 4,
        "loss": {
            "terms": [{"loss": "lk_hybrid"}, {"loss": "cross_entropy", "weight": 0.1}],
            "weighting": {"kind": "dpace"},
            "regression": 0.1,
        },
        "sources": [{"text": "target", "temperature": 1, "weight": 2}, {"text": "references"}],
        "features": "float16",
        "batching": {"batch_size": 8, "buckets": 1},
        "max_new_tokens": 8,
        "generation_batch": 8,
        "training": {
            "steps": 24,
            "optimizer": {"learning_rate": 0.02},
            "evaluate_every": 8,
            "checkpoint_every": 9,
        },
    }
    return drafter.Drafter.model_validate(given | changes)


def canned(model, examples, writing, temperature, seed, **_):
    """Answers as if written: what is compiled to generate them is not what these tests are about."""
    random = np.random.default_rng(int(temperature) + seed)
    return [
        Example(e.source, [*random.integers(2, 20, random.integers(2, 8)).tolist(), END]) for e in examples
    ]


@pytest.fixture
def no_generation(monkeypatch):
    monkeypatch.setattr(text, "answered", canned)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "answered", canned)
        found = drafter.run(settings(), CORPUS, folder / "run", target=target(), cache=folder / "cache")
    return found, folder / "run"


def rows_of(folder, evaluations):
    return [row for row in metrics.read(folder / metrics.FILE) if ("loss" in row) != evaluations]


# --- a run ------------------------------------------------------------------------------------------


def test_a_run_learns_and_writes_its_curve(trained):
    found, folder = trained
    losses = [row["loss"] for row in rows_of(folder, evaluations=False)]
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    curve = rows_of(folder, evaluations=True)
    assert [row["step"] for row in curve] == [8, 16, 24]
    assert curve[-1]["tau_1"] > curve[0]["tau_1"]
    for row in curve:
        assert row["tau_0"] == pytest.approx(1 + sum(row[f"accepted_{k}"] for k in (1, 2, 3)))
        assert row["accepted_1"] >= row["accepted_2"] >= row["accepted_3"]
        assert row["tokens_seen"] > 0
        assert 0 < row["alpha_1"] <= 1
    seen = [row["tokens_seen"] for row in curve]
    assert seen[1] / seen[0] == pytest.approx(2, rel=0.2)
    written = canned(target(), CORPUS.train, None, 1, 0)
    total = sum(len(example.target) for example in [*written, *CORPUS.train])
    assert [row["epochs"] for row in curve] == pytest.approx([tokens / total for tokens in seen])

    again = stored.load(folder, target())
    assert again.network is found.network
    assert again.num_tokens == 3
    jax.tree.map(np.testing.assert_array_equal, again.weights, found.weights)


def test_the_accuracies_of_its_choices_are_stored(trained):
    """Those of first choices are what the curve says at its end; ranks share what is right."""
    found, run = trained
    again = stored.load(run, target()).accuracies
    assert again is not None
    np.testing.assert_allclose(again, found.accuracies, atol=1e-4)
    (*_, last) = (line for line in metrics.read(run / metrics.FILE) if "tau_0" in line)
    assert again[0][0] == pytest.approx(last["accepted_1"], abs=1e-4)
    assert np.shape(again) == (3, drafter.RANKS)
    assert (np.sum(again, axis=1) <= 1 + 1e-3).all()
    with pytest.raises(ValueError, match="num_nodes: expected none for 'linear', which drafts no static"):
        stored.drafter(found, num_nodes=4)


def test_a_run_goes_on_exactly(trained, tmp_path, monkeypatch, no_generation):
    """Interrupted between two checkpoints: same losses, same curve, same weights."""
    whole, folder = trained
    batch = drafter.Batchwise.batch

    def interrupted(self, step, params=None):
        if step == 13:
            raise KeyboardInterrupt
        return batch(self, step, params)

    options = {"target": target(), "cache": folder.parent / "cache"}
    with monkeypatch.context() as patch:
        patch.setattr(drafter.Batchwise, "batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafter.run(settings(), CORPUS, tmp_path / "run", **options)
    assert not (tmp_path / "run" / stored.CONFIG).exists()
    again = drafter.run(settings(), CORPUS, tmp_path / "run", **options)
    jax.tree.map(np.testing.assert_array_equal, again.weights, whole.weights)
    assert (tmp_path / "run" / metrics.FILE).read_bytes() == (folder / metrics.FILE).read_bytes()
    assert (tmp_path / "run" / stored.TENSORS).read_bytes() == (folder / stored.TENSORS).read_bytes()


def test_a_finished_run_is_read_and_another_one_refused(trained):
    found, folder = trained
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    again = drafter.run(settings(), CORPUS, folder, target=target())
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before
    jax.tree.map(np.testing.assert_array_equal, again.weights, found.weights)
    with pytest.raises(ValueError, match=r"differs in anchors, loss\.weighting\.kind"):
        changed = {"weighting": {"kind": "decay"}}
        loss = settings().loss.model_dump() | changed
        drafter.run(settings(anchors=5, loss=loss), CORPUS, folder, target=target())


def test_the_curve_counts_answer_tokens():
    config = settings(training={"steps": 1})
    parts = [EXAMPLES[:16], EXAMPLES[4:9]]
    texts = drafter.Batchwise(config, parts, target(), lambda batches, part: batches)
    count = 0
    for step in range(9):
        count += int(texts.batch(step).weights.sum())
        assert texts.tokens_seen == count
    resumed = drafter.Batchwise(config, parts, target(), lambda batches, part: batches)
    resumed.batch(8)
    assert resumed.tokens_seen == count


def test_simulated_acceptance_is_that_of_the_laws():
    """Anchor by anchor in numpy, from the target's logits at all places."""
    config = settings(anchors=None, network={}, head="target", draft_vocab=None)
    model, taps = target(), ()
    network = drafter.network_of(config, model)
    begun = drafter.begin(config, model, network, [EXAMPLES])
    objective = drafter.teaching(config, model, network, [EXAMPLES])
    frozen = drafter.frozen_of(model, begun.weights)
    shapes = (config.batching, config.training, ())
    batches = recipe.held_out(EXAMPLES[:8], *shapes)
    found = teaching.simulate(objective, begun.weights.net, frozen, batches)
    (batch,) = batches

    @jax.jit
    def shown(params):
        hidden = forward.hidden(model.lm, params, batch, taps=taps).hidden
        return hidden, model.lm.head(params, hidden)

    hidden, logits = jax.device_get(shown(model.params))
    maps, kernel = jax.device_get((begun.weights.net["maps"], model.lm.head(model.params, jnp.eye(32))))
    size = model.vocab_size
    sums = {name: np.zeros(3) for name in ("exists", "accepted", "alpha", "kept")}
    for row, e in enumerate(EXAMPLES[:8]):
        end = len(e.source) + len(e.target)
        for a in range(len(e.source) - 1, end - 1):
            matches, alphas = 1.0, 1.0
            for k in range(3):
                if a + k + 1 >= end:
                    break
                state = hidden[row, a - 1] if a else np.zeros_like(hidden[row, 0])
                q = jax.nn.softmax((state @ maps[k] @ kernel)[:size])
                p = jax.nn.softmax(logits[row, a + k, :size])
                alpha = float(np.minimum(p, q).sum())
                matches *= float(p.argmax() == q.argmax())
                alphas *= alpha
                for name, value in (("exists", 1), ("accepted", matches), ("alpha", alpha), ("kept", alphas)):
                    sums[name][k] += value
    for name, value in (("accepted", sums["accepted"]), ("alpha", sums["alpha"])):
        got = [found[f"{name}_{k}"] for k in (1, 2, 3)]
        np.testing.assert_allclose(got, value / sums["exists"], rtol=1e-4)
    assert found["tau_1"] == pytest.approx(1 + (sums["kept"] / sums["exists"]).sum(), rel=1e-4)


def test_what_the_target_never_emits_is_no_part_of_a_law():
    """As in decoding: of target and network alike, with a reduced vocabulary and without."""
    free, banned = target(), dataclasses.replace(target(), banned=(5, 7))
    (batch,) = recipe.held_out(EXAMPLES[:8], settings().batching, settings().training, ())
    for changes in ({}, {"head": "target", "draft_vocab": None}):
        config = settings(anchors=None, **changes)
        network = drafter.network_of(config, free)
        begun = drafter.begin(config, free, network, [EXAMPLES])
        columns = np.arange(VOCAB - 2) if begun.weights.ids is None else np.asarray(begun.weights.ids)
        here = np.isin(columns, (5, 7))
        found = []
        for model in (free, banned):
            objective = drafter.teaching(config, model, network, [EXAMPLES])
            frozen = drafter.frozen_of(model, begun.weights)
            taught = objective.taught(begun.weights.net, frozen, batch, jax.random.key(0))
            found.append((taught[0].target, taught[1]))
            assert not np.isin(np.asarray(taught[0].best), (5, 7)).any() or model is free
        for plain, without in zip(*found, strict=True):
            assert here.any()
            assert np.isneginf(np.asarray(without)[..., here]).all()
            np.testing.assert_array_equal(np.asarray(without)[..., ~here], np.asarray(plain)[..., ~here])


# --- other ways -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_features_on_disk_and_on_the_fly_teach_the_same(trained, tmp_path, no_generation):
    _, folder = trained
    changes = {"training": {"steps": 4, "optimizer": {"learning_rate": 0.02}}}
    found = {}
    for precision in (None, "float16"):
        where = tmp_path / str(precision)
        config = settings(features=precision, **changes)
        drafter.run(config, CORPUS, where, target=target(), cache=folder.parent / "cache")
        found[precision] = [row["loss"] for row in rows_of(where, evaluations=False)]
    np.testing.assert_allclose(found["float16"], found[None], rtol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize(
    "changes",
    [
        {"head": "target", "draft_vocab": None, "network": {}},
        {"head": "own", "draft_vocab": None},
        {"head": "own", "features": "bfloat16", "anchors": None},
    ],
)
def test_every_head_learns(kind, changes, tmp_path):
    config = settings(**changes)
    model = target(kind)
    found = drafter.run(config, CORPUS, tmp_path / "run", target=model)
    losses = [row["loss"] for row in rows_of(tmp_path / "run", evaluations=False)]
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:4])
    if config.head == "own":
        first = drafter.begin(config, model, found.network, [EXAMPLES]).weights
        assert first.net["head"].shape == (32, config.draft_vocab or VOCAB)
        columns = first.ids if first.ids is not None else jnp.arange(VOCAB)
        rows = nets.rows_of_head(model.lm, model.params, columns)
        np.testing.assert_array_equal(first.net["head"], rows)
        assert (found.weights.net["head"] != first.net["head"]).any()
    again = stored.load(tmp_path / "run", model)
    jax.tree.map(np.testing.assert_array_equal, again.weights, found.weights)
    sources = [e.source for e in EXAMPLES[:3]]
    plain = jspec.generate(model, sources, max_new_tokens=6)
    drafted = jspec.generate(model, sources, max_new_tokens=6, drafter=stored.drafter(again))
    assert drafted.tokens == plain.tokens


@pytest.mark.slow
def test_going_on_from_a_stored_drafter(trained, tmp_path, no_generation):
    _, folder = trained
    config = settings(init=str(folder), training={"steps": 2, "optimizer": {"learning_rate": 1e-3}})
    drafter.run(config, CORPUS, tmp_path / "run", target=target(), cache=folder.parent / "cache")
    losses = [row["loss"] for row in rows_of(tmp_path / "run", evaluations=False)]
    before = [row["loss"] for row in rows_of(folder, evaluations=False)]
    assert losses[0] < 0.9 * before[0]
    with pytest.raises(ValueError, match="init: expected a drafter with LinearConfig"):
        drafter.run(
            settings(init=str(folder), network={"taps": [0, 2]}), CORPUS, tmp_path / "other", target=target()
        )


@pytest.mark.slow
def test_gradients_are_accumulated_over_micro_batches(trained, tmp_path, no_generation):
    """All anchors, a loss without draft vocabulary: exactly the large batch's."""
    found = {}
    for parts in (1, 2):
        config = settings(
            anchors=None,
            head="target",
            draft_vocab=None,
            training={"steps": 3, "accumulate": parts, "optimizer": {"learning_rate": 0.02}},
        )
        where = tmp_path / str(parts)
        drafter.run(config, CORPUS, where, target=target(), cache=trained[1].parent / "cache")
        found[parts] = [row["loss"] for row in rows_of(where, evaluations=False)]
    np.testing.assert_allclose(found[2], found[1], rtol=1e-4)


@pytest.mark.slow
def test_a_plan_is_measured():
    speeds = plan.measure(settings(), CORPUS, target=target())
    assert min(speeds.generation, speeds.features, speeds.training, speeds.step) > 0
    assert speeds.feature_bytes > 2 * 3 * 32
    text = "\n".join(plan.lines(speeds))
    for word in ("generation", "features", "training", "all", "5,000,000", "bytes an answer token"):
        assert word in text
    on_the_fly = plan.measure(settings(features=None), CORPUS, target=target())
    assert on_the_fly.features is None
    assert "computed in every step" in "\n".join(plan.lines(on_the_fly))


@pytest.mark.slow
def test_the_command_line(tmp_path, monkeypatch):
    """From text to a folder, on an encoder-decoder that the command line has trained."""
    words = [" ".join(["ab", "cd", "ef", "gh"][i % 4 :]) for i in range(24)]
    for name in ("en", "de"):
        (tmp_path / f"all.{name}").write_text("\n".join(words) + "\n")
    part = {"format": "parallel", "source": "all.en", "target": "all.de"}
    shared = {
        "data": {"train": {"format": "several", "parts": [part, part]}, "validation": part},
        "batching": {"batch_size": 8, "buckets": 1},
        "training": {"steps": 3},
    }
    architecture = dataclasses.asdict(tiny_seq2seq()[0].config) | {"kind": "encoder-decoder"}
    del architecture["vocab_size"]
    network = {"kind": "linear", "target": str(tmp_path / "target"), "max_new_tokens": 6, "num_tokens": 3}
    for name, own in (
        ("target", {"architecture": architecture, "tokenizer": {"vocab_size": 60}}),
        ("network", network),
    ):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(own | shared))

    def say(*arguments):
        out = io.StringIO()
        monkeypatch.setattr(sys, "argv", ["training", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(jax.config, "update", lambda name, value: None)
        with pytest.raises(SystemExit) as ended:
            command.run()
        assert not ended.value.code
        return out.getvalue()

    for name, recipe_name in (("target", "finetune"), ("network", "drafter")):
        config = ("--config", tmp_path / f"{name}.yaml", "--data", tmp_path)
        out = say(recipe_name, *config, "--output", tmp_path / name)
    assert "tau_0" in out
    assert out.splitlines()[-1] == str(tmp_path / "network")
    model = jspec.load(tmp_path / "target")
    assert stored.load(tmp_path / "network", model).kind == "linear"
    assert "5,000,000" in say("plan", *config)


# --- folders and settings ---------------------------------------------------------------------------


def test_a_stored_drafter_belongs_to_its_target(trained, tmp_path):
    found, folder = trained
    values = json.loads((folder / stored.CONFIG).read_text())
    assert (values["kind"], values["num_tokens"]) == ("linear", 3)
    other = jspec.Model(*tiny_decoder(vocab_size=VOCAB + 1))
    with pytest.raises(ValueError, match="made for a target of vocab_size 24, got one of 25"):
        stored.load(folder, other)
    with pytest.raises(FileNotFoundError, match=r"drafter: no config\.json in"):
        stored.load(tmp_path, target())
    config = LinearConfig(width=32, vocab_size=VOCAB, head="rows", draft_vocab=18, taps=(1,))
    stored.save(tmp_path, "linear", config, found.weights)
    with pytest.raises(ValueError, match=r"net\.maps: expected shape \(3, 32, 32\), got \(3, 64, 32\)"):
        stored.load(tmp_path, target())


def test_wrong_settings(tmp_path, trained):
    for changes, message in (
        ({"kind": "liner"}, "kind: expected one of .*linear.*, got 'liner'"),
        ({"draft_vocab": None}, "draft_vocab: expected a number of tokens with head: rows, got None"),
        ({"head": "target"}, "draft_vocab: expected None with head: target, got 18"),
        ({"sources": [{"text": "drafter", "every": 2, "examples": 2}]}, "sources: expected text of refer"),
        ({"training": {"steps": 1, "dropout": 0.1}}, r"training\.dropout: expected 0, got 0\.1"),
        ({"features": None, "kept_taps": [1]}, r"kept_taps: expected None without features, got \(1,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            settings(**changes)
    for changes, message in (
        ({"network": {"tap": [1]}}, "network: unknown key 'tap' for a drafter of kind 'linear'"),
        ({"network": {"depth": 0}}, "network: depth: expected a number >= 1, got 0"),
        ({"network": {"depth": "x"}}, "network: depth: Input should be a valid integer"),
        ({"network": {"width": 3}}, r"network\.width: expected none, it is the target's"),
        (
            {"network": {"taps": [3]}},
            r"network: expected taps in 0 \.\. 2 \(the target's layers\), got \(3,\)",
        ),
        ({"kept_taps": [1]}, r"kept_taps: expected layers in 0 \.\. 2, the network's \(1, 2\) among them"),
        ({"kept_taps": [1, 2, 3]}, r"kept_taps: expected layers in 0 \.\. 2, .* got \(1, 2, 3\)"),
        ({"draft_vocab": 99}, "draft_vocab: expected at most 22"),
        ({"layers": [1]}, "layers: expected none, the network has no layers"),
        ({"init": str(trained[1]), "draft_vocab": 17}, r"init: expected a drafter with .*draft_vocab=17"),
    ):
        # Nothing is written before these are told.
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=message):
            patch.setattr(text, "answered", None)
            drafter.run(settings(**changes), CORPUS, tmp_path / "run", target=target())
    capped = jspec.Model(*tiny_decoder(vocab_size=VOCAB, logit_softcap=2.0), eos=(END,))
    with pytest.raises(ValueError, match="head: expected 'target' or 'own' for a target whose head has"):
        drafter.network_of(settings(), capped)
    with pytest.raises(ValueError, match="target: expected a checkpoint"):
        drafter.run(settings(), CORPUS, tmp_path / "run")
    plain = LINEAR._replace(network=lambda config: linear_network(config)._replace(details=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kinds.KINDS, "linear", plain)
        with pytest.raises(ValueError, match=r"loss\.regression: expected 0 for a drafter of kind 'linear'"):
            drafter.network_of(settings(), target())


MASKED = {"kind": "masked", "network": {"num_tokens": 3}, "head": "own", "draft_vocab": None}
MASKED |= {"loss": {"terms": [{"loss": "forward_kl"}]}}


@pytest.mark.slow
def test_a_masked_network_begins_as_some_of_the_target_s_layers(tmp_path, no_generation):
    """It learns, is stored, and drafts."""
    optimizer = {"learning_rate": 0.003}
    training = {"steps": 24, "optimizer": optimizer, "evaluate_every": 8, "checkpoint_every": 24}
    config = settings(**MASKED, model={"layers": [1]}, training=training)
    model = drafter.model_of(config, target())
    network = drafter.network_of(config, target(), model)
    begun = drafter.begin(config, target(), network, [EXAMPLES], model=model)
    before = begun.weights.net["lm"]["layers"][0]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(before, target().params["layers"][1]["mlp"]["up"]["kernel"])
    found = drafter.run(config, CORPUS, tmp_path / "run", target=target())
    lines = [line for line in metrics.read(tmp_path / "run" / metrics.FILE) if "tau_0" in line]
    assert lines[-1]["alpha_1"] > lines[0]["alpha_1"]
    again = stored.load(tmp_path / "run", target())
    assert again.network.config == found.network.config
    prompts = [e.source for e in EXAMPLES[:3]]
    plain = jspec.generate(target(), prompts, max_new_tokens=8)
    drafted = jspec.generate(target(), prompts, drafter=stored.drafter(again), max_new_tokens=8)
    assert drafted.tokens == plain.tokens


def test_a_masked_network_serves_targets_whose_logits_are_padded_otherwise(tmp_path):
    """It reads nothing of them. A target with tokens that it does not know is another one."""
    network = drafter.network_of(
        config := settings(**MASKED, model={"layers": [0]}), target(), drafter.model_of(config, target())
    )
    stored.save(tmp_path, "masked", network.config, nets.Weights(network.init(jax.random.key(0))))
    lm, params = tiny_decoder(vocab_size=VOCAB + 8)
    padded = jspec.Model(lm, params, eos=(END,), vocab_size=VOCAB - 2)
    assert stored.load(tmp_path, padded).network.config.vocab_size == VOCAB + 8
    with pytest.raises(ValueError, match="made for a target of vocab_size 24, got one of 32"):
        stored.load(tmp_path, dataclasses.replace(padded, vocab_size=VOCAB + 8))


@pytest.mark.slow
def test_a_masked_network_serves_targets_of_any_width(tmp_path):
    lm, params = tiny_decoder(vocab_size=VOCAB, width=48)
    wide = jspec.Model(lm, params, eos=(END,), vocab_size=VOCAB - 2)
    network = drafter.network_of(
        config := settings(**MASKED, model={"layers": [0]}), target(), drafter.model_of(config, target())
    )
    stored.save(tmp_path, "masked", network.config, nets.Weights(network.init(jax.random.key(0))))
    found = stored.drafter(stored.load(tmp_path, wide), 3)
    plain = jspec.generate(wide, [[3, 4]], max_new_tokens=6)
    assert jspec.generate(wide, [[3, 4]], drafter=found, max_new_tokens=6).tokens == plain.tokens


def test_which_language_model_a_masked_network_is():
    for changes, message in (
        ({"model": {"layers": [0]}}, "model: expected none for a drafter of kind 'linear', got one"),
        ({**MASKED, "model": {"layers": [0]}, "init": "x"}, "model: expected none with init"),
    ):
        with pytest.raises(ValueError, match=message):
            settings(**changes)
    for changes, message in (
        ({"model": {"layers": [2]}}, r"layers: expected indices in 0 \.\. 1, got \[2\]"),
        ({"model": {"architecture": {"kind": "decoder", "widht": 8}}}, r"model\.architecture"),
        ({"model": {"layers": [0]}, "network": {"lm": {}}}, r"network\.lm: expected none, it is that of"),
        ({}, "network: lm: Field required"),
    ):
        config = settings(**(MASKED | changes))
        with pytest.raises(ValueError, match=message):
            drafter.network_of(config, target(), drafter.model_of(config, target()))
