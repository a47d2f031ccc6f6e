"""DFlash and DSpark (arXiv 2607.05147), as z-lab/dflash, sgl-project/SpecForge and deepseek-ai/DeepSpec write
them and as vllm-project/speculators does.

Read from dflash/model.py (1012959) of z-lab/dflash; specforge/modeling/draft/{dflash,dspark,vocab_mixin}.py
(2c7bdde, 1c2c647, 134669b) and configs/qwen3-8b-{dflash,dspark}.json of sgl-project/SpecForge;
deepspec/modeling/dspark/{common.py,qwen3/} (3bc8dc7, 5905deb) of deepseek-ai/DeepSpec; src/speculators/
{models,convert}/{dflash,dspark}/ (04013bd, 931c3a4, 0a09610, 021e21b) of vllm-project/speculators. The
tensors, over n tapped layers::

    fc.weight [E, n E], hidden_norm.weight            what the target shows, fused
    layers.{i}.self_attn.{q,k,v,o}_proj.weight, {q,k}_norm.weight; layers.{i}.mlp.{gate,up,down}_proj.weight
    layers.{i}.{input,post_attention}_layernorm.weight, norm.weight
    markov_head.markov_w1.weight [V, r], markov_head.markov_w2.weight [Vd, r]     DSpark
    confidence_head.proj.{weight [1, E + r], bias [1]}                            DSpark
    lm_head.weight [Vd, E], d2t, t2d                  speculators; DeepSpec stores a copy of the target's
    embed_tokens.weight [V, E]                        a frozen copy of the target's, often left out

Settings stand at the top of config.json (DeepSpec) or in ``dflash_config`` (the others): ``block_size``,
``mask_token_id`` and ``target_layer_ids``, layers whose *outputs* are read (-1: the embedding). speculators
list inputs, ``aux_hidden_state_layer_ids``. The last layer's output is refused: these programs read it behind
the target's last norm, which is no tap. DFlash drafts block_size - 1 tokens, one a mask; DSpark's root
predicts, too (``sample_from_anchor``), so it drafts block_size.

The mask is a row of the target's embedding, that of ``mask_token_id``, unless mask_embedding.pt replaces it
(a file that vLLM reads); jspec's mask, which may have been trained, is written there where it is no such row.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.block import block
from jspec.drafters.block_network import BlockConfig, block_network, block_width
from jspec.drafters.model import HasModel
from jspec.io.heads.layout import Layout, Lent, Raw, Shapes, Table, strip
from jspec.io.heads.transformer import (
    NORMS,
    layer,
    norms,
    sizes,
    sizes_raw,
    speculators_raw,
)
from jspec.io.torch_file import TorchTensors
from jspec.models.families.base import SAME, TRANSPOSE, linear, refuse
from jspec.models.rotary import need
from jspec.types import PyTree

MASK_FILE = "mask_embedding.pt"
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def _settings(raw: Raw) -> dict[str, Any]:
    """Those of the drafter, wherever they stand."""
    inner = raw.get("dflash_config") or {}
    keys = ("block_size", "mask_token_id", "target_layer_ids", *HEADS)
    top = {key: raw[key] for key in keys if key in raw}
    return top | {key: value for key, value in inner.items() if value is not None}


def _default_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """Outputs of evenly spread layers, where the config lists none."""
    if num_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    return [round(first + i * (last - first) / (num_layers - 1)) for i in range(num_layers)]


def _is_dspark(raw: Raw) -> bool:
    names = " ".join(raw.get("architectures") or [])
    return "DSpark" in names or _settings(raw).get("projector_type") == "dspark"


def _fits(raw: Raw, names: Collection[str]) -> bool:
    kinds = ("DFlash", "DSpark")
    return any(kind in name for kind in kinds for name in raw.get("architectures") or []) or (
        "dflash_config" in raw
    )


def _layers(raw: Raw, model: HasModel) -> dict[str, Any]:
    """The fields of the layers, windows among them."""
    refuse(raw, attention_bias=False)
    types = set(raw.get("layer_types") or ["full_attention"])
    if len(types) > 1:
        raise ValueError(f"layer_types: expected one kind for all layers, got {sorted(types)}")
    sliding = types == {"sliding_attention"}
    window = need(raw, "sliding_window") if sliding else None
    causal = raw.get("is_causal")
    return sizes(raw, model) | {"window": window, "causal": bool(sliding if causal is None else causal)}


def _small_heads(told: Raw) -> dict[str, Any]:
    """DSpark's two."""
    rank = int(told.get("markov_rank") or 0)
    confidence = bool(told.get("enable_confidence_head", False))
    if rank:
        refuse(told, markov_head_type="vanilla")
    if confidence:
        refuse(told, confidence_head_with_markov=rank > 0)
    return {"markov_rank": rank, "confidence": confidence}


def _config(raw: Raw, shapes: Shapes, model: HasModel) -> BlockConfig:
    told = _settings(raw)
    refuse(raw, input_embedding_scale=1.0)
    refuse(told, input_embedding_scale=1.0, final_logit_softcapping=None, output_multiplier=1.0)
    if any("DFlash2" in name for name in raw.get("architectures") or []):
        raise ValueError("architectures: expected DFlash or DSpark, got DFlash2, which is not supported")
    fields = _layers(raw, model)
    depth = model.lm.config.num_layers
    if raw.get("num_target_layers", depth) != depth:
        raise ValueError(
            f"num_target_layers: expected a target of {raw['num_target_layers']} layers, got {depth}"
        )
    outputs = told.get("target_layer_ids")
    outputs = _default_ids(depth, fields["num_layers"]) if outputs is None else outputs
    return BlockConfig(
        **fields,
        taps=_taps([i + 1 for i in outputs], depth),
        qk_norm=True,
        anchor_predicts=_is_dspark(raw),
        **_small_heads(told),
        **_head(raw, fields["vocab_size"], shapes),
    )


def _head(raw: Raw, vocab_size: int, shapes: Shapes) -> dict[str, Any]:
    """The target's, or, of a reduced vocabulary, one that is stored or rows of the target's."""
    columns = raw.get("draft_vocab_size") or vocab_size
    if columns == vocab_size:
        return {}
    return {"head": "own" if "lm_head.weight" in shapes else "rows", "draft_vocab": columns}


def _taps(taps: list[int], depth: int) -> tuple[int, ...]:
    if max(taps) >= depth:
        raise ValueError(
            f"target_layer_ids: expected outputs of layers before the target's last, of its {depth}, got "
            f"{[tap - 1 for tap in taps]}"
        )
    return tuple(taps)


def _table(c: BlockConfig) -> Table:
    yield "fuse.kernel", "fc.weight", TRANSPOSE
    yield "context_norm.scale", "hidden_norm.weight", SAME
    for i in range(c.num_layers):
        yield from layer(f"layers.{i}", f"layers.{i}", qk_norm=c.qk_norm)
        yield from norms(f"layers.{i}", f"layers.{i}", NORMS)
    yield "norm.scale", "norm.weight", SAME
    if c.markov_rank:
        yield "previous", "markov_head.markov_w1.weight", SAME
        yield "markov", "markov_head.markov_w2.weight", TRANSPOSE
    if c.confidence:
        yield from linear("confidence", "confidence_head.proj", True)
    if c.head == "own":
        yield "head", "lm_head.weight", TRANSPOSE


def _small_heads_raw(c: BlockConfig) -> dict[str, Any]:
    if not c.anchor_predicts and not c.markov_rank and not c.confidence:
        return {}
    return {
        "markov_rank": c.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": c.confidence,
        "confidence_head_with_markov": c.markov_rank > 0,
    }


def _layers_raw(c: BlockConfig, model: HasModel) -> dict[str, Any]:
    kind = "full_attention" if c.window is None else "sliding_attention"
    return {
        **sizes_raw(c, model, "qwen3"),
        "attention_bias": False,
        "layer_types": [kind] * c.num_layers,
        "use_sliding_window": c.window is not None,
        "sliding_window": c.window,
        "is_causal": c.causal,
    }


def _raw(c: BlockConfig, model: HasModel, num_tokens: int) -> dict[str, Any]:
    """As SpecForge writes it; what DeepSpec looks for at the top stands there, too."""
    outputs = [tap - 1 for tap in c.taps]
    name = "DSparkDraftModel" if c.anchor_predicts else "DFlashDraftModel"
    told = {"target_layer_ids": outputs, **_small_heads_raw(c)}
    return {
        "architectures": [name],
        **_layers_raw(c, model),
        "num_target_layers": model.lm.config.num_layers,
        "block_size": block_width(c, num_tokens),
        **({} if c.draft_vocab is None else {"draft_vocab_size": c.draft_vocab}),
        **told,
        "dflash_config": {**told, "projector_type": "dspark" if c.anchor_predicts else "dflash"},
    }


# --- the mask ---------------------------------------------------------------------------------------


def _mask_id(raw: Raw) -> int | None:
    return _settings(raw).get("mask_token_id")


def _row(model: HasModel, token: int) -> jax.Array:
    size = model.lm.config.vocab_size
    if not 0 <= token < size:
        raise ValueError(f"mask_token_id: expected an id below {size}, the target's vocabulary, got {token}")
    return model.params["embedding"][token]


def _borrowed(raw: Raw, folder: Path, config: BlockConfig, model: HasModel) -> dict[str, jax.Array]:
    token = _mask_id(raw)
    if not (folder / MASK_FILE).is_file():
        if token is None:
            raise ValueError("mask_token_id: expected the id whose embedding is the mask, but it is missing")
        return {"mask": _row(model, token)}
    file = TorchTensors(folder / MASK_FILE)
    name = next((name for name in ("embedding", "") if name in file.shapes), None)
    if name is None or file.numbers.get("mask_token_id", token) != token:
        raise ValueError(
            f"{MASK_FILE}: expected the embedding of mask_token_id {token}, got that of "
            f"{file.numbers.get('mask_token_id')}"
        )
    mask = file.read(name).reshape(-1)
    if mask.shape != (config.width,):
        raise ValueError(f"{MASK_FILE}: expected {config.width} numbers, the width, got {mask.size}")
    return {"mask": jnp.asarray(mask)}


def _lend(config: BlockConfig, net: PyTree, model: HasModel, raw: Raw) -> Lent:
    """The row that the mask is; one of no row needs a file, and an id that no text has."""
    mask, embedding = net["mask"], model.params["embedding"]
    same = np.flatnonzero(np.asarray((embedding.astype(mask.dtype) == mask[None]).all(1)))
    told = _mask_id(raw)
    if same.size:
        return Lent(_mask_raw(told if told is not None and told in same else int(same[0])))
    last = config.vocab_size - 1
    token = told if told is not None else min(getattr(model, "vocab_size", last), last)
    return Lent(_mask_raw(token), {MASK_FILE: {"embedding": np.asarray(mask), "mask_token_id": int(token)}})


def _mask_raw(token: int) -> dict[str, Any]:
    """Where `_settings` finds it, and where the other programs do."""
    return {"mask_token_id": token, "dflash_config": {"mask_token_id": token}}


def _num_tokens(raw: Raw) -> dict[str, Any]:
    size = _settings(raw).get("block_size")
    return {} if size is None else {"num_tokens": size if _is_dspark(raw) else size - 1}


DFLASH = Layout(
    "dflash",
    block_network,
    block,
    _fits,
    _config,
    _table,
    _raw,
    settings=_num_tokens,
    copies={"embed_tokens.weight": "embedding", "lm_head.weight": "head"},
    rename=strip("model."),
    borrows=("mask",),
    borrowed=_borrowed,
    lend=_lend,
)


# --- speculators ------------------------------------------------------------------------------------


def _their_anchor(raw: Raw) -> bool:
    """Whether the root's row predicts: of DSpark's unless it says otherwise."""
    return bool(raw.get("sample_from_anchor", raw["speculators_model_type"] == "dspark"))


def _their_config(raw: Raw, shapes: Shapes, model: HasModel) -> BlockConfig:
    refuse(raw, projector_type="dflash", aux_hidden_state_layer_offset=0)
    inner = need(raw, "transformer_layer_config")
    causal = bool(inner.get("layer_types")) and not raw.get("sliding_window_non_causal", False)
    causal = causal and "sliding_attention" in inner["layer_types"]
    told = {"is_causal": causal, "target_hidden_size": raw.get("target_hidden_size")}
    fields = _layers({**inner, **told}, model)
    columns = raw.get("draft_vocab_size") or fields["vocab_size"]
    return BlockConfig(
        **fields,
        taps=_taps(list(need(raw, "aux_hidden_state_layer_ids")), model.lm.config.num_layers),
        qk_norm=True,
        anchor_predicts=_their_anchor(raw),
        **_small_heads(raw),
        head="own",
        draft_vocab=None if columns == fields["vocab_size"] else columns,
    )


def _their_raw(c: BlockConfig, model: HasModel, num_tokens: int) -> dict[str, Any]:
    kind = "dspark" if c.anchor_predicts or c.markov_rank or c.confidence else "dflash"
    name = "DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"
    return {
        **speculators_raw(kind, name, model, num_tokens),
        "transformer_layer_config": _layers_raw(c, model),
        "draft_vocab_size": c.columns,
        "block_size": block_width(c, num_tokens),
        "aux_hidden_state_layer_ids": list(c.taps),
        "sample_from_anchor": c.anchor_predicts,
        "sliding_window_non_causal": c.window is not None and not c.causal,
        **_small_heads_raw(c),
    }


def _their_num_tokens(raw: Raw) -> dict[str, Any]:
    size = raw.get("block_size")
    return {} if size is None else {"num_tokens": size if _their_anchor(raw) else size - 1}


DFLASH_SPECULATORS = DFLASH._replace(
    name="dflash/speculators",
    fits=lambda raw, names: raw.get("speculators_model_type") in ("dflash", "dspark"),
    config=_their_config,
    raw=_their_raw,
    settings=_their_num_tokens,
    own_head=True,
    copies={"embed_tokens.weight": "embedding"},
)
