"""Public checkpoints of draft heads, made at random under the names that their own programs give the tensors,
and what these programs compute with them, in numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from jspec import testing
from jspec.types import LanguageModel, PyTree

V, E, L, HEADS, KV, DIM, MLP = 23, 16, 8, 4, 2, 4, 24
COLUMNS = 11  # of a reduced vocabulary
EPS, THETA = 1e-5, 10000.0
MASK = 21
Tensors = dict[str, np.ndarray]


class Target(NamedTuple):
    """A model as `jspec.load` returns it, as far as checkpoints look."""

    lm: LanguageModel
    params: PyTree
    name: str = "tiny"
    vocab_size: int = V


def target(**overrides: Any) -> Target:
    settings = {"vocab_size": V, "num_layers": L, "width": E, "num_heads": HEADS, "num_kv_heads": KV}
    return Target(*testing.tiny_decoder(seed=1, **(settings | overrides)))


# --- tensors ----------------------------------------------------------------------------------------


class Random:
    """Tensors in a dtype that public checkpoints have, norms around 1."""

    def __init__(self, dtype: Any = np.float16):
        self.rng, self.dtype = np.random.default_rng(0), dtype

    def matrix(self, *shape: int) -> np.ndarray:
        return (self.rng.standard_normal(shape) * 0.3).astype(self.dtype)

    def norm(self, size: int = E) -> np.ndarray:
        return (1 + 0.3 * self.rng.standard_normal(size)).astype(self.dtype)

    def layer(self, name: str, inputs: int = E, *, qk_norm: bool = False) -> Tensors:
        tensors = {
            f"{name}.self_attn.q_proj.weight": self.matrix(HEADS * DIM, inputs),
            f"{name}.self_attn.k_proj.weight": self.matrix(KV * DIM, inputs),
            f"{name}.self_attn.v_proj.weight": self.matrix(KV * DIM, inputs),
            f"{name}.self_attn.o_proj.weight": self.matrix(E, HEADS * DIM),
            f"{name}.mlp.gate_proj.weight": self.matrix(MLP, E),
            f"{name}.mlp.up_proj.weight": self.matrix(MLP, E),
            f"{name}.mlp.down_proj.weight": self.matrix(E, MLP),
            f"{name}.post_attention_layernorm.weight": self.norm(),
        }
        if qk_norm:
            tensors |= {f"{name}.self_attn.{x}_norm.weight": self.norm(DIM) for x in "qk"}
        return tensors

    def vocabulary(self) -> Tensors:
        ids = np.sort(self.rng.choice(V, COLUMNS, replace=False))
        return {"d2t": ids - np.arange(COLUMNS), "t2d": np.isin(np.arange(V), ids)}


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": E,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "torch_dtype": "float16",  # further entries are kept
}


def _copy(model: Target, dtype: Any) -> np.ndarray:
    return np.asarray(model.params["embedding"]).astype(dtype)


def eagle(r: Random, model: Target) -> tuple[dict, Tensors]:
    tensors = {"fc.weight": r.matrix(E, 2 * E), "fc.bias": r.matrix(E), **r.layer("layers.0")}
    return LLAMA | {"bias": True}, tensors | {"embed_tokens.weight": _copy(model, r.dtype)}


def eagle_two_layers(r: Random, model: Target) -> tuple[dict, Tensors]:
    layers = r.layer("layers.0") | r.layer("layers.1") | {"layers.1.input_layernorm.weight": r.norm()}
    return LLAMA | {"bias": False, "num_hidden_layers": 2}, {"fc.weight": r.matrix(E, 2 * E), **layers}


def eagle_speculators(r: Random, model: Target) -> tuple[dict, Tensors]:
    raw = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": LLAMA,
        "layernorms": False,
        "fusion_bias": True,
        "speculators_config": {
            "algorithm": "eagle",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "tiny", "architectures": []},
        },
    }
    tensors = {"fusion_fc.weight": r.matrix(E, 2 * E), "fusion_fc.bias": r.matrix(E)}
    return raw, tensors | r.layer("transformer")


def _eagle3(r: Random, first: str) -> Tensors:
    return {
        "fc.weight": r.matrix(E, 3 * E),
        **r.layer(first, 2 * E),
        f"{first}.hidden_norm.weight": r.norm(),
        f"{first}.input_layernorm.weight": r.norm(),
        "norm.weight": r.norm(),
        "lm_head.weight": r.matrix(COLUMNS, E),
        **r.vocabulary(),
    }


def eagle3(r: Random, model: Target) -> tuple[dict, Tensors]:
    return LLAMA | {"draft_vocab_size": COLUMNS}, _eagle3(r, "midlayer")


def eagle3_whole_vocabulary(r: Random, model: Target) -> tuple[dict, Tensors]:
    tensors = _eagle3(r, "midlayer") | {"lm_head.weight": r.matrix(V, E)}
    tensors |= {"d2t": np.zeros(V, np.int64), "t2d": np.ones(V, bool)}
    return LLAMA | {"draft_vocab_size": V}, tensors | {"embed_tokens.weight": _copy(model, r.dtype)}


def eagle3_1(r: Random, model: Target) -> tuple[dict, Tensors]:
    told = {"eagle_aux_hidden_state_layer_ids": [0, 3, 6], "use_aux_hidden_state": True}
    raw = LLAMA | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": COLUMNS,
        "fc_norm": True,
        "norm_output": True,
        "eagle_config": told,
    }
    return raw, _eagle3(r, "midlayer") | {f"fc_norm.{i}.weight": r.norm() for i in range(3)}


def eagle3_speculators(r: Random, model: Target) -> tuple[dict, Tensors]:
    raw = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": LLAMA | {"num_hidden_layers": 2},
        "draft_vocab_size": COLUMNS,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
    }
    second = r.layer("layers.1") | {"layers.1.input_layernorm.weight": r.norm()}
    return raw, _eagle3(r, "layers.0") | second | {"embed_tokens.weight": _copy(model, r.dtype)}


def medusa(r: Random, model: Target) -> tuple[dict, Tensors]:
    tensors = {}
    for k in range(3):
        for j in range(2):
            tensors[f"{k}.{j}.linear.weight"] = r.matrix(E, E)
            tensors[f"{k}.{j}.linear.bias"] = r.matrix(E)
        tensors[f"{k}.2.weight"] = r.matrix(V, E)
    raw = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": "tiny"}
    return raw, tensors  # the config may tell of fewer heads than there are


def hydra(r: Random, model: Target) -> tuple[dict, Tensors]:
    tensors = {}
    for k in range(3):
        for j in range(2):
            inputs = E if j else (k + 2) * E
            for name in ("linear", *(() if j else ("res_connection",))):
                tensors[f"hydra_mlp.{k}.{j}.{name}.weight"] = r.matrix(E, inputs)
                tensors[f"hydra_mlp.{k}.{j}.{name}.bias"] = r.matrix(E)
        tensors[f"hydra_lm_head.{k}.weight"] = r.matrix(V, E)
        tensors[f"hydra_lm_head.{k}.bias"] = r.matrix(V)
    raw = {"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True}
    return raw, tensors


QWEN = {**LLAMA, "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}


def _dflash(r: Random, taps: int) -> Tensors:
    tensors = {"fc.weight": r.matrix(E, taps * E), "hidden_norm.weight": r.norm(), "norm.weight": r.norm()}
    for i in range(2):
        tensors |= r.layer(f"layers.{i}", qk_norm=True)
        tensors[f"layers.{i}.input_layernorm.weight"] = r.norm()
    return tensors


def dflash(r: Random, model: Target) -> tuple[dict, Tensors]:
    raw = QWEN | {
        "architectures": ["DFlashDraftModel"],
        "block_size": 4,
        "num_target_layers": L,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]},
    }
    return raw, _dflash(r, 3)


def _small_heads(r: Random, columns: int) -> Tensors:
    return {
        "markov_head.markov_w1.weight": r.matrix(V, 6),
        "markov_head.markov_w2.weight": r.matrix(columns, 6),
        "confidence_head.proj.weight": r.matrix(1, E + 6),
        "confidence_head.proj.bias": r.matrix(1),
    }


SMALL_HEADS = {
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def dspark(r: Random, model: Target) -> tuple[dict, Tensors]:
    """DeepSpec's: settings at the top, copies of the target's embedding and head."""
    raw = (
        QWEN
        | SMALL_HEADS
        | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": 3,
            "num_target_layers": L,
            "mask_token_id": MASK,
            "target_layer_ids": [-1, 3],
            "num_anchors": 512,
        }
    )
    copies = {"embed_tokens.weight": _copy(model, r.dtype)}
    head = np.asarray(model.params["unembedding"]["kernel"]).T.astype(r.dtype)
    copies["lm_head.weight"] = np.ascontiguousarray(head)
    return raw, _dflash(r, 2) | _small_heads(r, V) | copies


def dspark_reduced(r: Random, model: Target) -> tuple[dict, Tensors]:
    """SpecForge's with a reduced vocabulary: rows of the target's head, which are not stored."""
    raw = QWEN | {
        "architectures": ["DSparkDraftModel"],
        "block_size": 3,
        "draft_vocab_size": COLUMNS,
        "num_target_layers": L,
        "dflash_config": SMALL_HEADS
        | {"mask_token_id": MASK, "target_layer_ids": [0, 4], "projector_type": "dspark"},
    }
    return raw, _dflash(r, 2) | _small_heads(r, COLUMNS) | r.vocabulary()


def dflash_speculators(r: Random, model: Target) -> tuple[dict, Tensors]:
    raw = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": QWEN
        | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "use_sliding_window": True},
        "draft_vocab_size": COLUMNS,
        "block_size": 4,
        "aux_hidden_state_layer_ids": [2, 5],
        "mask_token_id": MASK,
        "speculators_config": {"verifier": {"name_or_path": "tiny"}},
    }
    head = {"lm_head.weight": r.matrix(COLUMNS, E), "embed_tokens.weight": _copy(model, r.dtype)}
    return raw, _dflash(r, 2) | head | r.vocabulary()


def dspark_speculators(r: Random, model: Target) -> tuple[dict, Tensors]:
    raw = SMALL_HEADS | {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": QWEN,
        "draft_vocab_size": V,
        "block_size": 3,
        "aux_hidden_state_layer_ids": [2, 5],
        "mask_token_id": MASK,
    }
    return raw, _dflash(r, 2) | _small_heads(r, V) | {"lm_head.weight": r.matrix(V, E)}


#: Maker of a checkpoint -> the layout it is in.
CHECKPOINTS = {
    eagle: "eagle",
    eagle_two_layers: "eagle",
    eagle_speculators: "eagle/speculators",
    eagle3: "eagle3",
    eagle3_whole_vocabulary: "eagle3",
    eagle3_1: "eagle3",
    eagle3_speculators: "eagle3/speculators",
    medusa: "medusa",
    hydra: "hydra",
    dflash: "dflash",
    dspark: "dflash",
    dspark_reduced: "dflash",
    dflash_speculators: "dflash/speculators",
    dspark_speculators: "dflash/speculators",
}


def put(folder: Path, raw: dict, tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / file, metadata={"format": "pt"})
    return folder


# --- what the original programs compute -------------------------------------------------------------


class Shown(NamedTuple):
    """What the target shows of a text, and its own tables."""

    tokens: np.ndarray  # [T]
    hidden: np.ndarray  # [T, E]
    taps: dict[int, np.ndarray]
    embedding: np.ndarray
    head: np.ndarray  # [V, E]


def _rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _turn(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """``x`` [T, H, d]: the pairs (i, i + d / 2)."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * THETA ** (-np.arange(half) * 2 / x.shape[-1])
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _layer(
    w: Tensors, name: str, q_in: np.ndarray, kv_in: np.ndarray, residual: np.ndarray, seen: np.ndarray
) -> np.ndarray:
    """Attention of rows, which are the last of ``kv_in``, and the perceptron."""

    def heads(x: np.ndarray, part: str, *, turn: bool) -> np.ndarray:
        y = (x @ w[f"{name}.self_attn.{part}_proj.weight"].T).reshape(len(x), -1, DIM)
        if f"{name}.self_attn.{part}_norm.weight" in w:
            y = _rms(y, w[f"{name}.self_attn.{part}_norm.weight"])
        positions = np.arange(len(kv_in))[-len(x) :]
        return _turn(y, positions) if turn else y

    q, k, v = (heads(q_in, "q", turn=True), heads(kv_in, "k", turn=True), heads(kv_in, "v", turn=False))
    k, v = (np.repeat(x, HEADS // KV, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM)
    scores = np.where(seen[None], scores, -np.inf)
    laws = np.exp(scores - scores.max(-1, keepdims=True))
    laws /= laws.sum(-1, keepdims=True)
    x = (
        residual
        + np.einsum("hqk,khd->qhd", laws, v).reshape(len(q), -1) @ w[f"{name}.self_attn.o_proj.weight"].T
    )
    y = _rms(x, w[f"{name}.post_attention_layernorm.weight"])
    gate = _silu(y @ w[f"{name}.mlp.gate_proj.weight"].T) * (y @ w[f"{name}.mlp.up_proj.weight"].T)
    return x + gate @ w[f"{name}.mlp.down_proj.weight"].T


def eagle_logits(raw: dict, w: Tensors, shown: Shown, a: int, num_tokens: int) -> np.ndarray:
    """The first law after the root at ``a``."""
    w = {name.replace("fusion_fc", "fc").replace("transformer.", "layers.0."): x for name, x in w.items()}
    both = np.concatenate([shown.embedding[shown.tokens[1 : a + 1]], shown.hidden[:a]], -1)
    x = both @ w["fc.weight"].T + w.get("fc.bias", 0)
    seen = np.tril(np.ones((a, a), bool))
    for i in range(1 + ("layers.1.mlp.up_proj.weight" in w)):
        y = _rms(x, w[f"layers.{i}.input_layernorm.weight"]) if i else x
        x = _layer(w, f"layers.{i}", y, y, x, seen)
    return x[-1:] @ shown.head.T


def eagle3_logits(raw: dict, w: Tensors, shown: Shown, a: int, num_tokens: int) -> np.ndarray:
    w = {name.replace("midlayer", "layers.0"): x for name, x in w.items()}
    told = raw.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    default = [2, L // 2, L - 3] if told is None else [i + 1 for i in told]
    taps = [shown.taps[tap][:a] for tap in raw.get("eagle_aux_hidden_state_layer_ids", default)]
    if raw.get("fc_norm"):
        taps = [_rms(x, w[f"fc_norm.{i}.weight"]) for i, x in enumerate(taps)]
    x = np.concatenate(taps, -1) @ w["fc.weight"].T
    embedded = _rms(shown.embedding[shown.tokens[1 : a + 1]], w["layers.0.input_layernorm.weight"])
    normed = _rms(x, w["layers.0.hidden_norm.weight"])
    seen = np.tril(np.ones((a, a), bool))
    both = np.concatenate([embedded, normed], -1)
    x = _layer(w, "layers.0", both, both, normed if raw.get("norm_before_residual") else x, seen)
    if "layers.1.mlp.up_proj.weight" in w:
        y = _rms(x, w["layers.1.input_layernorm.weight"])
        x = _layer(w, "layers.1", y, y, x, seen)
    return _rms(x[-1:], w["norm.weight"]) @ w["lm_head.weight"].T


def medusa_logits(raw: dict, w: Tensors, shown: Shown, a: int, num_tokens: int) -> np.ndarray:
    laws = []
    for k in range(num_tokens):
        x = shown.hidden[a - 1]
        for j in range(2):
            x = x + _silu(w[f"{k}.{j}.linear.weight"] @ x + w[f"{k}.{j}.linear.bias"])
        laws.append(w[f"{k}.2.weight"] @ x)
    return np.stack(laws)


def hydra_logits(raw: dict, w: Tensors, shown: Shown, a: int, num_tokens: int) -> np.ndarray:
    laws = []
    for k in range(num_tokens):
        read = np.concatenate([shown.hidden[a - 1], shown.embedding[shown.tokens[a : a + k + 1]].reshape(-1)])
        first, second = f"hydra_mlp.{k}.0", f"hydra_mlp.{k}.1"
        x = w[f"{first}.res_connection.weight"] @ read + w[f"{first}.res_connection.bias"]
        x = x + _silu(w[f"{first}.linear.weight"] @ read + w[f"{first}.linear.bias"])
        x = x + _silu(w[f"{second}.linear.weight"] @ x + w[f"{second}.linear.bias"])
        laws.append(w[f"hydra_lm_head.{k}.weight"] @ x + w[f"hydra_lm_head.{k}.bias"])
    return np.stack(laws)


def dflash_logits(raw: dict, w: Tensors, shown: Shown, a: int, num_tokens: int) -> np.ndarray:
    told = raw | raw.get("dflash_config", {}) | raw.get("transformer_layer_config", {})
    theirs = raw.get("speculators_model_type")
    anchored = theirs == "dspark" or "DSpark" in raw["architectures"][0]
    taps = told.get("aux_hidden_state_layer_ids") or [i + 1 for i in told["target_layer_ids"]]
    context = np.concatenate([shown.taps[tap][:a] for tap in taps], -1) @ w["fc.weight"].T
    context = _rms(context, w["hidden_norm.weight"])
    rows = num_tokens if anchored else num_tokens + 1
    x = shown.embedding[[shown.tokens[a], *[MASK] * (rows - 1)]]
    seen = np.ones((rows, a + rows), bool)
    if told["layer_types"][0] == "sliding_attention":  # of speculators: causal
        ahead = (a + np.arange(rows))[:, None] - np.arange(a + rows)[None]
        seen = (ahead >= 0) & (ahead < told["sliding_window"])
    for i in range(2):
        y = _rms(x, w[f"layers.{i}.input_layernorm.weight"])
        x = _layer(w, f"layers.{i}", y, np.concatenate([context, y]), x, seen)
    x = _rms(x, w["norm.weight"])[rows - num_tokens :]
    head = w.get("lm_head.weight", shown.head)
    if "lm_head.weight" not in w and "d2t" in w:
        head = head[w["d2t"] + np.arange(COLUMNS)]
    laws = x @ head.T
    if "markov_head.markov_w1.weight" in w:
        before = shown.tokens[a : a + num_tokens]
        laws = laws + w["markov_head.markov_w1.weight"][before] @ w["markov_head.markov_w2.weight"].T
    return laws


LOGITS = {
    "eagle": eagle_logits,
    "eagle/speculators": eagle_logits,
    "eagle3": eagle3_logits,
    "eagle3/speculators": eagle3_logits,
    "medusa": medusa_logits,
    "hydra": hydra_logits,
    "dflash": dflash_logits,
    "dflash/speculators": dflash_logits,
}
