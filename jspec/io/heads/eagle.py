"""EAGLE-1 and EAGLE-2 (arXiv 2401.15077, 2406.16858; the same weights), as SafeAILab/EAGLE writes them and as
vllm-project/speculators does.

Read from eagle/model/cnets1.py (2174a79), eagle/model/ea_model.py (47de7b0) and eagle/train/*.json of
SafeAILab/EAGLE, and src/speculators/models/eagle.py (0370128) and convert/eagle/eagle_converter.py (035f9e0)
of vllm-project/speculators. config.json is a Llama's (``num_hidden_layers`` 1; ``bias`` of fc, true where it
is not said); the tensors lie in pytorch_model.bin or model.safetensors::

    fc.weight [E, 2 E], fc.bias [E]                 over [embedding; hidden state]
    layers.{i}.self_attn.{q,k,v,o}_proj.weight, layers.{i}.mlp.{gate,up,down}_proj.weight
    layers.{i}.post_attention_layernorm.weight, layers.{i}.input_layernorm.weight (i > 0)
    embed_tokens.weight [V, E]                      a frozen copy of the target's, often left out

speculators call ``fc`` ``fusion_fc`` and ``layers.0`` ``transformer``, and put the Llama's settings under
``transformer_layer_config``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from jspec.drafters.eagle import EagleConfig, eagle, eagle_network
from jspec.drafters.model import HasModel
from jspec.io.heads.layout import Layout, Raw, Shapes, Table, strip
from jspec.io.heads.transformer import (
    NORMS,
    layer,
    norms,
    sizes,
    sizes_raw,
    speculative_tokens,
    speculators_raw,
)
from jspec.models.families.base import linear, refuse

SPECULATORS = {"fc": "fusion_fc", "layers.0": "transformer"}


def canonical(c: Any) -> Any:
    """A recurrent net's config with the sizes that it left open."""
    decoder = c.decoder
    return dataclasses.replace(
        c, num_heads=decoder.num_heads, num_kv_heads=decoder.num_kv_heads, mlp_width=decoder.mlp_width
    )


def _fits(raw: Raw, names: Collection[str]) -> bool:
    bare = {name.removeprefix("model.") for name in names}
    return "fc.weight" in bare and "layers.0.self_attn.q_proj.weight" in bare and "norm.weight" not in bare


def _config(raw: Raw, shapes: Shapes, model: HasModel) -> EagleConfig:
    return EagleConfig(
        **sizes(raw, model), bias="fc.bias" in shapes, qkv_bias=bool(raw.get("attention_bias", False))
    )


def _table(c: EagleConfig) -> Table:
    yield from linear("fc", "fc", c.bias)
    for i in range(c.num_layers):
        ours, theirs = f"stack.layers.{i}", f"layers.{i}"
        yield from layer(ours, theirs, bias=c.qkv_bias, qk_norm=c.qk_norm)
        names = {mine: name for mine, name in NORMS.items() if i > 0 or mine != "attention_norm"}
        yield from norms(ours, theirs, names)


def _raw(c: EagleConfig, model: HasModel, num_tokens: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        **sizes_raw(c, model, "llama"),
        "attention_bias": c.qkv_bias,
        "bias": c.bias,
    }


EAGLE = Layout(
    "eagle",
    eagle_network,
    eagle,
    _fits,
    _config,
    _table,
    _raw,
    copies={"embed_tokens.weight": "embedding"},
    rename=strip("model."),
    canonical=canonical,
)


# --- speculators ------------------------------------------------------------------------------------


def _their_config(raw: Raw, shapes: Shapes, model: HasModel) -> EagleConfig:
    refuse(raw, layernorms=False, transformer_layer_architecture="LlamaDecoderLayer")
    inner = raw["transformer_layer_config"]
    bias = "fusion_fc.bias" in shapes
    return EagleConfig(**sizes(inner, model), bias=bias, qkv_bias=bool(inner.get("attention_bias", False)))


def _their_table(c: EagleConfig) -> Table:
    for path, name, transform in _table(c):
        for ours, theirs in SPECULATORS.items():
            if name.startswith(ours + "."):
                name = theirs + name.removeprefix(ours)
        yield path, name, transform


def _their_raw(c: EagleConfig, model: HasModel, num_tokens: int) -> dict[str, Any]:
    return {
        **speculators_raw("eagle", "EagleSpeculator", model, num_tokens),
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": {**sizes_raw(c, model, "llama"), "attention_bias": c.qkv_bias},
        "layernorms": False,
        "fusion_bias": c.bias,
    }


EAGLE_SPECULATORS = EAGLE._replace(
    name="eagle/speculators",
    fits=lambda raw, names: raw.get("speculators_model_type") == "eagle",
    config=_their_config,
    table=_their_table,
    raw=_their_raw,
    settings=speculative_tokens,
)
