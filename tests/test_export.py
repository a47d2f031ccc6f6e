"""Models as Hugging Face folders: what was written is what is read, here and by transformers."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_parity_fixtures import SOURCE_LENGTHS, reference, sources, tokens
from safetensors.numpy import load_file, save_file

import jspec
from jspec.io import orbax
from jspec.io.hf import load_hf, save_hf, without_scales
from jspec.io.params import named
from jspec.models import Seq2SeqConfig, cast, init_params, language_model, registry
from jspec.models.rotary import Rotary
from jspec.testing import tiny_checkpoint, tiny_decoder, tiny_seq2seq
from jspec.tiny_checkpoints import CHECKPOINTS
from jspec.types import Block, Prompt
from training import export, recipe, tokenizer
from training.checkpoint import Checkpoints

WRITTEN = {name: raw for name, raw in CHECKPOINTS.items() if registry.family(raw).raw is not None}
BART = {
    "positions": "learned",
    "bounded": True,
    "context_length": 64,
    "source_length": 64,
    "norm": "layer",
    "norm_eps": 1e-5,
    "norm_placement": "post",
    "embedding_norm": True,
    "gated": False,
    "activation": "gelu",
    "bias": True,
    "attention_scale": 8**-0.5,
}
# As a training configuration describes them: (maker, settings, family).
SCRATCH = {
    "t5 1.0": (tiny_seq2seq, dict(tied=True, logit_scale=32**-0.5, gated=False, activation="relu"), "t5"),
    "t5 1.1": (tiny_seq2seq, dict(num_layers=1, num_encoder_layers=3, context_length=99), "t5"),
    "t5 exact gelu": (tiny_seq2seq, dict(activation="gelu", tied=True), "t5"),
    "t5 plain tanh gelu": (tiny_seq2seq, dict(gated=False, relative_buckets=8, relative_distance=20), "t5"),
    "bart": (tiny_seq2seq, BART, "bart"),
    "bart tied": (tiny_seq2seq, BART | dict(tied=True, head_bias=True, embedding_scale=32**0.5), "bart"),
    "mbart": (tiny_seq2seq, BART | dict(norm_placement="pre"), "mbart"),
    "marian": (
        tiny_seq2seq,
        BART | dict(positions="sinusoidal", embedding_norm=False, bounded=False, tied=True),
        "marian",
    ),
    "llama": (tiny_decoder, {}, "llama"),
    "llama tied, theta": (
        tiny_decoder,
        dict(tied=True, rotary=Rotary(tuple(5e5 ** (-i / 4) for i in range(4)))),
        "llama",
    ),
    "mistral": (tiny_decoder, dict(windows=(7, 7)), "mistral"),
    "qwen2": (tiny_decoder, dict(windows=(None, 7), qkv_bias=True), "qwen2"),
    "qwen3": (tiny_decoder, dict(windows=(None, 7), qk_norm=True), "qwen3"),
    "gpt2": (
        tiny_decoder,
        dict(
            rotary=None,
            num_kv_heads=4,
            context_length=64,
            bounded=True,
            norm="layer",
            norm_eps=1e-6,
            gated=False,
            activation="gelu_tanh",
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
        ),
        "gpt2",
    ),
}


# What is written has the same logits but other params.
SCALED = {
    "t5 scaled": (
        tiny_seq2seq,
        dict(tied=True, embedding_scale=5.3, logit_scale=0.4, attention_scale=0.3),
        "t5",
    ),
    "t5 scaled attention": (tiny_seq2seq, dict(attention_scale=0.3), "t5"),
    "t5 untied, scaled embedding": (tiny_seq2seq, dict(embedding_scale=5.3, logit_scale=0.4), "t5"),
    "t5 tied, scaled logits": (tiny_seq2seq, dict(tied=True, logit_scale=0.4), "t5"),
}


def scratch(name):
    make, settings, _ = (SCRATCH | SCALED)[name]
    found = []

    def params():
        found.append(make(vocab_size=96, **settings))
        return found[0][1]

    shapes, rng = jax.eval_shape(params), np.random.default_rng(1)
    # No norm of 1 and no bias of 0, which would hide mistakes; numpy, because nothing compiles.
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 0.3 if x.ndim > 1 else 1, x.shape), jnp.float32), shapes
    )
    lm = found[0][0]
    start = (0,) if isinstance(lm.config, Seq2SeqConfig) else ()
    return jspec.Model(lm, params, eos=(1,), decoder_start=start)


def same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_the_table_of_every_family_gives_its_tensors_back(tmp_path):
    for name, raw in CHECKPOINTS.items():
        folder = tiny_checkpoint(tmp_path / name, name)
        config, params, _ = load_hf(folder)
        family, stored = registry.family(raw), load_file(folder / "model.safetensors")
        for key, tensor in named(params, family.weights(config)).items():
            expected = stored[family.prefix + key].copy()
            if "embed_positions" in key:
                expected[:2] = 0  # never read
            # Gemma's 1 + weight is rounded: its last bits are no part of the params.
            np.testing.assert_allclose(tensor, expected, rtol=0, atol=1e-7 * ("gemma" in name), err_msg=key)
            stored[family.prefix + key] = tensor
        save_file(stored, folder / "model.safetensors")
        same(load_hf(folder)[1], params)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_checkpoint_comes_back_tensor_by_tensor(name, tmp_path):
    # A pre-norm OPT is a GPT-2 with another activation, and written as that.
    changes = {"do_layer_norm_before": False} if name == "opt" else {}
    folder = tiny_checkpoint(tmp_path / "old", name, **changes)
    config, params, _ = load_hf(folder)
    start = (0,) if isinstance(config, Seq2SeqConfig) else ()
    model = jspec.Model(language_model(config), params, decoder_start=start)
    again = save_hf(model, tmp_path / "new")
    found, back, _ = load_hf(again)
    assert found == config
    same(back, params)
    old, new = (load_file(path / "model.safetensors") for path in (folder, again))
    assert old.keys() == new.keys()
    raw = json.loads((again / "config.json").read_text())
    assert raw["architectures"] == WRITTEN[name]["architectures"]
    assert raw["model_type"] == WRITTEN[name]["model_type"]


@pytest.mark.parametrize("name", SCRATCH)
def test_a_model_from_scratch_comes_back_bit_by_bit(name, tmp_path):
    model = scratch(name)
    folder = save_hf(model, tmp_path / "new" / "folder")
    config, params, _ = load_hf(folder)
    same(params, model.params)
    assert json.loads((folder / "config.json").read_text())["model_type"] == SCRATCH[name][2]
    for field in dataclasses.fields(config):
        ours, theirs = getattr(model.lm.config, field.name), getattr(config, field.name)
        if isinstance(ours, Rotary):
            ours, theirs = ours.frequencies, pytest.approx(theirs.frequencies, rel=1e-6)
        assert ours == (pytest.approx(theirs, rel=1e-6) if isinstance(ours, float) else theirs), field.name


@pytest.mark.parametrize("name", SCALED)
def test_scales_go_into_the_weights(name, tmp_path):
    model = scratch(name)
    config, params, _ = load_hf(save_hf(model, tmp_path / "hf"))
    logit_scale = 32**-0.5 if config.tied else 1.0
    assert (config.attention_scale, config.embedding_scale, config.logit_scale) == (1.0, 1.0, logit_scale)
    read = dataclasses.replace(model, lm=language_model(config), params=params)
    np.testing.assert_allclose(logits(read), logits(model), atol=1e-4, rtol=1e-5)


def test_scales_are_rounded_once_in_low_precision():
    """bfloat16 has 8 bits: 5.3 itself would be rounded, and the gain divided by another number."""
    model = scratch("t5 scaled")
    low = cast(model.params, "bfloat16")
    _, folded = without_scales(model.lm.config, low)
    embedding = np.asarray(low["embedding"], np.float32)
    np.testing.assert_array_equal(folded["embedding"], jnp.asarray(embedding * np.float32(5.3), jnp.bfloat16))
    product = np.asarray(folded["embedding"], np.float32) * np.asarray(folded["norm"]["scale"]) * 32**-0.5
    ratio = product / (embedding * np.asarray(low["norm"]["scale"]) * 0.4)
    assert abs(np.median(ratio) - 1) < 5e-4
    assert np.abs(ratio - 1).max() <= 2**-8


def test_low_precision_is_kept(tmp_path):
    config = scratch("t5 1.1").lm.config
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    folder = save_hf(jspec.Model(language_model(config), params, decoder_start=(0,)), tmp_path)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    same(load_hf(folder, "bfloat16")[1], params)


def test_what_transformers_generates_with_is_told(tmp_path):
    model = dataclasses.replace(scratch("bart"), decoder_start=(2, 0), eos=(3, 1))
    save_hf(model, tmp_path)
    told = json.loads((tmp_path / "generation_config.json").read_text())
    assert told["decoder_start_token_id"] == 2
    assert told["forced_bos_token_id"] == 0
    assert told["eos_token_id"] == [3, 1]
    again = jspec.load(tmp_path)
    assert again.decoder_start == (2, 0)
    assert again.eos == (1, 3)


# --- runs ---------------------------------------------------------------------------------------------


def test_export_of_a_run(tmp_path):
    model, run = scratch("t5 1.1"), tmp_path / "run"
    words = tokenizer.save(tokenizer.build(["Ein Hund läuft.", "A dog runs."], 60), run)
    orbax.write_model(
        run, model.lm.config, eos=(1,), decoder_start=(0,), vocab_size=len(words.vocabulary), tokenizer=words
    )
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint"):
        export.run(run, tmp_path / "folder")
    checkpoints = Checkpoints(run / orbax.CHECKPOINTS, keep=1, best=False)
    checkpoints.save(3, model.params, {"step": jnp.array(3)}, None)
    checkpoints.close()
    assert export.run(run, tmp_path / "folder") == tmp_path / "folder"
    ours, theirs = jspec.load(run), jspec.load(tmp_path / "folder")
    same(theirs.params, ours.params)
    for name in ("eos", "decoder_start", "vocab_size", "vocabulary"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert theirs.tokenizer.encode("A Hund") == words.encode("A Hund")
    assert theirs.tokenizer.encode("A Hund")[-1] == 1
    answers = [
        jspec.generate(m, ["Ein Hund"], max_new_tokens=5, temperature=0.0).tokens for m in (ours, theirs)
    ]
    assert answers[0] == answers[1]


def test_a_run_keeps_its_bans(tmp_path):
    """From the checkpoint it began with to the folder that others read."""
    model, run = dataclasses.replace(scratch("marian"), banned=(7, 9)), tmp_path / "run"
    run.mkdir()
    recipe.describe(run, model)
    checkpoints = Checkpoints(run / orbax.CHECKPOINTS, keep=1, best=False)
    checkpoints.save(3, model.params, {"step": jnp.array(3)}, None)
    checkpoints.close()
    assert jspec.load(run).banned == (7, 9)
    export.run(run, tmp_path / "folder")
    told = json.loads((tmp_path / "folder" / "generation_config.json").read_text())
    assert told["suppress_tokens"] == [7, 9]
    assert jspec.load(tmp_path / "folder").banned == (7, 9)
    described = json.loads((run / orbax.MODEL).read_text())
    del described["banned"]  # as an earlier version wrote it
    (run / orbax.MODEL).write_text(json.dumps(described))
    assert jspec.load(run).banned == ()


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (tiny_seq2seq, dict(norm="layer"), r"nearest, T5.*, cannot say norm = 'layer'$"),
        (tiny_seq2seq, BART | dict(source_length=32), r"nearest, Bart.*cannot say source_length = 32$"),
        (tiny_decoder, dict(rotary=Rotary((1.0, 0.7, 0.2, 0.1))), r"cannot say rotary = Rotary"),
        (tiny_decoder, dict(windows=(3, 5)), r"cannot say windows = \(3, 5\)$"),
        (tiny_decoder, dict(norm_placement="both", tied=True), r"cannot say norm_placement = 'both'$"),
    ],
)
def test_what_no_checkpoint_can_express_is_named(make, settings, message, tmp_path):
    lm, params = make(**settings)
    start = (0,) if isinstance(lm.config, Seq2SeqConfig) else ()
    with pytest.raises(ValueError, match=message):
        save_hf(jspec.Model(lm, params, decoder_start=start), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_other_refusals(tmp_path):
    model = scratch("t5 1.1")
    (tmp_path / "notes.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ValueError, match=r"folder: expected a new or an empty one"):
            save_hf(model, folder)
    with pytest.raises(ValueError, match=r"decoder_start: expected at most 2 tokens, got \(1, 2, 3\)"):
        save_hf(dataclasses.replace(model, decoder_start=(1, 2, 3)), tmp_path / "new")
    with pytest.raises(FileNotFoundError, match=r"run: expected a folder that training made"):
        export.run(tmp_path, tmp_path / "new")


# --- transformers -------------------------------------------------------------------------------------


def logits(model):
    ids = jnp.asarray(tokens(model.lm.config.vocab_size))
    source = jnp.asarray(sources(model.lm.config.vocab_size)), jnp.array(SOURCE_LENGTHS)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)

    @jax.jit
    def run(params):
        cache = model.lm.start(params, Prompt(ids, jnp.full(2, ids.shape[1]), *source), 8)
        return model.lm.head(params, model.lm.extend(params, cache, Block(ids, positions)).hidden)

    return run(model.params)


@pytest.mark.torch
@pytest.mark.parametrize("name", SCRATCH | SCALED)
def test_transformers_computes_the_same_logits(name, tmp_path):
    model = scratch(name)
    expected = logits(model)
    assert expected.std() > 0.1
    found, _ = reference(save_hf(model, tmp_path))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["t5 1.0", "bart tied", "marian"])
def test_transformers_generates_the_same_tokens(name, tmp_path):
    import torch
    from transformers import AutoModelForSeq2SeqLM

    model = dataclasses.replace(scratch(name), decoder_start=(2, 5), eos=(1, 7))
    theirs = AutoModelForSeq2SeqLM.from_pretrained(save_hf(model, tmp_path)).eval()
    source = sources(96)[0]
    found = theirs.generate(torch.tensor(source[None]).long(), max_new_tokens=12, do_sample=False)[0].tolist()
    ours = jspec.generate(model, [source.tolist()], max_new_tokens=11, temperature=0.0).tokens
    assert found == [2, 5, *ours[0]]
