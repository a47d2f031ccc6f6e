"""The parts that the layouts of whole layers share: Llama's and Qwen's names and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jspec.drafters.model import HasModel
from jspec.io.heads.layout import Raw, Table
from jspec.models.families.base import SAME, activation, linear, refuse
from jspec.models.rotary import need


def layer(ours: str, theirs: str, *, bias: bool = False, qk_norm: bool = False) -> Table:
    """Attention and perceptron of a layer, without the norms before them."""
    for part, letter in (("query", "q"), ("key", "k"), ("value", "v")):
        yield from linear(f"{ours}.attention.{part}", f"{theirs}.self_attn.{letter}_proj", bias)
    yield from linear(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", False)
    if qk_norm:
        yield f"{ours}.attention.query_norm.scale", f"{theirs}.self_attn.q_norm.weight", SAME
        yield f"{ours}.attention.key_norm.scale", f"{theirs}.self_attn.k_norm.weight", SAME
    for part in ("gate", "up", "down"):
        yield from linear(f"{ours}.mlp.{part}", f"{theirs}.mlp.{part}_proj", False)


def norms(ours: str, theirs: str, names: Mapping[str, str]) -> Table:
    """Norms of a layer, by our names and theirs."""
    for mine, name in names.items():
        yield f"{ours}.{mine}.scale", f"{theirs}.{name}.weight", SAME


#: Our names and theirs of the norms of an ordinary layer.
NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def sizes(raw: Raw, model: HasModel) -> dict[str, Any]:
    """The fields that the configs of all nets with layers share, from a config.json.

    Raises:
      ValueError: a setting that is missing or not known, or a target whose embeddings are scaled, which these
        layouts read unscaled.
    """
    scale = getattr(model.lm.config, "embedding_scale", 1.0)
    if scale != 1:
        raise ValueError(
            "embedding_scale: expected a target whose layers read the embedding as it is stored, as these "
            f"layouts do, got one that reads {scale:g} times it"
        )
    refuse(raw, mlp_bias=False, target_hidden_size=need(raw, "hidden_size"), pretraining_tp=1)
    if activation(raw.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act: expected silu, got {raw['hidden_act']!r}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_scaling: expected none, got {kind!r}")
    width, heads = raw["hidden_size"], need(raw, "num_attention_heads")
    return {
        "width": width,
        "vocab_size": need(raw, "vocab_size"),
        "num_layers": raw.get("num_hidden_layers", 1),
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or width // heads,
        "mlp_width": need(raw, "intermediate_size"),
        "rope_theta": float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
    }


def sizes_raw(c: Any, model: HasModel, model_type: str) -> dict[str, Any]:
    """And back."""
    return {
        "model_type": model_type,
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.mlp_width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": getattr(model.lm.config, "context_length", 2048),
        "tie_word_embeddings": False,
    }


def speculators_raw(kind: str, architecture: str, model: HasModel, num_tokens: int) -> dict[str, Any]:
    """What vllm-project/speculators says of every drafter (src/speculators/config.py)."""
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": getattr(model, "name", None), "architectures": []},
        },
    }


def speculative_tokens(raw: Raw) -> dict[str, Any]:
    """``num_tokens`` as a speculators config.json proposes it."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens")
    return {} if count is None else {"num_tokens": int(count)}
