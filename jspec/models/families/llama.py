"""Llama and its heirs: Mistral, Qwen 2 and 3, Phi-3, Gemma 1 to 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jspec.models.decoder import DecoderConfig
from jspec.models.families.base import (
    SAME,
    TRANSPOSE,
    Family,
    Raw,
    Transform,
    Weights,
    activation,
    activation_name,
    cut,
    linear,
    refuse,
)
from jspec.models.rotary import Rotary, need, rotary

# --- configs ----------------------------------------------------------------------------------------


def _positions(raw: Raw, head_dim: int, theta: float, local_theta: float | None = None) -> dict[str, Any]:
    """The rope fields, from version 5's ``rope_parameters`` (one dict, or one a layer type) or from
    ``rope_theta`` and ``rope_scaling``."""
    context_length = need(raw, "max_position_embeddings")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    ropes = {"full_attention": rope, "sliding_attention": {}}
    if set(rope) & set(ropes):
        ropes |= rope
    defaults = {
        "full_attention": raw.get("rope_theta") or theta,
        "sliding_attention": raw.get("rope_local_base_freq") or local_theta,
    }
    made = {}
    for name, default in defaults.items():
        settings = {key: value for key, value in (ropes[name] or {}).items() if value is not None}
        settings.setdefault("rope_theta", default)
        for key in ("partial_rotary_factor", "original_max_position_embeddings"):
            if raw.get(key) is not None:  # written outside the dict: Phi's way, which takes precedence
                settings[key] = raw[key]
        made[name] = (
            (None, None) if settings["rope_theta"] is None else rotary(settings, head_dim, context_length)
        )
    (main, bound), (local, local_bound) = made["full_attention"], made["sliding_attention"]
    bound = min((b for b in (bound, local_bound) if b is not None), default=None)
    return {
        "rotary": main,
        "local_rotary": local,
        "context_length": bound or context_length,
        "bounded": bound is not None,
    }


def _windows(raw: Raw, sliding: Callable[[int], bool]) -> tuple[int | None, ...] | None:
    """Window of each layer, by ``layer_types`` where the config lists them, else by ``sliding(layer)``."""
    window, num_layers = raw.get("sliding_window"), need(raw, "num_hidden_layers")
    types = raw.get("layer_types")
    if types is None:
        types = ["sliding_attention" if sliding(i) else "full_attention" for i in range(num_layers)]
    for kind in types:
        if kind not in ("sliding_attention", "full_attention"):
            raise ValueError(f"layer_types: expected sliding_attention or full_attention, got {kind!r}")
    if window is None or "sliding_attention" not in types:
        return None
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _common(
    raw: Raw, *, tied: bool, theta: float = 10000.0, local_theta: float | None = None
) -> dict[str, Any]:
    """What Llama and its heirs share."""
    num_heads, width = need(raw, "num_attention_heads"), need(raw, "hidden_size")
    head_dim = raw.get("head_dim") or width // num_heads
    return {
        "vocab_size": need(raw, "vocab_size"),
        "width": width,
        "mlp_width": need(raw, "intermediate_size"),
        "num_layers": need(raw, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": raw.get("num_key_value_heads") or num_heads,
        "head_dim": head_dim,
        "activation": activation(raw.get("hidden_act", "silu")),
        "norm_eps": need(raw, "rms_norm_eps"),
        "tied": raw.get("tie_word_embeddings", tied),
        **_positions(raw, head_dim, theta, local_theta),
    }


def _llama(raw: Raw) -> DecoderConfig:
    bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        **_common(raw, tied=False), qkv_bias=bias, out_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False))
    )


def _mistral(raw: Raw) -> DecoderConfig:
    return DecoderConfig(
        **_common(raw, tied=False), windows=_windows({**raw, "layer_types": None}, lambda _: True)
    )


def _qwen2(raw: Raw) -> DecoderConfig:
    used = raw.get("use_sliding_window", False)
    raw = raw if used else {**raw, "sliding_window": None}
    windows = _windows(raw, lambda i: i >= raw.get("max_window_layers", 28))
    return DecoderConfig(**_common(raw, tied=False), windows=windows, qkv_bias=True)


def _qwen3(raw: Raw) -> DecoderConfig:
    raw = {"head_dim": 128, **raw}
    used = raw.get("use_sliding_window", False)
    raw = raw if used else {**raw, "sliding_window": None}
    windows = _windows(raw, lambda i: i >= raw.get("max_window_layers", 28))
    bias = bool(raw.get("attention_bias", False))
    return DecoderConfig(
        **_common(raw, tied=False), windows=windows, qk_norm=True, qkv_bias=bias, out_bias=bias
    )


def _phi3(raw: Raw) -> DecoderConfig:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "longrope", "su"):  # early files say yarn and mean longrope
        raise ValueError(f"rope_type: expected default or longrope for Phi-3, got {kind!r}")
    return DecoderConfig(**_common(raw, tied=False), windows=_windows(raw, lambda _: True))


def _gemma_common(raw: Raw, theta: float = 10000.0, local_theta: float | None = None) -> dict[str, Any]:
    refuse(raw, use_bidirectional_attention=False)
    name = raw.get("hidden_activation") or raw.get("hidden_act") or "gelu_pytorch_tanh"
    if name == "gelu":  # the first releases wrote gelu and meant its tanh form
        name = "gelu_pytorch_tanh"
    bias = bool(raw.get("attention_bias", False))
    fields = _common(
        {"head_dim": 256, **raw, "hidden_act": name}, tied=True, theta=theta, local_theta=local_theta
    )
    return fields | {"qkv_bias": bias, "out_bias": bias, "embedding_scale": need(raw, "hidden_size") ** 0.5}


def _gemma(raw: Raw) -> DecoderConfig:
    return DecoderConfig(**_gemma_common(raw))


def _gemma2_fields(raw: Raw) -> dict[str, Any]:
    return {
        "norm_placement": "both",
        "attention_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": raw.get("attn_logit_softcapping"),
        "logit_softcap": raw.get("final_logit_softcapping"),
    }


def _gemma2(raw: Raw) -> DecoderConfig:
    raw = {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **raw}
    windows = _windows(raw, lambda i: i % 2 == 0)
    return DecoderConfig(**_gemma_common(raw), **_gemma2_fields(raw), windows=windows)


def _gemma3(raw: Raw) -> DecoderConfig:
    raw = {"sliding_window": 4096, **raw}
    pattern = raw.get("sliding_window_pattern", 6)
    windows = _windows(raw, lambda i: (i + 1) % pattern != 0)
    fields = _gemma_common(raw, theta=1e6, local_theta=10000.0)
    return DecoderConfig(**fields, **_gemma2_fields(raw), windows=windows, qk_norm=True)


# --- and back ---------------------------------------------------------------------------------------


def _theta(positions: Rotary | None) -> float:
    """The base of unscaled frequencies; of any others, a number that does not make them."""
    last = 1.0 if positions is None else positions.frequencies[-1]
    dim = 2 if positions is None else 2 * len(positions.frequencies)
    return 10000.0 if dim == 2 else float(f"{last ** (-dim / (dim - 2)):.6g}")


def _llama_raw(c: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": activation_name(c.activation),
        "rms_norm_eps": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "max_position_embeddings": c.context_length,
        "rope_theta": _theta(c.rotary),
        "attention_bias": c.qkv_bias,
        "mlp_bias": c.mlp_bias,
    }


def _mistral_raw(c: DecoderConfig) -> dict[str, Any]:
    return _llama_raw(c) | {"sliding_window": c.window(0)}


def _qwen_raw(c: DecoderConfig) -> dict[str, Any]:
    windows = [c.window(i) for i in range(c.num_layers)]
    window = next((size for size in windows if size is not None), None)
    return _llama_raw(c) | {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "layer_types": ["full_attention" if size is None else "sliding_attention" for size in windows],
    }


# --- weights ----------------------------------------------------------------------------------------

_PLUS_ONE = Transform(  # Gemma multiplies by 1 + weight
    lambda w: w.astype(np.float32) + np.float32(1), lambda w: w.astype(np.float32) - np.float32(1)
)


def weights(c: DecoderConfig, norm: Transform = SAME) -> Weights:
    """The weights of Llama and its heirs, head excepted."""
    yield "embedding", "embed_tokens.weight", SAME
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}", f"layers.{i}"
        yield f"{ours}.attention_norm.scale", f"{theirs}.input_layernorm.weight", norm
        for part, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            yield from linear(f"{ours}.attention.{part}", f"{theirs}.self_attn.{letter}_proj", c.qkv_bias)
        yield from linear(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", c.out_bias)
        if c.qk_norm:
            yield f"{ours}.attention.query_norm.scale", f"{theirs}.self_attn.q_norm.weight", norm
            yield f"{ours}.attention.key_norm.scale", f"{theirs}.self_attn.k_norm.weight", norm
        if c.norm_placement == "both":
            yield f"{ours}.attention_post_norm.scale", f"{theirs}.post_attention_layernorm.weight", norm
            yield f"{ours}.mlp_norm.scale", f"{theirs}.pre_feedforward_layernorm.weight", norm
            yield f"{ours}.mlp_post_norm.scale", f"{theirs}.post_feedforward_layernorm.weight", norm
        else:
            yield f"{ours}.mlp_norm.scale", f"{theirs}.post_attention_layernorm.weight", norm
        for part in ("gate", "up", "down"):
            yield from linear(f"{ours}.mlp.{part}", f"{theirs}.mlp.{part}_proj", c.mlp_bias)
    yield "norm.scale", "norm.weight", norm


def _gemma_weights(c: DecoderConfig) -> Weights:
    return weights(c, _PLUS_ONE)


def _phi3_weights(c: DecoderConfig) -> Weights:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    fused = {
        "q_proj": ("qkv_proj", 0, q, q + 2 * kv),
        "k_proj": ("qkv_proj", q, q + kv, q + 2 * kv),
        "v_proj": ("qkv_proj", q + kv, q + 2 * kv, q + 2 * kv),
        "gate_proj": ("gate_up_proj", 0, c.mlp_width, 2 * c.mlp_width),
        "up_proj": ("gate_up_proj", c.mlp_width, 2 * c.mlp_width, 2 * c.mlp_width),
    }
    for path, name, transform in weights(c):
        part = name.split(".")[-2]
        if part in fused:
            whole, start, stop, total = fused[part]
            yield path, name.replace(part, whole), cut(start, stop, total, TRANSPOSE)
        else:
            yield path, name, transform


# --- families ---------------------------------------------------------------------------------------


def _family(model_type: str, config: Callable[[Raw], DecoderConfig], **settings: Any) -> Family:
    fields = {"weights": weights, "prefix": "model.", "ignored": (".rotary_emb.inv_freq",)}
    return Family(config, model_type=model_type, **(fields | settings))


FAMILIES = {
    "LlamaForCausalLM": _family("llama", _llama, raw=_llama_raw),
    "MistralForCausalLM": _family("mistral", _mistral, raw=_mistral_raw),
    "Qwen2ForCausalLM": _family("qwen2", _qwen2, raw=_qwen_raw),
    "Qwen3ForCausalLM": _family("qwen3", _qwen3, raw=_qwen_raw),
    "Phi3ForCausalLM": _family("phi3", _phi3, weights=_phi3_weights),
    "GemmaForCausalLM": _family("gemma", _gemma, weights=_gemma_weights),
    "Gemma2ForCausalLM": _family("gemma2", _gemma2, weights=_gemma_weights),
    "Gemma3ForCausalLM": _family("gemma3_text", _gemma3, weights=_gemma_weights),
}
