"""From a checkpoint's own words to ours: config.json to `DecoderConfig`, tensor names to params.

A model family is one `Family`: a mapping of its config and a table of its weights. Nothing is guessed: an
architecture, rope type, activation or quantisation that is not known here is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jspec.models.decoder import DecoderConfig
from jspec.models.rotary import need, rotary

Raw = Mapping[str, Any]  # a config.json
Transform = Callable[[np.ndarray], np.ndarray]
Weights = Iterator[tuple[str, str, Transform]]  # path in params, name in the checkpoint, what to do to it

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


class Family(NamedTuple):
    """How the checkpoints of one architecture are read."""

    config: Callable[[Raw], DecoderConfig]
    weights: Callable[[DecoderConfig], Weights]
    prefix: str  # of every name but the head's; checkpoints of the bare model lack it
    head: str = "lm_head.weight"
    ignored: tuple[str, ...] = ()  # endings of names of buffers that carry nothing


# --- configs ----------------------------------------------------------------------------------------


def _activation(name: str) -> str:
    if name not in ACTIVATION_NAMES:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATION_NAMES)}, got {name!r}")
    return ACTIVATION_NAMES[name]


def _refuse(raw: Raw, **allowed: Any) -> None:
    """An error for a setting that the family could have but that is not implemented."""
    for key, value in allowed.items():
        if raw.get(key, value) not in (value, None):
            raise ValueError(f"config: {key} = {raw[key]!r} is not supported (only {value!r})")


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
        "activation": _activation(raw.get("hidden_act", "silu")),
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
    _refuse(raw, use_bidirectional_attention=False)
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


def _gpt2(raw: Raw) -> DecoderConfig:
    _refuse(raw, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    width, num_heads = need(raw, "n_embd"), need(raw, "n_head")
    return DecoderConfig(
        vocab_size=need(raw, "vocab_size"),
        width=width,
        mlp_width=raw.get("n_inner") or 4 * width,
        num_layers=need(raw, "n_layer"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=width // num_heads,
        context_length=need(raw, "n_positions"),
        bounded=True,
        activation=_activation(raw.get("activation_function", "gelu_new")),
        gated=False,
        norm="layer",
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        attention_scale=None if raw.get("scale_attn_weights", True) else 1.0,
        tied=raw.get("tie_word_embeddings", True),
    )


def _opt(raw: Raw) -> DecoderConfig:
    width, num_heads = need(raw, "hidden_size"), need(raw, "num_attention_heads")
    _refuse(
        raw, word_embed_proj_dim=width, layer_norm_elementwise_affine=True, _remove_final_layer_norm=False
    )
    bias = bool(raw.get("enable_bias", True))
    return DecoderConfig(
        vocab_size=need(raw, "vocab_size"),
        width=width,
        mlp_width=need(raw, "ffn_dim"),
        num_layers=need(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=width // num_heads,
        context_length=need(raw, "max_position_embeddings"),
        bounded=True,
        activation=_activation(raw.get("activation_function", "relu")),
        gated=False,
        norm="layer",
        norm_eps=1e-5,
        norm_placement="pre" if raw.get("do_layer_norm_before", True) else "post",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=raw.get("tie_word_embeddings", True),
    )


# --- weights ----------------------------------------------------------------------------------------


def _same(w: np.ndarray) -> np.ndarray:
    return w


def _transpose(w: np.ndarray) -> np.ndarray:
    return w.T


def _plus_one(w: np.ndarray) -> np.ndarray:
    return w.astype(np.float32) + np.float32(1)  # Gemma multiplies by 1 + weight


def _slice(start: int, stop: int, total: int, transform: Transform = _same) -> Transform:
    """Part of a fused weight, taken along the last axis of the transformed array; one that is not ``total``
    wide there comes back whole, for its shape to be complained about."""

    def take(w: np.ndarray) -> np.ndarray:
        w = transform(w)
        return w[..., start:stop] if w.shape[-1] == total else w

    return take


def _linear(
    path: str, name: str, bias: bool, kernel: Transform = _transpose, vector: Transform = _same
) -> Weights:
    yield f"{path}.kernel", f"{name}.weight", kernel
    if bias:
        yield f"{path}.bias", f"{name}.bias", vector


def llama_weights(c: DecoderConfig, norm: Transform = _same) -> Weights:
    """The weights of Llama and its heirs, head excepted."""
    yield "embedding", "embed_tokens.weight", _same
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}", f"layers.{i}"
        yield f"{ours}.attention_norm.scale", f"{theirs}.input_layernorm.weight", norm
        for part, letter in (("query", "q"), ("key", "k"), ("value", "v")):
            yield from _linear(f"{ours}.attention.{part}", f"{theirs}.self_attn.{letter}_proj", c.qkv_bias)
        yield from _linear(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", c.out_bias)
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
            yield from _linear(f"{ours}.mlp.{part}", f"{theirs}.mlp.{part}_proj", c.mlp_bias)
    yield "norm.scale", "norm.weight", norm


def _gemma_weights(c: DecoderConfig) -> Weights:
    return llama_weights(c, _plus_one)


def _phi3_weights(c: DecoderConfig) -> Weights:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    fused = {
        "q_proj": ("qkv_proj", 0, q, q + 2 * kv),
        "k_proj": ("qkv_proj", q, q + kv, q + 2 * kv),
        "v_proj": ("qkv_proj", q + kv, q + 2 * kv, q + 2 * kv),
        "gate_proj": ("gate_up_proj", 0, c.mlp_width, 2 * c.mlp_width),
        "up_proj": ("gate_up_proj", c.mlp_width, 2 * c.mlp_width, 2 * c.mlp_width),
    }
    for path, name, transform in llama_weights(c):
        part = name.split(".")[-2]
        if part in fused:
            whole, start, stop, total = fused[part]
            yield path, name.replace(part, whole), _slice(start, stop, total, _transpose)
        else:
            yield path, name, transform


def _norm(path: str, name: str) -> Weights:
    yield f"{path}.scale", f"{name}.weight", _same
    yield f"{path}.bias", f"{name}.bias", _same


def _gpt2_weights(c: DecoderConfig) -> Weights:
    """Its linear layers are stored [in, out], as ours are."""
    yield "embedding", "wte.weight", _same
    yield "positions", "wpe.weight", _same
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}", f"h.{i}"
        yield from _norm(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from _norm(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        for part, name in enumerate(("query", "key", "value")):
            take = _slice(part * c.width, (part + 1) * c.width, 3 * c.width)
            yield from _linear(f"{ours}.attention.{name}", f"{theirs}.attn.c_attn", True, take, take)
        yield from _linear(f"{ours}.attention.out", f"{theirs}.attn.c_proj", True, _same)
        yield from _linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", True, _same)
        yield from _linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", True, _same)
    yield from _norm("norm", "ln_f")


def _opt_weights(c: DecoderConfig) -> Weights:
    yield "embedding", "embed_tokens.weight", _same
    yield "positions", "embed_positions.weight", lambda w: w[2:]  # rows 0 and 1 are never read
    placed = "norm" if c.norm_placement == "pre" else "post_norm"
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}", f"layers.{i}"
        yield from _norm(f"{ours}.attention_{placed}", f"{theirs}.self_attn_layer_norm")
        yield from _norm(f"{ours}.mlp_{placed}", f"{theirs}.final_layer_norm")
        for part, name in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            yield from _linear(f"{ours}.attention.{part}", f"{theirs}.self_attn.{name}", c.qkv_bias)
        yield from _linear(f"{ours}.attention.out", f"{theirs}.self_attn.out_proj", c.out_bias)
        yield from _linear(f"{ours}.mlp.up", f"{theirs}.fc1", c.mlp_bias)
        yield from _linear(f"{ours}.mlp.down", f"{theirs}.fc2", c.mlp_bias)
    if c.norm_placement == "pre":
        yield from _norm("norm", "final_layer_norm")


# --- the registry -----------------------------------------------------------------------------------

_INVERSE = (".rotary_emb.inv_freq",)
FAMILIES = {
    "LlamaForCausalLM": Family(_llama, llama_weights, "model.", ignored=_INVERSE),
    "MistralForCausalLM": Family(_mistral, llama_weights, "model.", ignored=_INVERSE),
    "Qwen2ForCausalLM": Family(_qwen2, llama_weights, "model.", ignored=_INVERSE),
    "Qwen3ForCausalLM": Family(_qwen3, llama_weights, "model.", ignored=_INVERSE),
    "Phi3ForCausalLM": Family(_phi3, _phi3_weights, "model.", ignored=_INVERSE),
    "GemmaForCausalLM": Family(_gemma, _gemma_weights, "model.", ignored=_INVERSE),
    "Gemma2ForCausalLM": Family(_gemma2, _gemma_weights, "model.", ignored=_INVERSE),
    "Gemma3ForCausalLM": Family(_gemma3, _gemma_weights, "model.", ignored=_INVERSE),
    "GPT2LMHeadModel": Family(
        _gpt2, _gpt2_weights, "transformer.", ignored=(".attn.bias", ".attn.masked_bias")
    ),
    "OPTForCausalLM": Family(_opt, _opt_weights, "model.decoder."),
}
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
}


def family(raw: Raw) -> Family:
    """The family a config.json names.

    Raises:
        ValueError: an unknown architecture or model type, or a quantised checkpoint.
    """
    kind = str(raw.get("model_type"))
    names = raw.get("architectures") or [MODEL_TYPES.get(kind, kind)]
    if len(names) != 1 or names[0] not in FAMILIES:
        raise ValueError(
            f"architecture: expected one of {', '.join(FAMILIES)}, got {', '.join(map(str, names))}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"quantization_config: quantised checkpoints are not supported, got {method!r}")
    return FAMILIES[str(names[0])]


def decoder_config(raw: Raw) -> DecoderConfig:
    """Architecture of a config.json, old (rope_theta, rope_scaling) or new (rope_parameters).

    Raises:
        ValueError: something the config asks for is unknown; the message names it.
    """
    return family(raw).config(raw)
