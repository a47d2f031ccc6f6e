"""Hugging Face folders: parity with transformers, and every way in which a folder can be wrong."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import constants
from make_parity_fixtures import AT, CASES, FIXTURES, SHOWN, SOURCE_LENGTHS, reference, sources, tokens
from safetensors.numpy import load_file, save_file

import jspec
from jspec import options
from jspec.io import orbax
from jspec.io.hf import decoder_start, load_hf, save_hf
from jspec.models import abstract_params, language_model, registry
from jspec.testing import tiny_checkpoint, tiny_decoder
from jspec.tiny_checkpoints import CHECKPOINTS
from jspec.types import Block, Prompt


def forward(folder):
    config, params, _ = load_hf(folder)
    model = language_model(config)
    ids = jnp.asarray(tokens(config.vocab_size))
    source = jnp.asarray(sources(config.vocab_size)), jnp.array(SOURCE_LENGTHS)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)

    @jax.jit
    def run(params):
        cache = model.start(params, Prompt(ids, jnp.full(2, ids.shape[1]), *source), 8)
        out = model.extend(params, cache, Block(ids, positions), taps=tuple(range(config.num_layers)))
        return model.head(params, out.hidden), [out.taps[i] for i in range(config.num_layers)]

    return run(params)


@pytest.mark.parametrize("name", CASES)
def test_parity_with_stored_outputs_of_transformers(name, tmp_path):
    family, overrides = CASES[name]
    logits, taps = forward(tiny_checkpoint(tmp_path, family, **overrides))
    with np.load(FIXTURES / "parity.npz") as stored:
        expected, hidden = stored[f"{name}.logits"], stored[f"{name}.hidden"]
    np.testing.assert_allclose(logits[:, AT, : expected.shape[-1]], expected, atol=1e-4)
    np.testing.assert_allclose(np.stack(taps)[:, :, AT, :SHOWN], hidden, atol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_parity_with_transformers(name, tmp_path):
    family, overrides = CASES[name]
    folder = tiny_checkpoint(tmp_path, family, seed=3, **overrides)
    logits, taps = forward(folder)
    expected, hidden = reference(folder)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    for ours, theirs in zip(taps, hidden[:-1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


ENCODER_DECODERS = ["t5", "t5_v1_1", "mt5", "marian", "bart", "mbart"]


@pytest.mark.torch
@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_a_folder_that_transformers_wrote(family, tmp_path):
    from transformers import AutoModelForSeq2SeqLM

    folder = tiny_checkpoint(tmp_path / "old", family)
    AutoModelForSeq2SeqLM.from_pretrained(folder).save_pretrained(tmp_path / "new")
    (config, params, _), (found, again, _) = load_hf(folder), load_hf(tmp_path / "new")
    assert found == config
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert decoder_start(tmp_path / "new") == decoder_start(folder) == (0,)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("family", "head"), [("t5", True), ("t5_v1_1", False), ("mt5", False), ("marian", True), ("bart", True)]
)
def test_heads_that_the_config_does_not_tell_follow_transformers(family, head, tmp_path):
    other = np.random.default_rng(5).normal(0, 0.2, (96, 32)).astype(np.float32)
    folder = edit(tiny_checkpoint(tmp_path, family), lm_head__weight=other if head else None)
    assert load_hf(folder)[0].tied != head
    np.testing.assert_allclose(forward(folder)[0], reference(folder)[0], atol=1e-4)


def test_shards_give_the_same_params(tmp_path):
    whole = tiny_checkpoint(tmp_path / "whole", "qwen2")
    split = tmp_path / "split"
    split.mkdir()
    tensors = load_file(whole / "model.safetensors")
    names = sorted(tensors)
    files = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, split / file)
    index = {"weight_map": {name: file for file, members in files.items() for name in members}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    (split / "config.json").write_text((whole / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, load_hf(whole)[1], load_hf(split)[1])
    next(split.glob("*-of-*")).unlink()
    with pytest.raises(FileNotFoundError, match=r"model-0000"):
        load_hf(split)


def test_bfloat16_leaves_norms_in_float32(tmp_path):
    _, params, _ = load_hf(tiny_checkpoint(tmp_path, "gemma"), dtype="bfloat16")
    assert params["layers"][0]["mlp"]["up"]["kernel"].dtype == jnp.bfloat16
    assert params["layers"][0]["mlp_norm"]["scale"].dtype == jnp.float32
    assert params["norm"]["scale"].dtype == jnp.float32


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bart"])
def test_names_of_the_bare_model(family, tmp_path):
    folder = tiny_checkpoint(tmp_path, family, tie_word_embeddings=True)
    expected = load_hf(folder)[1]
    tensors = load_file(folder / "model.safetensors")
    prefix = "transformer." if family == "gpt2" else "model."
    save_file({name.removeprefix(prefix): w for name, w in tensors.items()}, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_hf(folder)[1], expected)


def test_tables_name_every_parameter_once():
    assert {registry.family(raw).model_type for raw in CHECKPOINTS.values()} == set(registry.MODEL_TYPES)
    for name, raw in CHECKPOINTS.items():
        family = registry.family(raw)
        config = family.config(raw)
        leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_params(config))
        expected = [".".join(str(entry.key) for entry in path) for path, _ in leaves]
        paths = [path for path, _, _ in family.weights(config)]
        paths += ["unembedding.kernel"] * (not config.tied) + ["head_bias"] * config.head_bias
        assert sorted(paths) == sorted(expected), name


# --- bad input ----------------------------------------------------------------------------------------


def edit(folder: Path, **changes) -> Path:
    """Change tensors of a checkpoint: None removes one. In names, two underscores stand for a dot."""
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path):
    folder = edit(
        tiny_checkpoint(tmp_path), model__norm__weight=None, model__layers__1__mlp__up_proj__weight=None
    )
    with pytest.raises(
        ValueError, match=r"missing tensors: model.layers.1.mlp.up_proj.weight, model.norm.weight$"
    ):
        load_hf(folder)
    folder = edit(tiny_checkpoint(tmp_path), model__layers__0__mlp__extra__weight=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"unknown tensors: model.layers.0.mlp.extra.weight$"):
        load_hf(folder)
    folder = edit(
        tiny_checkpoint(tmp_path), model__layers__2__self_attn__k_proj__weight=np.zeros((4, 32), np.float32)
    )
    with pytest.raises(ValueError, match=r"layers.2.self_attn.k_proj.weight of shape \(4, 32\)"):
        load_hf(folder)
    folder = edit(tiny_checkpoint(tmp_path), lm_head__weight=np.zeros((96, 32), np.int8))
    with pytest.raises(ValueError, match=r"lm_head.weight is of type int8"):
        load_hf(folder)


def test_a_fused_weight_must_have_exactly_the_parts(tmp_path):
    folder = tiny_checkpoint(tmp_path, "gpt2")
    edit(folder, transformer__h__0__attn__c_attn__weight=np.zeros((32, 128), np.float32))
    with pytest.raises(ValueError, match=r"h.0.attn.c_attn.weight of shape \(32, 128\)"):
        load_hf(folder)


def test_harmless_buffers_are_ignored(tmp_path):
    folder = edit(
        tiny_checkpoint(tmp_path, "gpt2"), transformer__h__0__attn__bias=np.ones((1, 1, 8, 8), np.float32)
    )
    load_hf(folder)
    folder = edit(
        tiny_checkpoint(tmp_path), model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(4, np.float32)
    )
    load_hf(folder)


@pytest.mark.parametrize(
    ("family", "name"),
    [("gemma", "model.embed_tokens.weight"), ("t5", "shared.weight"), ("bart", "model.shared.weight")],
)
def test_a_tied_head_that_differs_is_used(family, name, tmp_path):
    folder = tiny_checkpoint(tmp_path, family)
    embedding = load_file(folder / "model.safetensors")[name]
    config, params, _ = load_hf(edit(folder, lm_head__weight=embedding))
    assert config.tied
    assert "unembedding" not in params
    config, params, _ = load_hf(edit(folder, lm_head__weight=embedding + 1))
    assert not config.tied
    np.testing.assert_array_equal(params["unembedding"]["kernel"], embedding.T + 1)


@pytest.mark.parametrize(
    ("family", "prefix"), [("t5", ""), ("mt5", ""), ("marian", "model."), ("bart", "model.")]
)
def test_an_embedding_stored_several_times_and_under_any_of_its_names(family, prefix, tmp_path):
    folder = tiny_checkpoint(tmp_path, family)
    config, expected, _ = load_hf(folder)
    names = [f"{prefix}{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")]
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop(names[0])
    for stored in (names, names[1:], names[2:]):
        save_file(tensors | dict.fromkeys(stored, embedding), folder / "model.safetensors")
        assert load_hf(folder)[0] == config
        jax.tree.map(np.testing.assert_array_equal, load_hf(folder)[1], expected)
    save_file(tensors | {names[1]: embedding, names[2]: embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"decoder.embed_tokens.weight differs from .*encoder.embed_tokens"):
        load_hf(folder)
    if config.tied:
        save_file(tensors | {"lm_head.weight": embedding}, folder / "model.safetensors")
        jax.tree.map(np.testing.assert_array_equal, load_hf(folder)[1], expected)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=rf"missing tensors: {prefix}shared.weight$"):
            load_hf(folder)


def test_no_logits_bias_and_unread_positions(tmp_path):
    folder = tiny_checkpoint(tmp_path, "marian")
    assert load_hf(folder)[1]["head_bias"].shape == (96,)
    positions = {"model__encoder__embed_positions__weight": np.zeros((64, 32), np.float32)}
    config, params, _ = load_hf(edit(folder, final_logits_bias=None, **positions))
    assert not config.head_bias
    assert "head_bias" not in params
    first_release = {
        "decoder__block__0__layer__1__EncDecAttention__relative_attention_bias__weight": np.zeros(
            (8, 4), np.float32
        )
    }
    load_hf(edit(tiny_checkpoint(tmp_path / "t5", "t5"), **first_release))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"decoder_start_token_id": 5}, {"decoder_start_token_id": 6}, (5,)),
        ({"decoder_start_token_id": 6}, {"forced_bos_token_id": 0}, (6,)),
        ({"decoder_start_token_id": 6, "forced_bos_token_id": None}, {"forced_bos_token_id": 0}, (6,)),
        (None, {"decoder_start_token_id": 6, "forced_bos_token_id": 0}, (6, 0)),
        (None, {"bos_token_id": 3}, (3,)),
    ],
)
def test_where_the_decoder_begins(generation, config, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert decoder_start(tmp_path) == expected
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"decoder_start_token_id: expected the id of a token, got None"):
        decoder_start(tmp_path)


def test_what_a_checkpoint_bans(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    assert jspec.load(folder).banned == ()

    def told(**values):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | values))

    told(bad_words_ids=[[7], [2]], suppress_tokens=[9, 95])
    model = jspec.load(folder)
    assert model.banned == (7, 9, 95)  # an end token is no bad word
    resolved = options.resolve(
        {"banned_tokens": [3]},
        prompts=1,
        samples=1,
        width=96,
        vocab=96,
        ends=(),
        special_id=None,
        banned=(7, 9),
    )
    assert resolved.allowed is not None
    assert np.flatnonzero(~resolved.allowed[0]).tolist() == [3, 7, 9]
    again = json.loads((save_hf(model, tmp_path / "again") / "generation_config.json").read_text())
    assert again["suppress_tokens"] == [7, 9, 95]
    told(bad_words_ids=[[7], [3, 4]])
    with pytest.raises(ValueError, match=r"bad_words_ids: expected single tokens, got \[\[7\], \[3, 4\]\]"):
        jspec.load(folder)
    told(begin_suppress_tokens=[4])
    with pytest.raises(ValueError, match=r"begin_suppress_tokens = \[4\] is not supported"):
        jspec.load(folder)


def test_float16_is_refused_where_it_overflows(tmp_path):
    load_hf(tiny_checkpoint(tmp_path / "bart", "bart"), dtype="float16")
    for family in ("t5", "mt5"):
        with pytest.raises(ValueError, match=r"dtype: expected bfloat16 or float32 .*, got float16"):
            jspec.load(tiny_checkpoint(tmp_path / family, family), dtype="float16")


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"architectures": ["MambaForCausalLM"]}, "architecture: .*got MambaForCausalLM"),
        ("llama", {"architectures": None, "model_type": "mamba"}, "architecture: .*got mamba"),
        ("llama", {"rope_scaling": {"rope_type": "spiral"}}, "rope_type: .*got 'spiral'"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
        ("llama", {"hidden_act": "mish"}, "activation: .*got 'mish'"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config: .*got 'awq'"),
        ("llama", {"vocab_size": None}, "vocab_size is missing"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim = 16"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types: .*got 'chunked_attention'"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type: .*for Phi-3, got 'yarn'"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "short_factor: expected 4"),
        ("t5", {"architectures": ["UMT5ForConditionalGeneration"]}, "got UMT5ForConditionalGeneration"),
        ("t5", {"architectures": None, "model_type": "longt5"}, "got longt5"),
        ("t5", {"architectures": ["SwitchTransformersForConditionalGeneration"]}, "got SwitchTransformers"),
        ("t5", {"feed_forward_proj": "glu-relu"}, "feed_forward_proj: .*got 'glu-relu'"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "activation: .*got 'mish'"),
        ("t5", {"d_kv": None}, "d_kv is missing"),
        ("bart", {"decoder_ffn_dim": 64}, "decoder_ffn_dim = 64 .*only 48"),
        ("mbart", {"decoder_attention_heads": 2}, "decoder_attention_heads = 2 .*only 4"),
        ("marian", {"decoder_vocab_size": 50}, "decoder_vocab_size = 50"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings = False"),
        ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings = False"),
    ],
)
def test_unknown_settings_are_named(family, overrides, message, tmp_path):
    folder = tiny_checkpoint(tmp_path, family)
    raw = json.loads((folder / "config.json").read_text()) | overrides
    raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message):
        load_hf(folder)


def test_broken_files_are_named(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for size in (0, 4, 100, len(data) - 4):
        file.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"model.safetensors: truncated or not a safetensors file"):
            load_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        load_hf(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config.json"):
        load_hf(folder)


def test_neither_a_folder_nor_a_model_within_reach(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("nobody/nothing", "not a name", str(tmp_path / "absent")):
        with pytest.raises(FileNotFoundError, match=r"neither a folder nor a Hub model within reach"):
            load_hf(name)


def test_length_bound_rotary_refuses_a_larger_cache(tmp_path):
    config, params, _ = load_hf(tiny_checkpoint(tmp_path, "llama", **CASES["llama_dynamic"][1]))
    model = language_model(config)
    prompt = Prompt(jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32))
    model.start(params, prompt, 128)
    with pytest.raises(ValueError, match=r"capacity: the model has 128 positions"):
        model.start(params, prompt, 129)


def test_a_rope_that_holds_so_far_only_bounds_an_architecture():
    values = orbax.describe(tiny_decoder(context_length=128)[0].config)
    for rope, expected in (
        ({"rope_theta": 1e4}, (128, False)),
        ({"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}, (128, True)),
        (
            {"rope_theta": 1e4, "rope_type": "longrope", "short_factor": [1.0] * 4}
            | {"original_max_position_embeddings": 64},
            (64, True),
        ),
    ):
        config = orbax.architecture(values | {"rotary": rope})
        assert (config.context_length, config.bounded) == expected
