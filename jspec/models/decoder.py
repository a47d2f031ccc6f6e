"""The transformer of all families: a decoder, alone (Llama, Qwen, Mistral, Gemma, GPT-2, OPT) or with
cross-attention, and the stack of layers that encoders are made of, too.

What differs between families is a field of `DecoderConfig`; `jspec.models.registry` fills it from a
checkpoint's own config. The modules are flax nnx and are split once: everything outside this file sees
``params``, a plain nested dict of arrays, and the pure functions of a `LanguageModel`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from jspec.models import cache as kv
from jspec.models.attention import block_mask, see_cache, see_rows
from jspec.models.layers import (
    Dropout,
    Layer,
    Linear,
    Memory,
    Norm,
    Relative,
    Seen,
    check_config,
    drop,
    sinusoids,
    wide_product,
)
from jspec.models.rotary import Angles, Rotary
from jspec.types import Block, Forward, LanguageModel, Prompt

Params = dict[Any, Any]
LAYER_INPUT = "layer"  # the name that rematerialisation may keep (`jax.checkpoint_policies`)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The architecture, hashable; never a dtype, which is that of the params.

    The defaults are Llama's. Per-layer settings are tuples of ``num_layers`` entries.
    """

    vocab_size: int
    width: int  # E
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int  # positions the checkpoint was made for
    bounded: bool = False  # positions at or beyond context_length do not exist (learned or length-bound ones)

    # Positions: rotary, relative, sinusoidal, or (where none of them is set) learned.
    rotary: Rotary | None = None
    relative: Relative | None = None
    sinusoidal: bool = False
    local_rotary: Rotary | None = None  # of windowed layers, where it differs
    windows: tuple[int | None, ...] | None = None  # per layer: tokens seen, itself included; None: all

    activation: str = "silu"
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_placement: Literal["pre", "post", "both"] = "pre"  # of each sublayer; no final norm if "post"
    embedding_norm: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False  # the head is the embedding
    head_bias: bool = False
    cross: bool = False  # the layers also look at an encoder's output (`jspec.models.seq2seq`)

    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        check_config(self, "num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads = {self.num_heads}, got {self.num_kv_heads}"
            )
        if self.learned_positions and not self.bounded:
            # A position beyond the table would read its last row, and nobody would notice.
            raise ValueError(
                "bounded: expected true with learned positions, which end with their table "
                f"(context_length: {self.context_length} rows), got false"
            )

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer; None if it sees everything."""
        return None if self.windows is None else self.windows[layer]

    @property
    def learned_positions(self) -> bool:
        """Whether positions are a table of parameters."""
        return self.rotary is None and self.relative is None and not self.sinusoidal

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale


class Stack(nnx.Module):
    """Embedded positions, layers and the last norm: a decoder without words, or an encoder."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = c = config
        learned = (c.context_length, c.width)
        self.positions = (
            nnx.Param(jax.random.normal(rngs.params(), learned) * 0.02) if c.learned_positions else None
        )
        # T5 scales no scores, so its biases start small enough not to drown them.
        self.relative_bias = (
            nnx.Param(jax.random.normal(rngs.params(), (c.relative.buckets, c.num_heads)) * c.width**-0.5)
            if c.relative
            else None
        )
        self.embedding_norm = Norm(c.width, c) if c.embedding_norm else None
        self.layers = nnx.List([Layer(c, rngs) for _ in range(c.num_layers)])
        self.norm = None if c.norm_placement == "post" else Norm(c.width, c)

    def see(
        self, cache: kv.Cache, block: Block, mask: Bool[Array, "B N P+N"], row_positions: Int[Array, "B P+N"]
    ) -> dict[int | None, Seen]:
        """What the block's rows see, for each window size that occurs."""
        c, capacity = self.config, cache.keys[0].shape[2]
        biases = (None, None)
        if c.relative is not None and self.relative_bias is not None:
            slots = jnp.arange(capacity, dtype=jnp.int32)[None]
            table = self.relative_bias[...]
            biases = tuple(c.relative.bias(table, block.positions, at) for at in (slots, row_positions))
        return {
            window: Seen(
                see_cache(capacity, cache.lengths, block.positions, window),
                see_rows(mask, block.positions, row_positions, window),
                *biases,
            )
            for window in dict.fromkeys(c.window(i) for i in range(c.num_layers))
        }

    def angles(self, positions: Int[Array, "B N"]) -> tuple[Angles | None, ...]:
        """Each layer's turn of queries and keys."""
        c = self.config
        whole = None if c.rotary is None else c.rotary.angles(positions)
        local = whole if c.local_rotary is None else c.local_rotary.angles(positions)
        return tuple(whole if c.window(i) is None else local for i in range(c.num_layers))

    def rows(self, inputs: dict[int, Float[Array, "B N E"]], positions: Int[Array, "B N"]) -> dict[int, Any]:
        """See `LanguageModel.rows`."""
        angles = self.angles(positions)
        return {i: self.layers[i].rows(x, angles[i]) for i, x in inputs.items()}

    def run(
        self,
        x: Float[Array, "B N E"],
        cache: kv.Cache,
        block: Block,
        mask: Bool[Array, "B N P+N"],
        pending: kv.Rows | None,
        taps: tuple[int, ...],
        memory: tuple[Memory, ...] | None,
        dropout: Dropout | None,
    ) -> Forward:
        """The layers over embedded tokens."""
        c = self.config
        if self.positions is not None:
            x = x + self.positions[...].at[block.positions].get(mode="clip")
        if c.sinusoidal:
            x = x + sinusoids(block.positions, c.width).astype(x.dtype)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        x = drop(x, dropout, c.num_layers)
        positions = (
            block.positions if pending is None else jnp.concatenate([pending.positions, block.positions], 1)
        )
        angles = self.angles(block.positions)
        seen = self.see(cache, block, mask, positions)
        tapped, keys, values = {}, [], []
        for i, layer in enumerate(self.layers):
            x = checkpoint_name(x, LAYER_INPUT)
            if i in taps:
                tapped[i] = x
            x, (k, v) = layer(
                x,
                (cache.keys[i], cache.values[i]),
                None if pending is None else (pending.keys[i], pending.values[i]),
                seen[c.window(i)],
                angles[i],
                None if memory is None else memory[i],
                None if dropout is None else dropout.at(i),
            )
            keys.append(k)
            values.append(v)
        if c.num_layers in taps:
            tapped[c.num_layers] = x
        hidden = x if self.norm is None else self.norm(x)
        # Never true, but `commit` looks at the positions, so its writes depend on everything that read the
        # cache. If only the order of the program said so, XLA would copy the whole cache before a write.
        positions = jnp.where(hidden[:, -1:, 0] > jnp.inf, -1, positions)
        hidden = drop(hidden, dropout, c.num_layers + 1)
        return Forward(hidden, tapped, kv.Rows(tuple(keys), tuple(values), positions))


class Decoder(Stack):
    """A whole model; `language_model` makes pure functions of it."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = config
        # A tied head reads the embedding: its logits start with variance 1 whatever they are scaled by.
        spread = c.width**-0.5 / (c.logit_scale if c.tied else 1)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (c.vocab_size, c.width)) * spread)
        super().__init__(config, rngs)
        self.unembedding = None if c.tied else Linear(c.width, c.vocab_size, bias=False, rngs=rngs)
        self.head_bias = nnx.Param(jnp.zeros(c.vocab_size)) if c.head_bias else None

    def embed(self, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """Scaled token embeddings, without positions; -1 reads some row."""
        x = self.embedding[...].at[tokens].get(mode="clip")
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)

    def head(self, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
        """Logits in float32."""
        kernel = self.embedding[...].T if self.unembedding is None else self.unembedding.kernel[...]
        logits = wide_product(hidden, kernel)
        if self.config.logit_scale != 1:
            # Not on `hidden`: in bfloat16 the scale itself would be rounded, and all logits with it.
            logits = logits * jnp.float32(self.config.logit_scale)
        if self.head_bias is not None:
            bias = self.head_bias[...].astype(jnp.float32)
            logits = logits + jnp.expand_dims(bias, tuple(range(logits.ndim - 1)))
        cap = self.config.logit_softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def extend(
        self,
        cache: kv.Cache,
        block: Block,
        pending: kv.Rows | None,
        taps: tuple[int, ...],
        memory: tuple[Memory, ...] | None = None,
        dropout: Dropout | None = None,
    ) -> Forward:
        """See `LanguageModel.extend`."""
        mask = block_mask(block, None if pending is None else pending.positions)
        if any(not 0 <= tap <= self.config.num_layers for tap in taps):
            raise ValueError(f"taps: expected layers from 0 to {self.config.num_layers}, got {taps}")
        x = self.embed(block.tokens)
        if block.inputs is not None:
            x = jnp.where((block.tokens < 0)[..., None], block.inputs.astype(x.dtype), x)
        return self.run(x, cache, block, mask, pending, taps, memory, dropout)


def language_model(config: DecoderConfig, cache_dtype: str | None = None) -> LanguageModel:
    """The pure functions of an architecture. Cached: equal arguments give the same object.

    ``params`` is the nested dict of the module's arrays: ``embedding`` [V, E]; ``layers[i]`` with
    ``attention.{query, key, value, out}``, ``mlp.{gate, up, down}`` (each ``kernel`` [in, out] and, where the
    family has one, ``bias``) and the norms' ``scale`` and ``bias``; and, where the config has them,
    ``positions`` [context_length, E], ``relative_bias`` [buckets, H], ``embedding_norm``, ``norm``,
    ``unembedding`` (unless tied) and ``head_bias`` [V]. Keys and values are cached in ``cache_dtype``
    (None: the dtype of ``embedding``).

    ``extend`` treats a token of -1 as a place for ``block.inputs``, which replace the (scaled) embedding
    before learned positions are added. Where ``block.mask`` is None the block is causal. The cache and the
    params may be those of a deeper model that `truncate` cut.

    >>> from jspec.testing import tiny_decoder
    >>> model, params = tiny_decoder(vocab_size=11)
    >>> cache = model.start(params, Prompt(jnp.zeros((1, 2), jnp.int32), jnp.array([2])), 8)
    >>> forward = jax.jit(model.extend)(params, cache, Block(jnp.array([[3, 5]]), jnp.array([[0, 1]])))
    >>> model.head(params, forward.hidden).shape
    (1, 2, 11)
    >>> model.commit(cache, forward.rows, jnp.array([[0, 1]]), jnp.array([2])).lengths.tolist()
    [2]
    """
    return _language_model(config, cache_dtype)


@functools.cache
def _language_model(config: DecoderConfig, cache_dtype: str | None) -> LanguageModel:
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))

    def module(params: Params) -> Decoder:
        layers = {i: params["layers"][i] for i in range(config.num_layers)}
        return nnx.merge(graphdef, params | {"layers": layers})

    def start(params: Params, prompt: Prompt, capacity: int, dropout: Dropout | None = None) -> kv.Cache:
        check_capacity(config, capacity)
        c, batch = config, prompt.tokens.shape[0]
        dtype = params["embedding"].dtype if cache_dtype is None else cache_dtype
        return kv.empty(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, dtype)

    def extend(
        params: Params,
        cache: kv.Cache,
        block: Block,
        pending: kv.Rows | None = None,
        taps: tuple[int, ...] = (),
        dropout: Dropout | None = None,
    ) -> Forward:
        return module(params).extend(cache, block, pending, taps, dropout=dropout)

    def truncate(num_layers: int) -> LanguageModel:
        return language_model(first_layers(config, num_layers), cache_dtype)

    return LanguageModel(
        start=start,
        extend=extend,
        commit=kv.commit,
        embed=lambda params, tokens: module(params).embed(tokens),
        head=lambda params, hidden: module(params).head(hidden),
        truncate=truncate,
        config=config,
        rows=lambda params, inputs, positions: module(params).rows(inputs, positions),
    )


def check_capacity(config: DecoderConfig, capacity: int) -> None:
    """Refuse a cache with slots for positions that do not exist."""
    if config.bounded and capacity > config.context_length:
        raise ValueError(
            f"capacity: the model has {config.context_length} positions and no more, got {capacity} slots"
        )


def first_layers(config: DecoderConfig, num_layers: int) -> DecoderConfig:
    """The architecture cut after ``num_layers`` layers."""
    if not 0 < num_layers <= config.num_layers:
        raise ValueError(f"num_layers: expected 1 to {config.num_layers}, got {num_layers}")
    windows = None if config.windows is None else config.windows[:num_layers]
    return dataclasses.replace(config, num_layers=num_layers, windows=windows)
