"""Fine-tuning and distillation, end to end on a toy: an answer counts on from its source's first token."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import typer.testing

import jspec
from jspec.testing import tiny_decoder, tiny_seq2seq
from training import __main__ as command
from training import acceptance, distill, finetune, forward, init, metrics, recipe, text
from training.config import Batching, Optimizer, Training
from training.data import Example, Record
from training.tokenizer import TokenizerConfig

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
BATCHING = Batching(batch_size=16, buckets=1)


def training(steps, **changes):
    rate = Optimizer(learning_rate=0.02, warmup_steps=5)
    return Training(steps=steps, optimizer=rate, checkpoint_every=10, **changes)


def losses_of(folder):
    return [row["loss"] for row in metrics.read(folder / "metrics.jsonl") if "loss" in row]


def evaluations(folder):
    return [row for row in metrics.read(folder / "metrics.jsonl") if "loss" not in row]


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "target"
    settings = finetune.Finetune(
        architecture=ARCHITECTURE, batching=BATCHING, label_smoothing=0.05, training=training(100)
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


def test_a_decoder_only_model_learns_answers_only(tmp_path):
    lm, _ = tiny_decoder(vocab_size=VOCAB, num_layers=1, width=16)
    values = {**dataclasses.asdict(lm.config), "kind": "decoder", "rotary": {"rope_theta": 100.0}}
    settings = finetune.Finetune(architecture=values, batching=BATCHING, training=training(60))
    model = finetune.run(settings, CORPUS, tmp_path / "run")
    found = losses_of(tmp_path / "run")
    assert found[-1] < 0.5 * found[0]
    assert model.decoder_start == ()
    assert model.lm.config.rotary.frequencies[0] == 1.0


def test_text_gets_a_tokenizer_of_its_own(tmp_path):
    """The command line, from a YAML file and parallel text to a folder that answers in text."""
    words = [" ".join(["ab", "cd", "ef", "gh"][i % 4 :]) for i in range(24)]
    for name in ("train", "val"):
        (tmp_path / f"{name}.en").write_text("\n".join(words) + "\n")
        (tmp_path / f"{name}.de").write_text("\n".join(w.upper() for w in words) + "\n")
    architecture = {key: value for key, value in ARCHITECTURE.items() if key != "vocab_size"}
    (tmp_path / "x.yaml").write_text(
        json.dumps(  # JSON is YAML
            {
                "architecture": architecture,
                "tokenizer": {"vocab_size": 60},
                "data": {
                    name: {"format": "parallel", "source": f"{part}.en", "target": f"{part}.de"}
                    for name, part in (("train", "train"), ("validation", "val"))
                },
                "batching": {"batch_size": 8, "buckets": 1},
                "training": {"steps": 4},
            }
        )
    )
    arguments = ["--config", str(tmp_path / "x.yaml"), "--data", str(tmp_path)]
    runner = typer.testing.CliRunner()
    result = runner.invoke(command.app, ["finetune", *arguments, "--output", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "step 4: " in result.output
    model = jspec.load(tmp_path / "run")
    assert model.tokenizer is not None
    assert model.lm.config.vocab_size == model.vocab_size == len(model.tokenizer.vocabulary)
    assert isinstance(jspec.generate(model, "ab cd", max_new_tokens=3).texts[0], str)
    again = runner.invoke(command.app, ["finetune", *arguments, "--output", str(tmp_path / "x.yaml" / "run")])
    assert isinstance(again.exception, OSError)
    assert "output: cannot write to" in str(again.exception)


def test_wrong_finetuning_settings(tmp_path):
    settings = {"architecture": ARCHITECTURE, "training": training(1)}
    with pytest.raises(ValueError, match="expected one of checkpoint and architecture"):
        finetune.Finetune(**settings, checkpoint="x")
    with pytest.raises(ValueError, match="tokenizer: expected none with a checkpoint"):
        finetune.Finetune(checkpoint="x", tokenizer=TokenizerConfig(), training=training(1))
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
    assert written == ["drafter_0_00000000.json", "drafter_0_00000008.json"]
    shutil.copytree(tmp_path / "run", tmp_path / "robbed")
    again = distill.run(settings, CORPUS, tmp_path / "run", **options)
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    (tmp_path / "robbed" / "text" / written[1]).unlink()
    with pytest.raises(FileNotFoundError, match=r"drafter_0_00000008\.json: the drafter's text.* is gone"):
        distill.run(settings, CORPUS, tmp_path / "robbed", **options)


def test_adaspec_filters_with_a_reference(finetuned, distilled, tmp_path):
    chosen = distill.Filter(reference=str(distilled[1]), keep=0.5)
    settings = settings_of(token_filter=chosen, loss="forward_kl", training=training(12))
    distill.run(settings, CORPUS, tmp_path / "run", target=finetuned[0])
    found = losses_of(tmp_path / "run")
    assert np.isfinite(found).all()
    assert found[-1] < found[0]


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


def test_a_random_model_starts_on_the_right_scales():
    """Hidden states of a few units and logits near those of a uniform law, whatever the width."""
    lm, _ = tiny_seq2seq(width=64, vocab_size=200, num_heads=4)
    for changes in ({}, {"tied": True, "logit_scale": 64**-0.5}, {"attention_scale": 0.25}):
        config = dataclasses.replace(lm.config, **changes)
        params = init.random(config, jax.random.key(0))
        assert float(params["embedding"].std()) == pytest.approx(1, rel=0.05)
        query = float(params["layers"][0]["attention"]["query"]["kernel"].std())
        assert query * 8 * config.attention_scale == pytest.approx(16**-0.5, rel=0.1)


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


def test_the_command_line_distils(finetuned, tmp_path):
    """Refusals are one line on standard error, with exit code 1."""
    (tmp_path / "x.yaml").write_text("drafter: {layers: [0]}\ntraining: {steps: 1}\nlos: jsd\n")
    runner = typer.testing.CliRunner()
    result = runner.invoke(command.app, ["distill", "--config", str(tmp_path / "x.yaml")])
    assert isinstance(result.exception, ValueError)
    assert "los: unknown key" in str(result.exception)
    result = runner.invoke(command.app, ["distill", "--config", str(tmp_path / "y.yaml")])
    assert isinstance(result.exception, FileNotFoundError)
    assert metrics.read(tmp_path / "none.jsonl") == []
