"""One decoder-only transformer for the Llama, Qwen, Mistral, Gemma, GPT-2 and OPT families.

What differs between families is a field of `DecoderConfig`; `jspec.models.registry` fills it from a
checkpoint's own config. The modules are flax nnx and are split once: everything outside this file sees
``params``, a plain nested dict of arrays, and the pure functions of a `LanguageModel`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.models import cache as kv
from jspec.models.attention import attend, see_cache, see_rows
from jspec.models.rotary import Angles, Rotary, rotate
from jspec.types import Block, Forward, LanguageModel, Prompt

Params = dict[Any, Any]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


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

    rotary: Rotary | None = None  # None: learned positions
    local_rotary: Rotary | None = None  # of windowed layers, where it differs
    windows: tuple[int | None, ...] | None = None  # per layer: tokens seen, itself included; None: all

    activation: str = "silu"
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_placement: Literal["pre", "post", "both"] = "pre"  # of each sublayer; no final norm if "post"
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False  # the head is the embedding

    embedding_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer; None if it sees everything."""
        return None if self.windows is None else self.windows[layer]


class Linear(nnx.Module):
    """``x @ kernel + bias`` with the kernel stored [in, out]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (inputs, outputs)) * inputs**-0.5)
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Apply to the last axis."""
        y = x @ self.kernel[...]
        return y if self.bias is None else y + jnp.expand_dims(self.bias[...], tuple(range(y.ndim - 1)))


class Norm(nnx.Module):
    """RMSNorm or LayerNorm, computed in float32 with float32 parameters."""

    def __init__(self, width: int, config: DecoderConfig):
        self.eps, self.center = config.norm_eps, config.norm == "layer"
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width)) if self.center else None

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        """Normalise the last axis; the dtype stays."""
        y = x.astype(jnp.float32)
        lead = tuple(range(y.ndim - 1))
        if self.center:
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        y = y * jnp.expand_dims(self.scale[...].astype(jnp.float32), lead)
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias[...].astype(jnp.float32), lead)
        return y.astype(x.dtype)


class Attention(nnx.Module):
    """Multi-head attention with grouped key-value heads."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = c = config
        linear = functools.partial(Linear, rngs=rngs)
        self.query = linear(c.width, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.key = linear(c.width, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.value = linear(c.width, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.out = linear(c.num_heads * c.head_dim, c.width, bias=c.out_bias)
        self.query_norm, self.key_norm = (Norm(c.head_dim, c) if c.qk_norm else None for _ in range(2))

    def __call__(
        self,
        x: Float[Array, "B N E"],
        cached: tuple[Array, Array],
        pending: tuple[Array, Array] | None,
        seen: tuple[Array, Array],
        angles: Angles | None,
    ) -> tuple[Float[Array, "B N E"], tuple[Array, Array]]:
        """The output, and the keys and values of pending and new rows together."""

        def heads(x: Float[Array, "B N F"]) -> Float[Array, "B N H h"]:
            return x.reshape(*x.shape[:2], -1, self.config.head_dim)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if pending is not None:
            k, v = jnp.concatenate([pending[0], k], 1), jnp.concatenate([pending[1], v], 1)
        scale = self.config.attention_scale or self.config.head_dim**-0.5
        x = attend(q, cached, (k, v), *seen, scale, self.config.attention_softcap)
        return self.out(x), (k, v)


class MLP(nnx.Module):
    """Two-layer perceptron, gated or plain."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        c = config
        self.activation = ACTIVATIONS[c.activation]
        linear = functools.partial(Linear, bias=c.mlp_bias, rngs=rngs)
        self.gate = linear(c.width, c.mlp_width) if c.gated else None
        self.up = linear(c.width, c.mlp_width)
        self.down = linear(c.mlp_width, c.width)

    def __call__(self, x: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        """Apply to the last axis."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention and MLP, each with its residual and its norms."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        placement = config.norm_placement
        self.attention = Attention(config, rngs)
        self.mlp = MLP(config, rngs)
        before, after = placement in ("pre", "both"), placement in ("post", "both")
        self.residual_normed = placement == "post"  # the norm acts on the sum, not on the sublayer's output
        self.attention_norm, self.mlp_norm = (
            Norm(config.width, config) if before else None for _ in range(2)
        )
        self.attention_post_norm, self.mlp_post_norm = (
            Norm(config.width, config) if after else None for _ in range(2)
        )

    def __call__(
        self, x: Float[Array, "B N E"], *args: Any
    ) -> tuple[Float[Array, "B N E"], tuple[Array, Array]]:
        """The next layer's input, and what `Attention` returns besides."""
        y, rows = self.attention(x if self.attention_norm is None else self.attention_norm(x), *args)
        x = self._add(x, y, self.attention_post_norm)
        y = self.mlp(x if self.mlp_norm is None else self.mlp_norm(x))
        return self._add(x, y, self.mlp_post_norm), rows

    def _add(self, x: Array, y: Array, norm: Norm | None) -> Array:
        if norm is None:
            return x + y
        return norm(x + y) if self.residual_normed else x + norm(y)


class Decoder(nnx.Module):
    """The whole model; `language_model` makes pure functions of it."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = c = config
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (c.vocab_size, c.width)) * c.width**-0.5)
        learned = (c.context_length, c.width)
        self.positions = None if c.rotary else nnx.Param(jax.random.normal(rngs.params(), learned) * 0.02)
        self.layers = nnx.List([Layer(c, rngs) for _ in range(c.num_layers)])
        self.norm = None if c.norm_placement == "post" else Norm(c.width, c)
        self.unembedding = None if c.tied else Linear(c.width, c.vocab_size, bias=False, rngs=rngs)

    def embed(self, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """Scaled token embeddings, without positions; -1 reads some row."""
        x = self.embedding[...].at[tokens].get(mode="clip")
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)

    def head(self, hidden: Float[Array, "... E"]) -> Float[Array, "... V"]:
        """Logits in float32."""
        kernel = self.embedding[...].T if self.unembedding is None else self.unembedding.kernel[...]
        logits = jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else jnp.tanh(logits / cap) * cap

    def __call__(
        self,
        cache: kv.Cache,
        block: Block,
        mask: Bool[Array, "B N P+N"],
        pending: kv.Rows | None,
        taps: tuple[int, ...],
    ) -> Forward:
        """See `LanguageModel.extend`; the mask is never None here."""
        c = self.config
        x = self.embed(block.tokens)
        if block.inputs is not None:
            x = jnp.where((block.tokens < 0)[..., None], block.inputs.astype(x.dtype), x)
        if self.positions is not None:
            x = x + self.positions[...].at[block.positions].get(mode="clip")
        positions = (
            block.positions if pending is None else jnp.concatenate([pending.positions, block.positions], 1)
        )

        capacity = cache.keys[0].shape[2]
        angles = None if c.rotary is None else c.rotary.angles(block.positions)
        local_angles = angles if c.local_rotary is None else c.local_rotary.angles(block.positions)
        seen = {  # one pair of masks for each window size that occurs
            window: (
                see_cache(capacity, cache.lengths, block.positions, window),
                see_rows(mask, block.positions, positions, window),
            )
            for window in dict.fromkeys(c.window(i) for i in range(c.num_layers))
        }
        tapped, keys, values = {}, [], []
        for i, layer in enumerate(self.layers):
            if i in taps:
                tapped[i] = x
            window = c.window(i)
            x, (k, v) = layer(
                x,
                (cache.keys[i], cache.values[i]),
                None if pending is None else (pending.keys[i], pending.values[i]),
                seen[window],
                angles if window is None else local_angles,
            )
            keys.append(k)
            values.append(v)
        if c.num_layers in taps:
            tapped[c.num_layers] = x
        hidden = x if self.norm is None else self.norm(x)
        # Never true, but `commit` looks at the positions, so its writes depend on everything that read the
        # cache. If only the order of the program said so, XLA would copy the whole cache before a write.
        positions = jnp.where(hidden[:, -1:, 0] > jnp.inf, -1, positions)
        return Forward(hidden, tapped, kv.Rows(tuple(keys), tuple(values), positions))


def init_params(config: DecoderConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters, kernels with variance 1 / inputs. Norms stay float32 whatever ``dtype`` is."""
    params = nnx.to_pure_dict(nnx.state(Decoder(config, nnx.Rngs(params=key)), nnx.Param))
    return cast(params, dtype)


def abstract_params(config: DecoderConfig) -> Params:
    """The params as `jax.ShapeDtypeStruct` leaves: what a loader has to fill."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))), nnx.Param))


def is_norm(path: tuple[Any, ...]) -> bool:
    """Whether a path into params (keys, or jax key entries) leads to a norm's parameter."""
    return any(str(getattr(entry, "key", entry)).endswith("norm") for entry in path)


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Params in another dtype, norms left in float32."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x if is_norm(path) else x.astype(dtype), params)


@functools.cache
def language_model(config: DecoderConfig) -> LanguageModel:
    """The pure functions of an architecture. Cached: equal configs give the same object.

    ``params`` is the nested dict of the module's arrays: ``embedding`` [V, E]; ``positions`` (learned ones);
    ``layers[i]`` with ``attention.{query, key, value, out}``, ``mlp.{gate, up, down}`` (each ``kernel``
    [in, out] and, where the family has one, ``bias``) and the norms' ``scale`` and ``bias``; ``norm``;
    ``unembedding`` unless tied. Keys and values are cached in the dtype of ``embedding``.

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
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))

    def module(params: Params) -> Decoder:
        layers = {i: params["layers"][i] for i in range(config.num_layers)}
        return nnx.merge(graphdef, params | {"layers": layers})

    def start(params: Params, prompt: Prompt, capacity: int) -> kv.Cache:
        if config.bounded and capacity > config.context_length:
            raise ValueError(
                f"capacity: the model has {config.context_length} positions and no more, got {capacity} slots"
            )
        c, batch = config, prompt.tokens.shape[0]
        return kv.empty(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, params["embedding"].dtype)

    def extend(
        params: Params,
        cache: kv.Cache,
        block: Block,
        pending: kv.Rows | None = None,
        taps: tuple[int, ...] = (),
    ) -> Forward:
        batch, width = block.tokens.shape
        num_pending = 0 if pending is None else pending.positions.shape[1]
        mask = block.mask
        if mask is None:
            if num_pending:
                raise ValueError(
                    f"block.mask: needed to say which of {num_pending} pending rows are seen, got None"
                )
            mask = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool))[None], (batch, width, width))
        if mask.shape != (batch, width, num_pending + width):
            raise ValueError(f"block.mask: expected {(batch, width, num_pending + width)}, got {mask.shape}")
        if any(not 0 <= tap <= config.num_layers for tap in taps):
            raise ValueError(f"taps: expected layers from 0 to {config.num_layers}, got {taps}")
        return module(params)(cache, block, mask, pending, taps)

    def truncate(num_layers: int) -> LanguageModel:
        if not 0 < num_layers <= config.num_layers:
            raise ValueError(f"num_layers: expected 1 to {config.num_layers}, got {num_layers}")
        windows = None if config.windows is None else config.windows[:num_layers]
        return language_model(dataclasses.replace(config, num_layers=num_layers, windows=windows))

    return LanguageModel(
        start=start,
        extend=extend,
        commit=kv.commit,
        embed=lambda params, tokens: module(params).embed(tokens),
        head=lambda params, hidden: module(params).head(hidden),
        truncate=truncate,
        config=config,
    )
