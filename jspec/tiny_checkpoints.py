"""Random checkpoints on disk, a tiny one of every family, with weights that are the same on every machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = _LLAMA | {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GEMMA_2 = _GEMMA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
}
_SPECIAL = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}
_T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": 1e-6,
    **_SPECIAL,
}
_BART = {
    "architectures": ["BartForConditionalGeneration"],
    "model_type": "bart",
    "is_encoder_decoder": True,
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "activation_function": "gelu",
    "max_position_embeddings": 64,
    "scale_embedding": False,
    **_SPECIAL,
    "forced_eos_token_id": None,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5},
    "qwen2": _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "phi3": _LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "gemma": _GEMMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
    "gemma2": _GEMMA_2
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": _GEMMA_2
    | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window_pattern": 3},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 96,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "do_layer_norm_before": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "t5": _T5 | {"feed_forward_proj": "relu"},
    "t5_v1_1": _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": _T5
    | {
        "architectures": ["MT5ForConditionalGeneration"],
        "model_type": "mt5",
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
    "marian": _BART
    | {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "activation_function": "swish",
        "scale_embedding": True,
        "static_position_embeddings": True,
    },
    "bart": _BART,
    "mbart": _BART
    | {
        "architectures": ["MBartForConditionalGeneration"],
        "model_type": "mbart",
        "activation_function": "relu",
        "scale_embedding": True,
    },
}


def _llama_shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    kind, width, mlp = c["model_type"], c["hidden_size"], c["intermediate_size"]
    head = c.get("head_dim") or width // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    projections = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, q)}
    gates = {"gate_proj": (mlp, width), "up_proj": (mlp, width)}
    if kind == "phi3":
        projections = {"qkv_proj": (q + 2 * kv, width), "o_proj": (width, q)}
        gates = {"gate_up_proj": (2 * mlp, width)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    yield "model.embed_tokens.weight", (c["vocab_size"], width)
    yield "model.norm.weight", (width,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], width)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in projections.items():
            yield f"{layer}.self_attn.{name}.weight", shape
            if c.get("attention_bias") or (kind == "qwen2" and name != "o_proj"):
                yield f"{layer}.self_attn.{name}.bias", shape[:1]
        for name, shape in (gates | {"down_proj": (width, mlp)}).items():
            yield f"{layer}.mlp.{name}.weight", shape
            if c.get("mlp_bias"):
                yield f"{layer}.mlp.{name}.bias", shape[:1]
        if kind in ("qwen3", "gemma3_text"):
            yield f"{layer}.self_attn.q_norm.weight", (head,)
            yield f"{layer}.self_attn.k_norm.weight", (head,)
        for name in norms:
            yield f"{layer}.{name}.weight", (width,)


def _gpt2_shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = c["n_embd"]
    mlp = c.get("n_inner") or 4 * width
    yield "transformer.wte.weight", (c["vocab_size"], width)
    yield "transformer.wpe.weight", (c["n_positions"], width)
    norms = ["transformer.ln_f"]
    for i in range(c["n_layer"]):
        layer = f"transformer.h.{i}"
        norms += [f"{layer}.ln_1", f"{layer}.ln_2"]
        linears = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
        for name, shape in (linears | {"mlp.c_fc": (width, mlp), "mlp.c_proj": (mlp, width)}).items():
            yield f"{layer}.{name}.weight", shape
            yield f"{layer}.{name}.bias", shape[1:]
    for name in norms:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)


def _opt_shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, mlp = c["hidden_size"], c["ffn_dim"]
    yield "model.decoder.embed_tokens.weight", (c["vocab_size"], width)
    yield "model.decoder.embed_positions.weight", (c["max_position_embeddings"] + 2, width)
    if not c.get("tie_word_embeddings", True):
        yield "lm_head.weight", (c["vocab_size"], width)
    norms = ["model.decoder.final_layer_norm"] if c["do_layer_norm_before"] else []
    for i in range(c["num_hidden_layers"]):
        layer = f"model.decoder.layers.{i}"
        norms += [f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm"]
        linears = {f"self_attn.{name}": (width, width) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        for name, shape in (linears | {"fc1": (mlp, width), "fc2": (width, mlp)}).items():
            yield f"{layer}.{name}.weight", shape
            yield f"{layer}.{name}.bias", shape[:1]
    for name in norms:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)


def _t5_shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, mlp = c["d_model"], c["num_heads"] * c["d_kv"], c["d_ff"]
    gated = c["feed_forward_proj"].startswith("gated-")
    attention = {"q": (inner, width), "k": (inner, width), "v": (inner, width), "o": (width, inner)}
    dense = dict.fromkeys(("wi_0", "wi_1") if gated else ("wi",), (mlp, width)) | {"wo": (width, mlp)}
    yield "shared.weight", (c["vocab_size"], width)
    if c.get("tie_word_embeddings") is False:
        yield "lm_head.weight", (c["vocab_size"], width)
    for stack, depth in (("encoder", c["num_layers"]), ("decoder", c["num_decoder_layers"])):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield bias, (c["relative_attention_num_buckets"], c["num_heads"])
        yield f"{stack}.final_layer_norm.weight", (width,)
        cross = {"EncDecAttention": attention} if stack == "decoder" else {}
        for i in range(depth):
            layers = {"SelfAttention": attention} | cross | {"DenseReluDense": dense}
            for j, (name, linears) in enumerate(layers.items()):
                layer = f"{stack}.block.{i}.layer.{j}"
                yield f"{layer}.layer_norm.weight", (width,)
                for linear, shape in linears.items():
                    yield f"{layer}.{name}.{linear}.weight", shape


def _bart_shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    kind, width, norms = c["model_type"], c["d_model"], []
    yield "model.shared.weight", (c["vocab_size"], width)
    yield "final_logits_bias", (1, c["vocab_size"])
    for stack, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        mlp = c[f"{stack}_ffn_dim"]
        if kind != "marian":
            yield f"model.{stack}.embed_positions.weight", (c["max_position_embeddings"] + 2, width)
            norms.append(f"model.{stack}.layernorm_embedding")
        if kind == "mbart":
            norms.append(f"model.{stack}.layer_norm")
        for i in range(c[f"{stack}_layers"]):
            layer = f"model.{stack}.layers.{i}"
            norms += [f"{layer}.{name}_layer_norm" for name in (*attentions, "final")]
            names = [f"{a}.{part}_proj" for a in attentions for part in ("q", "k", "v", "out")]
            linears = dict.fromkeys(names, (width, width)) | {"fc1": (mlp, width), "fc2": (width, mlp)}
            for name, shape in linears.items():
                yield f"{layer}.{name}.weight", shape
                yield f"{layer}.{name}.bias", shape[:1]
    for name in norms:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)


_SHAPES = {
    "gpt2": _gpt2_shapes,
    "opt": _opt_shapes,
    "t5": _t5_shapes,
    "mt5": _t5_shapes,
    "marian": _bart_shapes,
    "bart": _bart_shapes,
    "mbart": _bart_shapes,
}


def tiny_checkpoint(folder: str | Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint, config.json and model.safetensors in float32, and return its folder.

    Args:
        folder: made if it is not there.
        family: llama, mistral (window 5), qwen2, qwen3, phi3, gemma, gemma2, gemma3, gpt2, opt, t5, t5_v1_1,
            mt5, marian, bart or mbart.
        seed: of numpy's generator: the same weights on every machine.
        overrides: entries of config.json; None removes one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(path.name for path in tiny_checkpoint(folder, "gpt2", n_layer=1).iterdir())
    ['config.json', 'model.safetensors']
    """
    if family not in CHECKPOINTS:
        raise ValueError(f"family: expected one of {', '.join(CHECKPOINTS)}, got {family!r}")
    config = {key: value for key, value in (CHECKPOINTS[family] | overrides).items() if value is not None}
    shapes = _SHAPES.get(config["model_type"], _llama_shapes)
    rng = np.random.default_rng(seed)
    centre = 0.0 if family.startswith("gemma") else 1.0  # Gemma's norms multiply by 1 + weight
    tensors = {}
    for name, shape in shapes(config):
        noise = rng.standard_normal(shape, np.float32)
        if "norm" in name or ".ln_" in name:
            tensors[name] = np.float32(0.1) * noise + np.float32(centre if name.endswith("weight") else 0)
        elif len(shape) == 1:
            tensors[name] = np.float32(0.1) * noise
        else:
            tensors[name] = noise * np.float32(0.2)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
