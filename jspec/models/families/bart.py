"""BART and what was built like it: mBART, Marian, and OPT, which has no encoder."""

from __future__ import annotations

import dataclasses
from typing import Any

from jspec.models.decoder import DecoderConfig
from jspec.models.families.base import (
    SAME,
    Family,
    Raw,
    Weights,
    activation,
    activation_name,
    behind,
    layer_norm,
    linear,
    refuse,
)
from jspec.models.rotary import need
from jspec.models.seq2seq import Seq2SeqConfig

_EPS = 1e-5  # PyTorch's own, which no config states
_POSITIONS = behind(2)  # rows 0 and 1 of the positions were for padding, once


# --- configs ----------------------------------------------------------------------------------------


def _opt(raw: Raw) -> DecoderConfig:
    width, num_heads = need(raw, "hidden_size"), need(raw, "num_attention_heads")
    refuse(raw, word_embed_proj_dim=width, layer_norm_elementwise_affine=True, _remove_final_layer_norm=False)
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
        activation=activation(raw.get("activation_function", "relu")),
        gated=False,
        norm="layer",
        norm_eps=_EPS,
        norm_placement="pre" if raw.get("do_layer_norm_before", True) else "post",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=raw.get("tie_word_embeddings", True),
    )


def _common(raw: Raw) -> dict[str, Any]:
    """What the encoder-decoders share. Encoder and decoder must be alike but for their depth."""
    width, num_heads, mlp_width, vocab_size = (
        need(raw, key) for key in ("d_model", "encoder_attention_heads", "encoder_ffn_dim", "vocab_size")
    )
    refuse(
        raw,
        decoder_attention_heads=num_heads,
        decoder_ffn_dim=mlp_width,
        decoder_vocab_size=vocab_size,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
    )
    return {
        "vocab_size": vocab_size,
        "width": width,
        "mlp_width": mlp_width,
        "num_layers": need(raw, "decoder_layers"),
        "num_encoder_layers": need(raw, "encoder_layers"),
        "num_heads": num_heads,
        "head_dim": width // num_heads,
        "context_length": need(raw, "max_position_embeddings"),
        "source_length": need(raw, "max_position_embeddings"),
        "activation": activation(raw.get("activation_function", "gelu")),
        "gated": False,
        "norm": "layer",
        "norm_eps": _EPS,
        "norm_placement": "post",
        "bias": True,
        "head_bias": True,
        "tied": True,
        "embedding_scale": float(width) ** 0.5 if raw.get("scale_embedding") else 1.0,
        "attention_scale": (width // num_heads) ** -0.5,
    }


def _marian(raw: Raw) -> Seq2SeqConfig:
    return Seq2SeqConfig(**_common(raw), positions="sinusoidal")


def _bart(raw: Raw) -> Seq2SeqConfig:
    return Seq2SeqConfig(**_common(raw), positions="learned", bounded=True, embedding_norm=True)


def _mbart(raw: Raw) -> Seq2SeqConfig:
    return dataclasses.replace(_bart(raw), norm_placement="pre")


# --- and back ---------------------------------------------------------------------------------------


def _opt_raw(c: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "word_embed_proj_dim": c.width,
        "ffn_dim": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "max_position_embeddings": c.context_length,
        "activation_function": activation_name(c.activation),
        "do_layer_norm_before": c.norm_placement == "pre",
        "enable_bias": c.qkv_bias,
        "tie_word_embeddings": c.tied,
    }


def _raw(c: Seq2SeqConfig) -> dict[str, Any]:
    return {
        "is_encoder_decoder": True,
        "vocab_size": c.vocab_size,
        "d_model": c.width,
        "encoder_layers": c.num_encoder_layers,
        "decoder_layers": c.num_layers,
        "encoder_attention_heads": c.num_heads,
        "decoder_attention_heads": c.num_heads,
        "encoder_ffn_dim": c.mlp_width,
        "decoder_ffn_dim": c.mlp_width,
        "max_position_embeddings": c.context_length,
        "activation_function": activation_name(c.activation),
        "scale_embedding": c.embedding_scale != 1,
    }


# --- weights ----------------------------------------------------------------------------------------


def _layer(ours: str, theirs: str, placement: str, bias: bool, *, cross: bool = False) -> Weights:
    placed = "norm" if placement == "pre" else "post_norm"
    attentions = [("attention", "self_attn"), *([("cross", "encoder_attn")] if cross else [])]
    for part, module in attentions:
        for name in ("query", "key", "value", "out"):
            letter = "out" if name == "out" else name[0]
            yield from linear(f"{ours}.{part}.{name}", f"{theirs}.{module}.{letter}_proj", bias)
        yield from layer_norm(f"{ours}.{part}_{placed}", f"{theirs}.{module}_layer_norm")
    yield from linear(f"{ours}.mlp.up", f"{theirs}.fc1", bias)
    yield from linear(f"{ours}.mlp.down", f"{theirs}.fc2", bias)
    yield from layer_norm(f"{ours}.mlp_{placed}", f"{theirs}.final_layer_norm")


def _opt_weights(c: DecoderConfig) -> Weights:
    yield "embedding", "embed_tokens.weight", SAME
    yield "positions", "embed_positions.weight", _POSITIONS
    for i in range(c.num_layers):
        yield from _layer(f"layers.{i}", f"layers.{i}", c.norm_placement, c.qkv_bias)
    if c.norm_placement == "pre":
        yield from layer_norm("norm", "final_layer_norm")


def _weights(c: Seq2SeqConfig) -> Weights:
    yield "embedding", "shared.weight", SAME
    stacks = (("encoder.", "encoder", c.num_encoder_layers), ("", "decoder", c.num_layers))
    for ours, theirs, num_layers in stacks:
        if c.positions == "learned":
            yield f"{ours}positions", f"{theirs}.embed_positions.weight", _POSITIONS
        if c.embedding_norm:
            yield from layer_norm(f"{ours}embedding_norm", f"{theirs}.layernorm_embedding")
        for i in range(num_layers):
            names = f"{ours}layers.{i}", f"{theirs}.layers.{i}"
            yield from _layer(*names, c.norm_placement, c.bias, cross=theirs == "decoder")
        if c.norm_placement == "pre":
            yield from layer_norm(f"{ours}norm", f"{theirs}.layer_norm")


# --- families ---------------------------------------------------------------------------------------

_BART = Family(
    _bart,
    _weights,
    "bart",
    "model.",
    _raw,
    Seq2SeqConfig,
    head_bias="final_logits_bias",
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
)
FAMILIES = {
    "OPTForCausalLM": Family(_opt, _opt_weights, "opt", "model.decoder.", _opt_raw),
    "BartForConditionalGeneration": _BART,
    "MBartForConditionalGeneration": _BART._replace(config=_mbart, model_type="mbart"),
    "MarianMTModel": _BART._replace(
        config=_marian, model_type="marian", ignored=(".embed_positions.weight",)
    ),
}
ALIASES = {"BartModel": "BartForConditionalGeneration"}  # as facebook/bart-base calls itself
