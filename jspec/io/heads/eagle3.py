"""EAGLE-3 and 3.1 (arXiv 2503.01840), as SafeAILab/EAGLE and sgl-project/SpecForge write them and as
vllm-project/speculators does.

Read from eagle/model/cnets.py (148042c), eagle/traineagle3/cnets.py (09fe6a0) and config.json of
SafeAILab/EAGLE; specforge/modeling/draft/llama3_eagle.py (89241ea) and configs/qwen3-30B-A3B-eagle3.1.json
(581664a) of sgl-project/SpecForge; src/speculators/models/eagle3/{core,config,model_definitions}.py (033c87f,
11ecdd3, 08af5f4) of vllm-project/speculators. The tensors, over a reduced vocabulary of Vd =
``draft_vocab_size`` tokens::

    fc.weight [E, 3 E], fc_norm.{i}.weight [E]     of the tapped layers (``fc_norm``: EAGLE-3.1)
    midlayer.input_layernorm.weight                of the embedding
    midlayer.hidden_norm.weight                    of the hidden state
    midlayer.self_attn.{q,k,v}_proj.weight [., 2 E], o_proj; midlayer.mlp.{gate,up,down}_proj.weight
    midlayer.post_attention_layernorm.weight, norm.weight, lm_head.weight [Vd, E]
    d2t [Vd] int64                                 token = column + d2t[column]
    t2d [V] bool                                   tokens that are columns
    embed_tokens.weight [V, E]                     a frozen copy of the target's, often left out

speculators say ``layers.0`` for ``midlayer`` and may have further layers; either spelling is read. Which of
the target's layers are read: the *inputs* of layers 2, L // 2 and L - 3, unless ``eagle_config`` (SpecForge,
SGLang) lists layers whose *outputs* are, or, in a speculators config, ``eagle_aux_hidden_state_layer_ids``
lists layers whose inputs are.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jspec.drafters.eagle import Eagle3Config, eagle, eagle_network
from jspec.drafters.model import HasModel
from jspec.io.heads.eagle import canonical
from jspec.io.heads.layout import Layout, Raw, Shapes, Table, respell
from jspec.io.heads.transformer import (
    NORMS,
    layer,
    norms,
    sizes,
    sizes_raw,
    speculative_tokens,
    speculators_raw,
)
from jspec.models.families.base import SAME, TRANSPOSE, refuse
from jspec.models.rotary import need

FIRST = {
    "embedding_norm": "input_layernorm",
    "attention_norm": "hidden_norm",
    "mlp_norm": "post_attention_layernorm",
}
IDS = "eagle_aux_hidden_state_layer_ids"


def _fits(raw: Raw, names: Collection[str]) -> bool:
    bare = {name.removeprefix("model.") for name in names}
    return bool({"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & bare)


def _taps(model: HasModel) -> tuple[int, ...]:
    layers = model.lm.config.num_layers
    return (2, layers // 2, layers - 3)


def _head(raw: Raw, vocab_size: int) -> dict[str, Any]:
    columns = raw.get("draft_vocab_size") or vocab_size
    return {"head": "own", "draft_vocab": None if columns == vocab_size else columns}


def _config(raw: Raw, shapes: Shapes, model: HasModel) -> Eagle3Config:
    refuse(raw, norm_before_fc=False)
    told = raw.get("eagle_config") or {}
    refuse(told, use_aux_hidden_state=True)
    outputs = told.get(IDS)
    return Eagle3Config(
        **sizes(raw, model),
        **_head(raw, need(raw, "vocab_size")),
        taps=_taps(model) if outputs is None else tuple(i + 1 for i in outputs),
        fc_norm=bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
        feed_normed=bool(raw.get("norm_output", False)),
        normed_residual=bool(raw.get("norm_before_residual", False)),
        qkv_bias=bool(raw.get("attention_bias", False)),
        qk_norm=_qk_norm(shapes),
    )


def _qk_norm(shapes: Shapes) -> bool:
    return any(name.endswith(".self_attn.q_norm.weight") for name in shapes)


def _table(c: Eagle3Config, first: str = "midlayer") -> Table:
    yield "fc.kernel", "fc.weight", TRANSPOSE
    for i in range(len(c.taps) if c.fc_norm else 0):
        yield f"fc_norm.{i}.scale", f"fc_norm.{i}.weight", SAME
    for i in range(c.num_layers):
        ours, theirs = f"stack.layers.{i}", f"layers.{i}" if i else first
        yield from layer(ours, theirs, bias=c.qkv_bias, qk_norm=c.qk_norm)
        yield from norms(ours, theirs, NORMS if i else FIRST)
    yield "stack.norm.scale", "norm.weight", SAME
    yield "head", "lm_head.weight", TRANSPOSE


def _raw(c: Eagle3Config, model: HasModel, num_tokens: int) -> dict[str, Any]:
    outputs = [tap - 1 for tap in c.taps]
    # SpecForge and SGLang look for outputs in eagle_config, vLLM for inputs beside it.
    told = {"eagle_config": {IDS: outputs, "use_aux_hidden_state": True}, IDS: list(c.taps)}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **sizes_raw(c, model, "llama"),
        **({} if c.taps == _taps(model) else told),
        "attention_bias": c.qkv_bias,
        "draft_vocab_size": c.columns,
        "fc_norm": c.fc_norm,
        "norm_output": c.feed_normed,
        "norm_before_residual": c.normed_residual,
    }


EAGLE3 = Layout(
    "eagle3",
    eagle_network,
    eagle,
    _fits,
    _config,
    _table,
    _raw,
    copies={"embed_tokens.weight": "embedding"},
    own_head=True,
    rename=respell(("model.", ""), ("layers.0.", "midlayer.")),
    canonical=canonical,
)


# --- speculators ------------------------------------------------------------------------------------


def _their_config(raw: Raw, shapes: Shapes, model: HasModel) -> Eagle3Config:
    refuse(raw, norm_before_fc=False, embed_requires_grad=False)
    inner = need(raw, "transformer_layer_config")
    taps = raw.get(IDS)
    fields = sizes({**inner, "target_hidden_size": raw.get("target_hidden_size")}, model)
    return Eagle3Config(
        **fields,
        **_head(raw, fields["vocab_size"]),
        taps=_taps(model) if taps is None else tuple(taps),
        fc_norm=bool(raw.get("fc_norm", False)),
        feed_normed=bool(raw.get("norm_output", False)),
        normed_residual=bool(need(raw, "norm_before_residual")),
        qkv_bias=bool(inner.get("attention_bias", False)),
        qk_norm=_qk_norm(shapes),
    )


def _their_table(c: Eagle3Config) -> Table:
    return _table(c, "layers.0")


def _their_raw(c: Eagle3Config, model: HasModel, num_tokens: int) -> dict[str, Any]:
    kind = "qwen3" if c.qk_norm else "llama"
    return {
        **speculators_raw("eagle3", "Eagle3Speculator", model, num_tokens),
        "transformer_layer_config": {**sizes_raw(c, model, kind), "attention_bias": c.qkv_bias},
        IDS: list(c.taps),
        "draft_vocab_size": c.columns,
        "fc_norm": c.fc_norm,
        "norm_output": c.feed_normed,
        "norm_before_residual": c.normed_residual,
    }


EAGLE3_SPECULATORS = EAGLE3._replace(
    name="eagle3/speculators",
    fits=lambda raw, names: raw.get("speculators_model_type") == "eagle3",
    config=_their_config,
    table=_their_table,
    raw=_their_raw,
    settings=speculative_tokens,
    rename=respell(("model.", ""), ("midlayer.", "layers.0.")),
)
