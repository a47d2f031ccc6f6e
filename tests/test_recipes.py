"""Fine-tuning and distillation, end to end on a toy: an answer counts on from its source's first token."""

import contextlib
import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jspec
from jspec.io.tokenizer import from_folder
from jspec.models import DecoderConfig, Seq2SeqConfig
from jspec.models.rotary import Rotary
from jspec.testing import table_lm, tiny_checkpoint, tiny_decoder, tiny_seq2seq
from training import __main__ as command
from training import (
    acceptance,
    config,
    data,
    distill,
    finetune,
    forward,
    init,
    losses,
    metrics,
    recipe,
    text,
)
from training.config import Batching, Optimizer, Training
from training.data import Batches, Example, Record
from training.tokenizer import TokenizerConfig, build, save

VOCAB, END = 24, 1


def example(first, length):
    return Example([first, 2, END], [*((first + i) % 20 + 4 for i in range(length)), END])


EXAMPLES = [example(4 + i % 20, 3 + i % 4) for i in range(60)]
SOURCES = [e.source for e in EXAMPLES[:8]]
CORPUS = recipe.Corpus(EXAMPLES, EXAMPLES[::3])
ARCHITECTURE = {
    "kind": "encoder-decoder",
    "vocab_size": VOCAB,
    "width": 16,
    "mlp_width": 32,
    "num_layers": 1,
    "num_encoder_layers": 1,
    "num_heads": 2,
    "head_dim": 8,
    "relative_buckets": 8,
}
IDS = {"eos": END, "decoder_start": 0}
BATCHING = Batching(batch_size=16, buckets=1)


def training(steps, **changes):
    rate = Optimizer(learning_rate=0.02, warmup_steps=min(5, steps))
    return Training(steps=steps, optimizer=rate, checkpoint_every=10, **changes)


def losses_of(folder):
    return [row["loss"] for row in metrics.read(folder / "metrics.jsonl") if "loss" in row]


def evaluations(folder):
    return [row for row in metrics.read(folder / "metrics.jsonl") if "loss" not in row]


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "target"
    settings = finetune.Finetune(
        architecture=ARCHITECTURE, **IDS, batching=BATCHING, label_smoothing=0.05, training=training(100)
    )
    return finetune.run(settings, CORPUS, folder), settings, folder


# --- fine-tuning ------------------------------------------------------------------------------------


def test_finetuning_learns_and_the_folder_decodes(finetuned):
    _, _, folder = finetuned
    found = losses_of(folder)
    assert found[-1] < 0.3 * found[0]
    assert evaluations(folder)[-1]["accuracy"] > 0.8
    model = jspec.load(folder)
    assert (model.eos, model.decoder_start, model.vocab_size) == ((END,), (0,), VOCAB)
    answers = jspec.generate(model, SOURCES, max_new_tokens=8).tokens
    right = [answer[:3] == e.target[:3] for answer, e in zip(answers, EXAMPLES, strict=False)]
    assert sum(right) >= 6


def test_a_finished_run_is_read_and_another_one_refused(finetuned):
    model, settings, folder = finetuned
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    again = finetune.run(settings, CORPUS, folder)
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before
    assert again.lm is model.lm
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    with pytest.raises(ValueError, match=r"differs in label_smoothing, training\.steps;"):
        changes = {"label_smoothing": 0.0, "training": training(90)}
        finetune.run(settings.model_copy(update=changes), CORPUS, folder)
    with pytest.raises(ValueError, match="differs in train;"):
        finetune.run(settings, CORPUS._replace(train=EXAMPLES[1:]), folder)


def test_from_a_checkpoint(finetuned, tmp_path):
    """It starts where the checkpoint is, not from scratch."""
    _, _, folder = finetuned
    settings = finetune.Finetune(
        checkpoint=str(folder), batching=BATCHING, label_smoothing=0.05, training=training(100)
    )
    model = finetune.run(settings, CORPUS, tmp_path / "more")
    assert losses_of(tmp_path / "more")[0] < 1.2 * losses_of(folder)[-1]
    assert model.decoder_start == (0,)
    with pytest.raises(ValueError, match="differs in checkpoint;"):  # another model at the same place
        inputs = json.loads((tmp_path / "more" / "inputs.json").read_text())
        (tmp_path / "more" / "inputs.json").write_text(json.dumps(inputs | {"checkpoint": "another"}))
        finetune.run(settings, CORPUS, tmp_path / "more")


def test_a_decoder_only_model_learns_answers_only(tmp_path):
    lm, _ = tiny_decoder(vocab_size=VOCAB, num_layers=1, width=16)
    values = {**dataclasses.asdict(lm.config), "kind": "decoder", "rotary": {"rope_theta": 100.0}}
    settings = finetune.Finetune(architecture=values, eos=END, batching=BATCHING, training=training(60))
    model = finetune.run(settings, CORPUS, tmp_path / "run")
    found = losses_of(tmp_path / "run")
    assert found[-1] < 0.5 * found[0]
    assert model.decoder_start == ()
    assert model.lm.config.rotary.frequencies[0] == 1.0


# --- the command line -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def say():
    """Run ``python -m training`` in this process: exit code, and what it says."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    kept = {name: getattr(jax.config, name) for name in names}

    def run(*arguments):
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["training", *map(str, arguments)])
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as ended:
                command.run()
        return ended.value.code or 0, out.getvalue(), err.getvalue()

    yield run
    for name, value in kept.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def spoken(say, tmp_path_factory):
    """The command line, from a YAML file and parallel text to a folder that answers in text."""
    folder = tmp_path_factory.mktemp("text")
    words = [" ".join(["ab", "cd", "ef", "gh"][i % 4 :]) for i in range(24)]
    for name in ("train", "val"):
        (folder / f"{name}.en").write_text("\n".join(words) + "\n")
        (folder / f"{name}.de").write_text("\n".join(w.upper() for w in words) + "\n")
    shared = {
        "data": {
            name: {"format": "parallel", "source": f"{part}.en", "target": f"{part}.de"}
            for name, part in (("train", "train"), ("validation", "val"))
        },
        "batching": {"batch_size": 8, "buckets": 1},
        "training": {"steps": 4},
    }
    target = {
        "architecture": {key: value for key, value in ARCHITECTURE.items() if key != "vocab_size"},
        "tokenizer": {"vocab_size": 60},
    }
    drafter = {"target": str(folder / "target"), "drafter": {"layers": [0]}}
    for name, settings in (("target", target), ("drafter", drafter)):
        (folder / f"{name}.yaml").write_text(json.dumps(settings | shared))  # JSON is YAML
    code, out, err = say("finetune", *arguments(folder, "target"))
    assert code == 0, err
    return folder, out


def arguments(folder, name):
    return "--config", folder / f"{name}.yaml", "--data", folder, "--output", folder / name


def test_the_examples_among_the_project_s_configurations():
    """Two recipes of the study that they name, one after the other."""
    folder = Path(__file__).parent.parent / "configs"
    target = config.load(folder / "finetune_en_de.yaml", finetune.Finetune)
    drafter = config.load(folder / "distill_en_de.yaml", distill.Distill)
    assert drafter.target == "runs/finetune_en_de"  # where the first one trains
    study = config.read(folder / "t5_en_de_cpu.yaml")
    for name in ("tokenizer", "architecture", "batching", "training"):
        given = config.read(folder / "finetune_en_de.yaml")[name]
        assert given == study["target"]["finetune"][name], name
    for mine, theirs in (
        (drafter.drafter.architecture, study["drafters"]["small"]["start"]["architecture"]),
        (drafter.training, Training.model_validate(study["drafters"]["small"]["training"])),
        (drafter.loss, study["recipes"]["distilled"]["loss"]),
        (drafter.features, study["recipes"]["distilled"]["features"]),
    ):
        assert mine == theirs
    assert target.data == drafter.data


def test_text_gets_a_tokenizer_of_its_own(spoken):
    folder, out = spoken
    assert "step 4: " in out
    assert out.splitlines()[-1] == str(folder / "target")
    model = jspec.load(folder / "target")
    assert model.tokenizer is not None
    assert model.lm.config.vocab_size == model.vocab_size == len(model.tokenizer.vocabulary)
    assert (model.eos, model.decoder_start) == ((1,), (0,))
    assert isinstance(jspec.generate(model, "ab cd", max_new_tokens=3).texts[0], str)


def test_the_command_line_distils(spoken, say):
    folder, _ = spoken
    code, out, err = say("distill", *arguments(folder, "drafter"))
    assert code == 0, err
    assert "alpha_1" in out
    target, drafter = (jspec.load(folder / name) for name in ("target", "drafter"))
    assert drafter.vocabulary == target.vocabulary
    assert drafter.decoder_start == target.decoder_start


def test_what_a_user_can_mend_is_one_line_on_standard_error(tmp_path, say):
    (tmp_path / "x.yaml").write_text("drafter: {layers: [0]}\ntraining: {steps: 1}\nlos: jsd\n")
    for name, message in (("x", "los: unknown key"), ("y", "config: no such file: ")):
        code, out, err = say("distill", "--config", tmp_path / f"{name}.yaml")
        assert (code, out) == (1, "")
        assert err.startswith("error: ")
        assert message in err
        assert err.count("\n") == 1


def test_a_tokenizer_that_was_cut_off_is_made_again(spoken, tmp_path, monkeypatch):
    """Killed between its two files, and while the model was described."""
    folder, _ = spoken
    settings = config.load(folder / "target.yaml", finetune.Finetune)
    corpus = recipe.read(settings.data, folder)
    output = tmp_path / "run"
    replace, calls = recipe.os.replace, []

    class Killed(BaseException):
        pass

    def die(path, place):
        calls.append(Path(place).name)
        if calls[-1] == killed:
            raise Killed
        replace(path, place)

    with monkeypatch.context() as patch:
        patch.setattr(recipe.os, "replace", die)
        patch.setattr(Path, "replace", lambda path, place: die(path, place))
        for name in ("tokenizer.json", "model.json"):
            killed = name
            with pytest.raises(Killed):
                finetune.run(settings, corpus, output)
            assert not (output / "model.json").exists()
        patch.setattr(finetune, "fit", lambda *arguments, **options: None)
        killed, calls[:] = None, []
        with pytest.raises(FileNotFoundError):  # nothing was trained
            finetune.run(settings, corpus, output)
        assert calls[-1] == "model.json"
        assert calls.count("tokenizer.json") == 1  # described, not trained again
        calls.clear()
        with pytest.raises(FileNotFoundError):
            finetune.run(settings, corpus, output)
        assert calls == []  # nothing is written again
    for name in ("tokenizer.json", "tokenizer_config.json", "model.json"):
        assert (output / name).read_bytes() == (folder / "target" / name).read_bytes()


def test_a_decoder_is_trained_on_the_prompts_that_it_gets(tmp_path, monkeypatch):
    """From scratch, text in, text out."""
    lm, _ = tiny_decoder(num_layers=1, width=16)
    values = {**dataclasses.asdict(lm.config), "kind": "decoder", "rotary": {"rope_theta": 100.0}}
    del values["vocab_size"]
    given = {"architecture": values, "batching": BATCHING, "training": training(1)}
    with pytest.raises(ValueError, match=r"tokenizer\.append_end: expected false for a decoder"):
        finetune.Finetune(**given, tokenizer=TokenizerConfig(vocab_size=60))
    records = [Record("ab cd", "CD ab"), Record("cd", "ab")]
    settings = finetune.Finetune(**given, tokenizer=TokenizerConfig(vocab_size=60, append_end=False))
    seen = []
    monkeypatch.setattr(finetune, "fit", lambda params, objective, source, *rest, **_: seen.append(source))
    with pytest.raises(FileNotFoundError):
        finetune.run(settings, recipe.Corpus(records, records), tmp_path / "run")
    batch = seen[0](0, None)
    spoken = from_folder(tmp_path / "run")
    texts = []
    for row in np.flatnonzero(batch.weights.any(1)):
        first = int(np.flatnonzero(batch.weights[row])[0]) + 1
        texts.append(batch.tokens[row, :first].tolist())
    assert sorted(texts) == sorted(spoken.encode(record.source) for record in records)
    wrong = save(build(["ab cd"], 20), tmp_path / "wrong")
    with pytest.raises(ValueError, match="tokenizer: expected one that puts no end token"):
        data.encode(records, wrong, encoder=False, limits=data.Limits())


def test_wrong_finetuning_settings(tmp_path):
    settings = {"architecture": ARCHITECTURE, **IDS, "training": training(1)}
    with pytest.raises(ValueError, match="expected one of checkpoint and architecture"):
        finetune.Finetune(**settings, checkpoint="x")
    with pytest.raises(ValueError, match="tokenizer: expected none with a checkpoint"):
        finetune.Finetune(checkpoint="x", tokenizer=TokenizerConfig(), training=training(1))
    with pytest.raises(ValueError, match="eos: expected none with a checkpoint"):
        finetune.Finetune(checkpoint="x", eos=1, training=training(1))
    for name in IDS:
        wrong = finetune.Finetune(**settings | {name: None})
        with pytest.raises(ValueError, match=f"{name}: expected the id of "):
            finetune.run(wrong, CORPUS, tmp_path / "run")
    for change, message in (
        ({"widht": 3}, "architecture: unknown key 'widht'"),
        ({"kind": "encoder"}, r"architecture\.kind: expected one of decoder, encoder-decoder, got 'encoder'"),
        ({"width": "wide"}, "architecture: width: "),
    ):
        wrong = finetune.Finetune(**settings | {"architecture": ARCHITECTURE | change})
        with pytest.raises(ValueError, match=message):
            finetune.run(wrong, CORPUS, tmp_path / "run")
    with pytest.raises(ValueError, match=r"train: expected examples \(token ids\)"):
        finetune.run(
            finetune.Finetune(**settings),
            recipe.Corpus([Record("a", "b")], [Record("a", "b")]),
            tmp_path / "text",
        )
    with pytest.raises(ValueError, match="data: expected train and validation"):
        recipe.read(None, tmp_path)


# --- distillation -----------------------------------------------------------------------------------

SMALL = ARCHITECTURE | {"width": 8, "mlp_width": 8, "num_heads": 1}
ALL_SOURCES = (
    text.Source(text="references", weight=2),
    text.Source(text="target", temperature=1.0, examples=32),
    text.Source(text="drafter", temperature=1.0, examples=16, every=8),
)


def settings_of(**changes):
    given = {
        "drafter": distill.Drafter(architecture=SMALL),
        "loss": "lk_hybrid",
        "batching": BATCHING,
        "max_new_tokens": 8,
        "generation_batch": 16,
        "training": training(40, evaluate_every=13),
    }
    return distill.Distill(**given | changes)


@pytest.fixture(scope="module")
def distilled(finetuned, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "drafter"
    return distill.run(settings_of(), CORPUS, folder, target=finetuned[0]), folder


def test_distillation_raises_acceptance(finetuned, distilled):
    target, (drafter, folder) = finetuned[0], distilled
    first, *_, last = evaluations(folder)
    assert last["alpha_1"] > first["alpha_1"] + 0.1
    assert last["greedy_agreement"] > first["greedy_agreement"]
    assert last["tau_1"] == pytest.approx(sum(last["alpha_1"] ** i for i in range(6)))
    found = losses_of(folder)
    assert found[-1] < 0.7 * found[0]
    plain = jspec.generate(target, SOURCES, max_new_tokens=8)
    drafted = jspec.generate(target, SOURCES, max_new_tokens=8, drafter=jspec.load(folder))
    assert drafted.tokens == plain.tokens
    assert drafted.stats.rounds < plain.stats.rounds
    assert drafter.eos == target.eos


def softmax(logits):
    mass = np.exp(logits - logits.max(-1, keepdims=True))
    return mass / mass.sum(-1, keepdims=True)


def test_evaluation_equals_a_law_by_law_computation(finetuned):
    """alpha, agreement and cross-entropy, position by position in numpy."""
    target, _, _ = finetuned
    lm, params = tiny_seq2seq(vocab_size=VOCAB, width=16, num_heads=2, num_layers=1, num_encoder_layers=1)
    batches = recipe.held_out(EXAMPLES[:5], BATCHING, training(1), (0,))
    found = acceptance.simulate(
        target.lm, target.params, lm, params, batches, gamma=3, temperatures=(1.0, 0.5)
    )
    sums, number = np.zeros(4), 0
    (batch,) = batches
    p, q = (
        np.asarray(jax.jit(forward.logits, static_argnums=0)(m, w, batch), np.float64)
        for m, w in ((target.lm, target.params), (lm, params))
    )
    for row, e in enumerate(EXAMPLES[:5]):
        at = range(len(e.target))
        sums += [
            -np.log(softmax(q[row])[at, e.target]).sum(),
            (p[row].argmax(-1) == q[row].argmax(-1))[at].sum(),
            np.minimum(softmax(p[row]), softmax(q[row]))[at].sum(),
            np.minimum(softmax(2 * p[row]), softmax(2 * q[row]))[at].sum(),
        ]
        number += len(e.target)
    names = ("validation_loss", "greedy_agreement", "alpha_1", "alpha_0.5")
    np.testing.assert_allclose([found[name] for name in names], sums / number, rtol=1e-4)
    assert found["tau_0.5"] == pytest.approx(acceptance.tau(found["alpha_0.5"], 3))


def test_padding_is_no_part_of_a_law():
    """Logits beyond the vocabulary, large ones, as an untrained head may have them."""
    laws = np.random.default_rng(1).dirichlet(np.ones(VOCAB), (2, VOCAB))
    models_ = [table_lm(law) for law in laws]
    wide = []
    for _, logits in models_:
        padded = np.full((VOCAB + 3, VOCAB + 3), 9.0, np.float32)
        padded[:VOCAB, :VOCAB] = logits
        wide.append((table_lm(np.eye(VOCAB + 3))[0], jax.numpy.asarray(padded)))
    batches = recipe.held_out(EXAMPLES[:8], BATCHING, training(1), ())
    plain = acceptance.simulate(*models_[0], *models_[1], batches)
    assert acceptance.simulate(*wide[0], *wide[1], batches, width=VOCAB) == pytest.approx(plain, rel=1e-5)
    assert acceptance.simulate(*wide[0], *wide[1], batches)["alpha_1"] > plain["alpha_1"] + 0.1
    alone = acceptance.validate(*models_[1], batches)
    assert acceptance.validate(*wide[1], batches, width=VOCAB) == pytest.approx(alone, rel=1e-5)


BANNED = (2, 5)


def test_what_never_comes_out_is_no_part_of_a_law():
    """A banned token is a token of probability 0: evaluations, losses and gradients."""
    laws = np.random.default_rng(2).dirichlet(np.ones(VOCAB), (2, VOCAB))
    (target, p), (drafter, q) = map(table_lm, laws)
    without = laws.copy()
    without[..., list(BANNED)] = 0
    (_, masked_p), (_, masked_q) = map(table_lm, without)
    banless = [Example(e.source, [token for token in e.target if token not in BANNED]) for e in EXAMPLES]
    batches = recipe.held_out(banless[:8], BATCHING, training(1), ())
    options = {"width": VOCAB, "temperatures": (1.0,)}
    expected = acceptance.simulate(target, masked_p, drafter, masked_q, batches, **options)
    found = acceptance.simulate(target, p, drafter, q, batches, banned=BANNED, **options)
    assert found == pytest.approx(expected, rel=1e-5)
    assert acceptance.validate(drafter, q, batches, banned=BANNED) == pytest.approx(
        acceptance.validate(drafter, masked_q, batches), rel=1e-5
    )
    for name in ("forward_kl", "cross_entropy"):
        settings = {"smoothing": 0.1} if name == "cross_entropy" else {}
        divergence = distill.Divergence(
            target, drafter, losses.named(name, **settings), 0.0, VOCAB, banned=BANNED
        )
        (loss, _), gradient = jax.value_and_grad(divergence, has_aux=True)(
            q, {"target": p}, batches[0], jax.random.key(0)
        )
        (same, _) = dataclasses.replace(divergence, banned=())(
            masked_q, {"target": masked_p}, batches[0], jax.random.key(0)
        )
        assert float(loss) == pytest.approx(float(same), rel=1e-5)
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient)[:, list(BANNED)].any()


def test_a_drafter_never_emits_what_its_target_does_not(finetuned):
    target = dataclasses.replace(finetuned[0], banned=BANNED)
    loaded = dataclasses.replace(target, banned=(7,))
    for given, model in (
        (distill.Drafter(checkpoint="x"), loaded),
        (distill.Drafter(architecture=SMALL), None),
        (distill.Drafter(layers=(0,)), None),
    ):
        assert distill.begin(given, target, 0, model).banned == BANNED


@pytest.mark.slow
def test_on_policy_distillation_resumes_exactly(finetuned, tmp_path, monkeypatch):
    """Interrupted within a phase, after its checkpoint: the text that the drafter wrote is on the disk."""
    target, _, _ = finetuned
    settings = settings_of(sources=ALL_SOURCES, training=training(40), evaluation_text="target")
    whole = distill.run(settings, CORPUS, tmp_path / "whole", target=target, cache=tmp_path / "cache")

    batch = text.Texts.batch

    def interrupted(self, step, params):
        if step == 13:
            raise KeyboardInterrupt
        return batch(self, step, params)

    options = {"target": target, "cache": tmp_path / "cache"}
    monkeypatch.setattr(text.Texts, "batch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        distill.run(settings, CORPUS, tmp_path / "run", **options)
    monkeypatch.undo()
    written = sorted(path.name for path in (tmp_path / "run" / "text").iterdir())
    assert written == ["drafter_2_00000000.json", "drafter_2_00000008.json"]
    shutil.copytree(tmp_path / "run", tmp_path / "robbed")
    again = distill.run(settings, CORPUS, tmp_path / "run", **options)
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    # What could not be gone on with any more when the last text was written: from checkpoints 20 and 30.
    left = sorted(path.name for path in (tmp_path / "run" / "text").iterdir())
    assert left == [f"drafter_2_{begun:08d}.json" for begun in (16, 24, 32)]
    text_of_phase = tmp_path / "robbed" / "text" / written[1]
    stored = json.loads(text_of_phase.read_text())
    text_of_phase.write_text(json.dumps(stored | {"rows": stored["rows"][::-1]}))
    with pytest.raises(ValueError, match=r"drafter_2_00000008\.json: expected the drafter's text of "):
        distill.run(settings, CORPUS, tmp_path / "robbed", **options)
    text_of_phase.unlink()
    with pytest.raises(FileNotFoundError, match=r"drafter_2_00000008\.json: the drafter's text.* is gone"):
        distill.run(settings, CORPUS, tmp_path / "robbed", **options)


def test_two_texts_of_the_drafter_do_not_mix(tmp_path, monkeypatch):
    """Same seed, same steps; one is greedy. Each is on the disk, and read back as its own."""
    target = jspec.Model(*table_lm(np.full((VOCAB, VOCAB), 1 / VOCAB)), eos=(END,))

    def written(model, examples, writing, temperature, seed, **_):
        return [Example(e.source, [3 + int(temperature), END]) for e in examples]

    sources = [
        text.Source(text="drafter", temperature=temperature, examples=16, every=8)
        for temperature in (0.0, 1.0)
    ]
    for write in (written, None):
        monkeypatch.setattr(text, "answered", write)
        texts = text.Texts(
            sources,
            EXAMPLES,
            target,
            target,
            tmp_path / "text",
            writing=text.Writing(8, 16, tmp_path),
            batching=BATCHING,
            training=training(40),
        )
        batches = [texts.batch(step, target.params) for step in range(2)]
        tokens = [sorted({*batch.labels[batch.weights > 0].tolist()}) for batch in batches]
        assert sorted(tokens) == [[END, 3], [END, 4]]
    assert len(list((tmp_path / "text").iterdir())) == 2


def test_given_buckets_hold_whatever_the_drafter_writes(tmp_path):
    """Refused at once, not when it first writes an answer that is too long."""
    target = jspec.Model(*table_lm(np.full((VOCAB, VOCAB), 1 / VOCAB)), eos=(END,))
    own = text.Source(text="drafter", examples=16, every=8)

    def texts(sources, width):
        return text.Texts(
            sources,
            EXAMPLES,
            target,
            target,
            tmp_path / "text",
            writing=text.Writing(30, 16, tmp_path),
            batching=Batching(batch_size=16, buckets=((1, width),)),
            training=training(40),
        )

    # Three tokens of a source, 30 of an answer; the last of them is a label only.
    texts([own], 32)
    message = r"buckets: expected the last one to hold .* 30 tokens .*, \(0, 32\), got \(1, 31\)"
    with pytest.raises(ValueError, match=message):
        texts([own], 31)
    texts([text.Source(text="references")], 31)


def test_adaspec_learns_where_the_drafter_is_furthest_behind_its_reference():
    """Three Markov chains; a token of the text is a row of the drafter's params, and its gradient's."""
    laws = np.random.default_rng(0).dirichlet(np.ones(VOCAB), (3, VOCAB))
    (target, p), (drafter, q), (reference, r) = map(table_lm, laws)
    answers = [[5, 6, 7, 8, 9, 10], [12, 13, 14]]
    batch = Batches([Example([4], answers[0]), Example([11], answers[1])], batch_size=2)[0]
    divergence = distill.Divergence(
        target, drafter, losses.named("forward_kl"), 0.0, VOCAB, reference, keep=0.4
    )
    loss, gradient = jax.value_and_grad(divergence, has_aux=True)(
        q, {"target": p, "reference": r}, batch, jax.random.key(0)
    )
    kl = (laws[0] * np.log(laws[0] / laws[1])).sum(1)
    behind = kl - (laws[0] * np.log(laws[0] / laws[2])).sum(1)
    before = [[4, *answers[0][:-1]], [11, *answers[1][:-1]]]  # the tokens whose successors are learned
    every = sorted((token for row in before for token in row), key=lambda token: -behind[token])
    chosen = set(every[:4])  # round(0.4 * 9)
    means = [np.mean([kl[token] for token in row if token in chosen]) for row in before if chosen & {*row}]
    assert float(loss[0]) == pytest.approx(np.mean(means), rel=1e-5)
    assert {*np.flatnonzero(np.asarray(gradient).any(1)).tolist()} == chosen


def test_a_reference_is_an_input_of_the_run(finetuned, distilled, tmp_path):
    chosen = distill.Filter(reference=str(distilled[1]), keep=0.5)
    settings = settings_of(token_filter=chosen, loss="forward_kl", training=training(2))
    distill.run(settings, CORPUS, tmp_path / "run", target=finetuned[0])
    assert np.isfinite(losses_of(tmp_path / "run")).all()
    inputs = json.loads((tmp_path / "run" / "inputs.json").read_text())
    model = distilled[0]
    assert inputs["reference"] == recipe.model_fingerprint(model.lm.config, model.params)
    assert inputs.keys() == {"recipe", "train", "validation", "target", "reference"}
    with pytest.raises(ValueError, match="accumulate: expected 1 with a token_filter, got 2"):
        settings_of(token_filter=chosen, training=training(2, accumulate=2))


def test_a_drafter_from_a_checkpoint_ends_answers_as_the_target_does(finetuned, distilled):
    target = dataclasses.replace(finetuned[0], eos=(END, 2), decoder_start=(3,))
    given = distill.Drafter(checkpoint=str(distilled[1]))
    drafter = distill.begin(given, target, 0, distilled[0])
    assert (drafter.eos, drafter.decoder_start) == (target.eos, target.decoder_start)
    assert drafter.params is distilled[0].params
    decoder = jspec.Model(*table_lm(np.full((VOCAB, VOCAB), 1 / VOCAB)), eos=(END,))
    with pytest.raises(ValueError, match=r"drafter\.checkpoint: .*kind, decoder, got encoder-decoder"):
        distill.run(settings_of(drafter=given), CORPUS, distilled[1] / "x", target=decoder)


def test_what_is_made_on_the_host_is_looked_at_there(tmp_path, monkeypatch):
    """A checkpoint may be larger than any device of the mesh that will hold it."""
    inside, looked = [], []

    class Enough(Exception):
        pass

    @contextlib.contextmanager
    def on_host(mesh):
        inside.append(mesh)
        yield
        inside.pop()

    def fingerprint(config, params):
        looked.append(inside[-1:])
        return "x"

    def stop(*arguments):
        raise Enough

    monkeypatch.setattr(recipe.parallel, "on_host", on_host)
    monkeypatch.setattr(recipe, "model_fingerprint", fingerprint)
    monkeypatch.setattr(recipe, "open_folder", stop)
    path = str(tiny_checkpoint(tmp_path / "checkpoint", "llama"))
    chosen = distill.Filter(reference=path)
    for run, settings in (
        (finetune.run, finetune.Finetune(checkpoint=path, training=training(1))),
        (
            distill.run,
            settings_of(target=path, drafter=distill.Drafter(checkpoint=path), token_filter=chosen),
        ),
    ):
        with pytest.raises(Enough):
            run(settings, CORPUS, tmp_path / "run", mesh="a mesh")
    assert looked == [["a mesh"]] * 4


def test_a_fingerprint_outlives_new_settings_of_an_architecture():
    """A field with a default changes nothing until a model uses it."""
    params = {"a": jax.numpy.arange(6.0)}
    old = dataclasses.make_dataclass("Config", [("width", int), ("tied", bool, False)])
    new = dataclasses.make_dataclass(
        "Config", [("width", int), ("sinks", bool, False), ("tied", bool, False)], kw_only=True
    )
    fingerprint = recipe.model_fingerprint
    assert fingerprint(new(width=3, tied=True), params) == fingerprint(old(3, True), params)
    others = [new(width=3, tied=True, sinks=True), new(width=4, tied=True), new(width=3)]
    assert len({fingerprint(config, params) for config in [new(width=3, tied=True), *others]}) == 4
    # Of real ones, as long as there are runs whose inputs.json holds such numbers.
    sizes = {"vocab_size": 64, "width": 32, "mlp_width": 64, "num_layers": 2, "num_heads": 4, "head_dim": 8}
    decoder = DecoderConfig(
        **sizes,
        num_kv_heads=2,
        context_length=512,
        rotary=Rotary((1.0, 0.1, 0.01, 0.001)),
        windows=(None, 8),
    )
    seq2seq = Seq2SeqConfig(**sizes, num_encoder_layers=2, tied=True, embedding_scale=5.5)
    assert [fingerprint(config, params) for config in (decoder, seq2seq)] == [
        "3a9a885898898c34",
        "afac42a70db21f7e",
    ]


def test_precision_is_part_of_a_fingerprint():
    exact = {"a": jax.numpy.arange(6.0), "b": jax.numpy.ones((2, 2), int)}
    rounded = exact | {"a": exact["a"].astype("bfloat16")}
    found = [recipe.model_fingerprint("model", params) for params in (exact, rounded)]
    assert found[0] == "c9432a221a14d4bc"  # as long as there are runs: their inputs.json hold such numbers
    assert found[1] != found[0]


def test_a_drafter_of_the_target_s_layers():
    lm, params = tiny_seq2seq(num_layers=3, num_encoder_layers=2, vocab_size=VOCAB)
    config, chosen = init.subset(lm.config, params, [0, 2], [1])
    assert (config.num_layers, config.num_encoder_layers) == (2, 1)
    same = [
        (chosen["layers"][1], params["layers"][2]),
        (chosen["encoder"]["layers"][0], params["encoder"]["layers"][1]),
        (chosen["relative_bias"], params["relative_bias"]),
        (chosen["unembedding"], params["unembedding"]),
    ]
    for mine, theirs in same:
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    for layers, encoder_layers, message in (
        ([], None, r"layers: expected indices in 0 \.\. 2, got \[\]"),
        ([3], None, r"layers: expected indices in 0 \.\. 2, got \[3\]"),
        ([0], [-1], r"encoder_layers: expected indices in 0 \.\. 1, got \[-1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            init.subset(lm.config, params, layers, encoder_layers)
    windowed = tiny_decoder(num_layers=3, windows=(None, 8, None))
    smaller, _ = init.subset(windowed[0].config, windowed[1], [1])
    assert smaller.windows == (8,)
    with pytest.raises(ValueError, match="encoder_layers: expected None"):
        init.subset(windowed[0].config, windowed[1], [1], [0])


def test_a_random_model_s_embedding_and_scores_have_variance_1():
    """Whatever the embedding shares with the head and scores are multiplied by."""
    lm, _ = tiny_seq2seq(width=64, vocab_size=200, num_heads=4)
    for changes in ({}, {"tied": True, "logit_scale": 64**-0.5}, {"attention_scale": 0.25}):
        config = dataclasses.replace(lm.config, **changes)
        params = init.random(config, jax.random.key(0))
        assert float(params["embedding"].std()) == pytest.approx(1, rel=0.05)
        query = float(params["layers"][0]["attention"]["query"]["kernel"].std())
        assert query * 8 * config.attention_scale == pytest.approx(16**-0.5, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"context_length": 3},
            r"expected answers of at most 3 tokens, for \w+ has no more .* got \d+ in train",
        ),
        (
            {"source_length": 2},
            r"expected sources of at most 2 tokens, for \w+ has no more .* got \d+ in train",
        ),
    ],
)
def test_texts_beyond_a_model_s_positions_are_refused(changes, message, tmp_path):
    """A table of positions would give its last row for all of them."""
    bounded = {"positions": "learned", "bounded": True, "context_length": 64, "source_length": 64}
    config = settings_of(
        drafter=distill.Drafter(architecture=SMALL | bounded | changes), evaluation_text="target"
    )
    lm, params = tiny_seq2seq(vocab_size=VOCAB)
    target = jspec.Model(lm, params, eos=(END,), decoder_start=(0,))
    with pytest.raises(ValueError, match="limits: " + message):
        distill.run(config, CORPUS, tmp_path / "run", target=target)


def test_what_cannot_be_distilled(finetuned, tmp_path):
    target, _, _ = finetuned
    other = {"architecture": SMALL | {"vocab_size": VOCAB - 1}}
    cases = [
        (other, "vocab_size: expected at most 23"),
        ({"architecture": {**SMALL, "kind": "decoder"}}, "unknown key 'num_encoder_layers'"),
        ({"layers": (1,)}, r"layers: expected indices in 0 \.\. 0"),
        ({"checkpoint": str(tmp_path / "nothing")}, "there is no"),
    ]
    for number, (drafter, message) in enumerate(cases):
        settings = settings_of(drafter=distill.Drafter(**drafter))
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            distill.run(settings, CORPUS, tmp_path / str(number), target=target)
    with pytest.raises(ValueError, match="target: expected a checkpoint"):
        distill.run(settings_of(), CORPUS, tmp_path / "run")
    with pytest.raises(ValueError, match="expected one of checkpoint, architecture and layers"):
        distill.Drafter(layers=(0,), architecture=SMALL)
    with pytest.raises(ValueError, match="loss: expected one of"):
        settings_of(loss="kl")
    with pytest.raises(ValueError, match="drafter text: expected every and examples"):
        text.Source(text="drafter")
    with pytest.raises(ValueError, match="every: expected None"):
        text.Source(text="target", every=3)
