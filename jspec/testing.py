"""Models and drafters with known answers, for tests and examples."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors.numpy import save_file

from jspec import sampling, trees
from jspec.drafters.common import chain, no_update, root, take
from jspec.models.decoder import DecoderConfig, Params, init_params, language_model
from jspec.models.rotary import Rotary
from jspec.types import (
    Block,
    Context,
    Draft,
    Drafter,
    Draws,
    Forward,
    Keys,
    LanguageModel,
    Method,
    Prompt,
    PyTree,
)

# --- a language model with a known law ---------------------------------------------------------------


class TableConfig(NamedTuple):
    """The vocabulary is the table's side; positions have no end."""

    vocab_size: int
    context_length: int = 2**30


class TableCache(NamedTuple):
    """A first-order chain needs no keys and values, only to know how far it has read."""

    lengths: Int[Array, " B"]


def _table_start(params: Array, prompt: Prompt, capacity: int) -> TableCache:
    return TableCache(jnp.zeros_like(prompt.lengths))


def _table_embed(params: Array, tokens: Int[Array, "B N"]) -> Float[Array, "B N V"]:
    return (tokens[:, :, None] == jnp.arange(params.shape[0])[None, None]).astype(jnp.float32)


def _table_extend(
    params: Array, cache: TableCache, block: Block, pending: PyTree = None, taps: tuple[int, ...] = ()
) -> Forward:
    hidden = _table_embed(params, block.tokens)
    return Forward(hidden, dict.fromkeys(taps, hidden), rows=())


def _table_commit(
    cache: TableCache, rows: PyTree, path: Int[Array, "B R"], count: Int[Array, " B"]
) -> TableCache:
    return TableCache(cache.lengths + count)


def _table_head(params: Array, hidden: Float[Array, "... V"]) -> Float[Array, "... V"]:
    token = jnp.argmax(hidden, axis=-1)  # not a product: 0 * -inf is NaN
    return params[token]


@functools.cache
def _table_model(vocab_size: int) -> LanguageModel:
    return LanguageModel(
        start=_table_start,
        extend=_table_extend,
        commit=_table_commit,
        embed=_table_embed,
        head=_table_head,
        truncate=lambda num_layers: _table_model(vocab_size),
        config=TableConfig(vocab_size),
    )


def table_lm(law: Sequence[Sequence[float]] | np.ndarray) -> tuple[LanguageModel, Float[Array, "V V"]]:
    """A Markov chain as a language model: the next token's law is row ``law[last token]``.

    Returns the model and its params, the logits log(law) [V, V].

    >>> lm, params = table_lm([[0.5, 0.5], [1.0, 0.0]])
    >>> lm.head(params, lm.embed(params, jnp.array([[1]])))[0, 0].tolist()
    [0.0, -inf]
    """
    table = np.asarray(law, np.float32)
    logits = np.where(table > 0, np.log(np.where(table > 0, table, 1)), -np.inf).astype(np.float32)
    return _table_model(len(table)), jnp.asarray(logits)


# --- drafters that say what they are told ------------------------------------------------------------


@functools.cache
def _scripted(num_tokens: int) -> Method:
    def init(params: Array, prompt: Prompt, capacity: int, target: LanguageModel) -> tuple[()]:
        return ()

    def propose(params: Array, state: tuple[()], context: Context, keys: Keys) -> tuple[Draft, tuple[()]]:
        batch = context.lengths.shape[0]
        script = jnp.broadcast_to(params, (batch, params.shape[1]))
        index = context.lengths[:, None] + jnp.arange(num_tokens)[None]
        tokens = take(script, index)
        valid = (index < script.shape[1]) & (tokens >= 0)
        return chain(root(context), jnp.maximum(tokens, 0), valid), state

    return Method(init, propose, no_update, width=num_tokens + 1, depth=num_tokens)


def scripted(script: Sequence[int] | np.ndarray, num_tokens: int = 4) -> Drafter:
    """Drafts, for each position of the text, the token that stands there in ``script`` ([S] for all rows,
    or [B, S]); -1 ends a draft. Chosen tokens: lossless in law with any rule that takes them.

    >>> scripted([7, 8, 9], num_tokens=2).method.width
    3
    """
    return Drafter(jnp.atleast_2d(jnp.asarray(script, jnp.int32)), _scripted(num_tokens))


@functools.cache
def _sampled_tree(template: trees.Template, distinct: bool) -> Method:
    def init(params: Array, prompt: Prompt, capacity: int, target: LanguageModel) -> tuple[()]:
        return ()

    def propose(params: Array, state: tuple[()], context: Context, keys: Keys) -> tuple[Draft, tuple[()]]:
        batch = context.lengths.shape[0]
        tokens, laws, left = [root(context)], [], []
        for node in range(template.width):
            if node > 0:
                parent = template.parents[node]
                token = sampling.draw(sampling.fold(keys, node), left[parent])
                if distinct:
                    drawn = jnp.arange(params.shape[1], dtype=jnp.int32)[None] == token[:, None]
                    rest = jnp.where(drawn, 0, left[parent])
                    left[parent] = sampling.normalize(rest, laws[parent])
                tokens.append(token)
            laws.append(params[tokens[node]])
            left.append(laws[node])
        parents = jnp.broadcast_to(jnp.asarray(template.parents, jnp.int32)[None], (batch, template.width))
        valid = jnp.ones((batch, template.width), bool)
        return Draft(jnp.stack(tokens, 1), parents, valid, jnp.stack(laws, 1)), state

    draws: Draws = "distinct" if distinct else "iid"
    return Method(init, propose, no_update, template.width, template.depth, draws=draws)


def sampled_tree(law: np.ndarray, template: trees.Template, *, distinct: bool) -> Drafter:
    """A tree whose children are drawn from ``law[parent's token]`` ([V, V], rows sum to 1), each on its own
    (i.i.d.) or without replacement. Lossless in law with the rules that take such drafts.

    >>> sampled_tree(np.eye(2), trees.template(((0,), (1,))), distinct=False).method.draws
    'iid'
    """
    return Drafter(jnp.asarray(law, jnp.float32), _sampled_tree(template, distinct))


# --- random decoders in memory -----------------------------------------------------------------------


def tiny_decoder(
    seed: int = 0,
    vocab_size: int = 64,
    num_layers: int = 2,
    width: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    context_length: int = 512,
    **overrides: Any,
) -> tuple[LanguageModel, Params]:
    """A random Llama-like decoder in float32; ``overrides`` are fields of `DecoderConfig`.

    >>> model, params = tiny_decoder(vocab_size=20, windows=(None, 8))
    >>> model.config.windows, params["embedding"].shape
    ((None, 8), (20, 32))
    """
    head_dim = width // num_heads
    settings = {
        "vocab_size": vocab_size,
        "width": width,
        "mlp_width": 2 * width,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "context_length": context_length,
        "rotary": Rotary(tuple(10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2))),
    }
    config = DecoderConfig(**(settings | overrides))
    return language_model(config), init_params(config, jax.random.key(seed))


# --- random checkpoints on disk ----------------------------------------------------------------------

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = _LLAMA | {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GEMMA_2 = _GEMMA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 12,
    "sliding_window": 5,
}
_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 5},
    "qwen2": _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "phi3": _LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "gemma": _GEMMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
    "gemma2": _GEMMA_2
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": _GEMMA_2
    | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window_pattern": 3},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "vocab_size": 96,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "do_layer_norm_before": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def _llama_shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    kind, width, mlp = c["model_type"], c["hidden_size"], c["intermediate_size"]
    head = c.get("head_dim") or width // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    projections = {"q_proj": (q, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, q)}
    gates = {"gate_proj": (mlp, width), "up_proj": (mlp, width)}
    if kind == "phi3":
        projections = {"qkv_proj": (q + 2 * kv, width), "o_proj": (width, q)}
        gates = {"gate_up_proj": (2 * mlp, width)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    yield "model.embed_tokens.weight", (c["vocab_size"], width)
    yield "model.norm.weight", (width,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], width)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in projections.items():
            yield f"{layer}.self_attn.{name}.weight", shape
            if c.get("attention_bias") or (kind == "qwen2" and name != "o_proj"):
                yield f"{layer}.self_attn.{name}.bias", shape[:1]
        for name, shape in (gates | {"down_proj": (width, mlp)}).items():
            yield f"{layer}.mlp.{name}.weight", shape
            if c.get("mlp_bias"):
                yield f"{layer}.mlp.{name}.bias", shape[:1]
        if kind in ("qwen3", "gemma3_text"):
            yield f"{layer}.self_attn.q_norm.weight", (head,)
            yield f"{layer}.self_attn.k_norm.weight", (head,)
        for name in norms:
            yield f"{layer}.{name}.weight", (width,)


def _gpt2_shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = c["n_embd"]
    mlp = c.get("n_inner") or 4 * width
    yield "transformer.wte.weight", (c["vocab_size"], width)
    yield "transformer.wpe.weight", (c["n_positions"], width)
    norms = ["transformer.ln_f"]
    for i in range(c["n_layer"]):
        layer = f"transformer.h.{i}"
        norms += [f"{layer}.ln_1", f"{layer}.ln_2"]
        linears = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
        for name, shape in (linears | {"mlp.c_fc": (width, mlp), "mlp.c_proj": (mlp, width)}).items():
            yield f"{layer}.{name}.weight", shape
            yield f"{layer}.{name}.bias", shape[1:]
    for name in norms:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)


def _opt_shapes(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, mlp = c["hidden_size"], c["ffn_dim"]
    yield "model.decoder.embed_tokens.weight", (c["vocab_size"], width)
    yield "model.decoder.embed_positions.weight", (c["max_position_embeddings"] + 2, width)
    if not c.get("tie_word_embeddings", True):
        yield "lm_head.weight", (c["vocab_size"], width)
    norms = ["model.decoder.final_layer_norm"] if c["do_layer_norm_before"] else []
    for i in range(c["num_hidden_layers"]):
        layer = f"model.decoder.layers.{i}"
        norms += [f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm"]
        linears = {f"self_attn.{name}": (width, width) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        for name, shape in (linears | {"fc1": (mlp, width), "fc2": (width, mlp)}).items():
            yield f"{layer}.{name}.weight", shape
            yield f"{layer}.{name}.bias", shape[:1]
    for name in norms:
        yield f"{name}.weight", (width,)
        yield f"{name}.bias", (width,)


def tiny_checkpoint(folder: str | Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint, config.json and model.safetensors in float32, and return its folder.

    Args:
        folder: made if it is not there.
        family: llama, mistral (window 5), qwen2, qwen3, phi3, gemma, gemma2, gemma3, gpt2 or opt.
        seed: of numpy's generator: the same weights on every machine.
        overrides: entries of config.json; None removes one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(path.name for path in tiny_checkpoint(folder, "gpt2", n_layer=1).iterdir())
    ['config.json', 'model.safetensors']
    """
    if family not in _CHECKPOINTS:
        raise ValueError(f"family: expected one of {', '.join(_CHECKPOINTS)}, got {family!r}")
    config = {key: value for key, value in (_CHECKPOINTS[family] | overrides).items() if value is not None}
    shapes = {"gpt2": _gpt2_shapes, "opt": _opt_shapes}.get(family, _llama_shapes)
    rng = np.random.default_rng(seed)
    centre = 0.0 if family.startswith("gemma") else 1.0  # Gemma's norms multiply by 1 + weight
    tensors = {}
    for name, shape in shapes(config):
        noise = rng.standard_normal(shape, np.float32)
        if "norm" in name or ".ln_" in name:
            tensors[name] = np.float32(0.1) * noise + np.float32(centre if name.endswith("weight") else 0)
        elif len(shape) == 1:
            tensors[name] = np.float32(0.1) * noise
        else:
            tensors[name] = noise * np.float32(0.2)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
