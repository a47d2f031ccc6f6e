"""GPT-2."""

from __future__ import annotations

from typing import Any

from jspec.models.decoder import DecoderConfig
from jspec.models.families.base import (
    SAME,
    Family,
    Raw,
    Weights,
    activation,
    activation_name,
    cut,
    layer_norm,
    linear,
    refuse,
)
from jspec.models.rotary import need


def _gpt2(raw: Raw) -> DecoderConfig:
    refuse(raw, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
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
        activation=activation(raw.get("activation_function", "gelu_new")),
        gated=False,
        norm="layer",
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        attention_scale=None if raw.get("scale_attn_weights", True) else 1.0,
        tied=raw.get("tie_word_embeddings", True),
    )


def _gpt2_raw(c: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "n_embd": c.width,
        "n_inner": c.mlp_width,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_positions": c.context_length,
        "activation_function": activation_name(c.activation),
        "layer_norm_epsilon": c.norm_eps,
        "scale_attn_weights": c.attention_scale != 1,
        "tie_word_embeddings": c.tied,
    }


def _gpt2_weights(c: DecoderConfig) -> Weights:
    """Its linear layers are stored [in, out], as ours are."""
    yield "embedding", "wte.weight", SAME
    yield "positions", "wpe.weight", SAME
    for i in range(c.num_layers):
        ours, theirs = f"layers.{i}", f"h.{i}"
        yield from layer_norm(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from layer_norm(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        for part, name in enumerate(("query", "key", "value")):
            take = cut(part * c.width, (part + 1) * c.width, 3 * c.width)
            yield from linear(f"{ours}.attention.{name}", f"{theirs}.attn.c_attn", True, take, take)
        yield from linear(f"{ours}.attention.out", f"{theirs}.attn.c_proj", True, SAME)
        yield from linear(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", True, SAME)
        yield from linear(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", True, SAME)
    yield from layer_norm("norm", "ln_f")


FAMILIES = {
    "GPT2LMHeadModel": Family(
        _gpt2, _gpt2_weights, "gpt2", "transformer.", _gpt2_raw, ignored=(".attn.bias", ".attn.masked_bias")
    ),
}
