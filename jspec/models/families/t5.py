"""T5 1.0, 1.1 and FLAN, and mT5."""

from __future__ import annotations

from typing import Any

from jspec.models.families.base import (
    SAME,
    Family,
    Raw,
    Weights,
    activation,
    activation_name,
    linear,
)
from jspec.models.rotary import need
from jspec.models.seq2seq import ENDLESS, Seq2SeqConfig


def _common(raw: Raw, feed_forward: str) -> dict[str, Any]:
    """The head counts as tied whatever the config says: transformers 5 ties it unless another is stored.
    Positions are relative; what a checkpoint calls n_positions bounds nothing."""
    feed_forward = raw.get("feed_forward_proj", feed_forward)
    gate, _, name = feed_forward.rpartition("-")
    if gate not in ("", "gated"):
        raise ValueError(f"feed_forward_proj: expected ACTIVATION or gated-ACTIVATION, got {feed_forward!r}")
    if feed_forward == "gated-gelu":
        name = "gelu_new"
    return {
        "vocab_size": need(raw, "vocab_size"),
        "width": need(raw, "d_model"),
        "mlp_width": need(raw, "d_ff"),
        "num_layers": raw.get("num_decoder_layers") or need(raw, "num_layers"),
        "num_encoder_layers": need(raw, "num_layers"),
        "num_heads": need(raw, "num_heads"),
        "head_dim": need(raw, "d_kv"),
        "context_length": raw.get("max_target_positions", ENDLESS),
        "source_length": raw.get("max_source_positions", ENDLESS),
        "relative_buckets": raw.get("relative_attention_num_buckets", 32),
        "relative_distance": raw.get("relative_attention_max_distance", 128),
        "activation": activation(raw.get("dense_act_fn", name)),
        "gated": raw.get("is_gated_act", gate == "gated"),
        "norm_eps": raw.get("layer_norm_epsilon", 1e-6),
        "tied": True,
    }


def _t5(raw: Raw) -> Seq2SeqConfig:
    """Version 1.1 says that its head is not tied, and means that it is not scaled."""
    fields = _common(raw, "relu")
    scaled = raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings") is not False)
    return Seq2SeqConfig(**fields, logit_scale=fields["width"] ** -0.5 if scaled else 1.0)


def _mt5(raw: Raw) -> Seq2SeqConfig:
    return Seq2SeqConfig(**_common(raw, "gated-gelu"))


def _raw(c: Seq2SeqConfig) -> dict[str, Any]:
    """The ends of the positions, where there are any, are told under names that only `_common` knows."""
    name = activation_name(c.activation)
    lengths = {"max_target_positions": c.context_length, "max_source_positions": c.source_length}
    return {
        "is_encoder_decoder": True,
        "vocab_size": c.vocab_size,
        "d_model": c.width,
        "d_kv": c.head_dim,
        "d_ff": c.mlp_width,
        "num_layers": c.num_encoder_layers,
        "num_decoder_layers": c.num_layers,
        "num_heads": c.num_heads,
        "relative_attention_num_buckets": c.relative_buckets,
        "relative_attention_max_distance": c.relative_distance,
        "layer_norm_epsilon": c.norm_eps,
        "feed_forward_proj": ("gated-" if c.gated else "") + name.replace("gelu_new", "gelu"),
        "dense_act_fn": name,
        "is_gated_act": c.gated,
        "tie_word_embeddings": c.logit_scale != 1,
        **{key: length for key, length in lengths.items() if length != ENDLESS},
    }


def _attention(path: str, name: str) -> Weights:
    for ours in ("query", "key", "value", "out"):
        yield from linear(f"{path}.{ours}", f"{name}.{ours[0]}", False)


def _weights(c: Seq2SeqConfig) -> Weights:
    yield "embedding", "shared.weight", SAME
    up = (("gate", "wi_0"), ("up", "wi_1")) if c.gated else (("up", "wi"),)
    for ours, theirs, num_layers in (
        ("encoder.", "encoder", c.num_encoder_layers),
        ("", "decoder", c.num_layers),
    ):
        bias = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield f"{ours}relative_bias", bias, SAME
        for i in range(num_layers):
            layer, block, last = f"{ours}layers.{i}", f"{theirs}.block.{i}.layer", 1
            yield from _attention(f"{layer}.attention", f"{block}.0.SelfAttention")
            yield f"{layer}.attention_norm.scale", f"{block}.0.layer_norm.weight", SAME
            if theirs == "decoder":
                yield from _attention(f"{layer}.cross", f"{block}.1.EncDecAttention")
                yield f"{layer}.cross_norm.scale", f"{block}.1.layer_norm.weight", SAME
                last = 2
            for part, name in (*up, ("down", "wo")):
                yield from linear(f"{layer}.mlp.{part}", f"{block}.{last}.DenseReluDense.{name}", False)
            yield f"{layer}.mlp_norm.scale", f"{block}.{last}.layer_norm.weight", SAME
        yield f"{ours}norm.scale", f"{theirs}.final_layer_norm.weight", SAME


_T5 = Family(
    _t5,
    _weights,
    "t5",
    raw=_raw,
    makes=Seq2SeqConfig,
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    # The first releases had a bias of cross-attention that nothing reads.
    ignored=(".EncDecAttention.relative_attention_bias.weight",),
)
FAMILIES = {
    "T5ForConditionalGeneration": _T5,
    "MT5ForConditionalGeneration": _T5._replace(config=_mt5, model_type="mt5", raw=None),
}
ALIASES = {"T5WithLMHeadModel": "T5ForConditionalGeneration"}  # as early configs call it
