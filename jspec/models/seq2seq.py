"""Encoder-decoder transformers: T5 (1.0, 1.1, FLAN, mT5) and Marian / BART.

The decoder is `jspec.models.decoder.Decoder` with cross-attention. The encoder runs once, in
`LanguageModel.start`, which leaves each decoder layer's cross-attention keys and values in the cache; from
then on such a model is decoded like any other, and every drafter and verifier works with it unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jspec.models import cache as kv
from jspec.models.decoder import Decoder, DecoderConfig, Params, Stack, check_capacity, first_layers
from jspec.models.layers import Dropout, Memory, Relative, check_config
from jspec.types import Block, Forward, LanguageModel, Prompt

ENCODER_SITES = 1 << 16  # dropout streams of the encoder, apart from the decoder's
ENDLESS = 1 << 20  # positions without an end: longer than anything that is read or written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig:
    """The architecture, hashable; never a dtype, which is that of the params. The defaults are T5 1.1's.

    Encoder and decoder share every setting but their numbers of layers.
    """

    vocab_size: int
    width: int  # E
    mlp_width: int
    num_layers: int  # of the decoder
    num_encoder_layers: int
    num_heads: int
    head_dim: int
    context_length: int = ENDLESS  # decoder positions; relative ones have no end
    source_length: int = ENDLESS  # encoder positions
    bounded: bool = False  # positions beyond these do not exist (learned ones)

    positions: Literal["relative", "learned", "sinusoidal"] = "relative"
    relative_buckets: int = 32
    relative_distance: int = 128
    activation: str = "gelu_tanh"
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_placement: Literal["pre", "post"] = "pre"
    embedding_norm: bool = False
    bias: bool = False
    head_bias: bool = False
    tied: bool = False
    embedding_scale: float = 1.0
    attention_scale: float = 1.0
    logit_scale: float = 1.0  # T5 1.0, whose head is its embedding: width ** -0.5

    def __post_init__(self) -> None:
        check_config(self, "num_encoder_layers", "source_length", "relative_buckets")
        if self.positions == "learned" and not self.bounded:
            raise ValueError(
                "bounded: expected true with learned positions, which end with their tables (context_length: "
                f"{self.context_length} rows, source_length: {self.source_length}), got false"
            )

    def _stack(self, *, encoder: bool) -> DecoderConfig:
        relative = Relative(self.relative_buckets, self.relative_distance, bidirectional=encoder)
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            mlp_width=self.mlp_width,
            num_layers=self.num_encoder_layers if encoder else self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            context_length=self.source_length if encoder else self.context_length,
            bounded=self.bounded,
            relative=relative if self.positions == "relative" else None,
            sinusoidal=self.positions == "sinusoidal",
            activation=self.activation,
            gated=self.gated,
            norm=self.norm,
            norm_eps=self.norm_eps,
            norm_placement=self.norm_placement,
            embedding_norm=self.embedding_norm,
            qkv_bias=self.bias,
            out_bias=self.bias,
            mlp_bias=self.bias,
            tied=self.tied,
            head_bias=self.head_bias,
            cross=not encoder,
            embedding_scale=self.embedding_scale,
            attention_scale=self.attention_scale,
            logit_scale=self.logit_scale,
        )

    @property
    def encoder(self) -> DecoderConfig:
        """The encoder's stack."""
        return self._stack(encoder=True)

    @property
    def decoder(self) -> DecoderConfig:
        """The decoder, cross-attention included."""
        return self._stack(encoder=False)


class Seq2SeqCache(NamedTuple):
    """A decoder's cache (see `jspec.models.cache`) and what its cross-attention reads."""

    keys: tuple[Float[Array, "B K S h"], ...]
    values: tuple[Float[Array, "B K S h"], ...]
    lengths: Int[Array, " B"]
    cross_keys: tuple[Float[Array, "B K Ts h"], ...]
    cross_values: tuple[Float[Array, "B K Ts h"], ...]
    source_lengths: Int[Array, " B"]


def commit(
    cache: Seq2SeqCache, rows: kv.Rows, path: Int[Array, "B R"], count: Int[Array, " B"]
) -> Seq2SeqCache:
    """`cache.commit` on the decoder's own part."""
    own = kv.commit(kv.Cache(cache.keys, cache.values, cache.lengths), rows, path, count)
    return cache._replace(keys=own.keys, values=own.values, lengths=own.lengths)


class Seq2Seq(Decoder):
    """A decoder with an encoder beside it; both read the same embedding."""

    def __init__(self, config: Seq2SeqConfig, rngs: nnx.Rngs):
        super().__init__(config.decoder, rngs)
        self.encoder = Stack(config.encoder, rngs)

    def encode(
        self, source: Int[Array, "B Ts"], lengths: Int[Array, " B"], dropout: Dropout | None
    ) -> Float[Array, "B Ts E"]:
        """The encoder's output; what stands at or beyond ``lengths`` is seen by nobody."""
        batch, width = source.shape
        c = self.encoder.config
        positions = jnp.arange(width, dtype=jnp.int32)[None]  # of all rows: one bias for the batch
        inside = _inside(width, lengths)
        mask = jnp.broadcast_to(inside, (batch, width, width))
        nothing = kv.empty(batch, 0, c.num_layers, c.num_kv_heads, c.head_dim, self.embedding[...].dtype)
        dropout = None if dropout is None else dropout.at(ENCODER_SITES)
        x = self.embed(source)
        hidden = self.encoder.run(x, nothing, Block(source, positions), mask, None, (), None, dropout).hidden
        # Padding has no weight in cross-attention, but 0 * NaN is NaN.
        return jnp.where(inside.swapaxes(1, 2), hidden, 0)


def _inside(width: int, lengths: Int[Array, " B"]) -> Bool[Array, "B 1 T"]:
    return jnp.arange(width, dtype=jnp.int32)[None, None] < lengths[:, None, None]


def language_model(config: Seq2SeqConfig, cache_dtype: str | None = None) -> LanguageModel:
    """The pure functions of an architecture. Cached: equal arguments give the same object.

    ``params`` are those of `jspec.models.decoder.language_model`, with ``cross`` and its norm in every layer,
    ``relative_bias`` [buckets, H] beside the layers that share it, and ``encoder`` with layers, norm and
    ``relative_bias`` of its own. ``start`` needs ``prompt.source`` and ``prompt.source_lengths``;
    ``prompt.tokens`` are the decoder's, which begin with the model's start token.

    >>> from jspec.testing import tiny_seq2seq
    >>> model, params = tiny_seq2seq(vocab_size=11)
    >>> prompt = Prompt(jnp.array([[0]]), jnp.array([1]), jnp.array([[4, 5, 1]]), jnp.array([3]))
    >>> cache = model.start(params, prompt, 8)
    >>> forward = model.extend(params, cache, Block(jnp.array([[0, 5]]), jnp.array([[0, 1]])))
    >>> model.head(params, forward.hidden).shape
    (1, 2, 11)
    """
    return _language_model(config, cache_dtype)


@functools.cache
def _language_model(config: Seq2SeqConfig, cache_dtype: str | None) -> LanguageModel:
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Seq2Seq(config, nnx.Rngs(0))))

    def module(params: Params) -> Seq2Seq:
        layers = {i: params["layers"][i] for i in range(config.num_layers)}
        return nnx.merge(graphdef, params | {"layers": layers})

    def start(params: Params, prompt: Prompt, capacity: int, dropout: Dropout | None = None) -> Seq2SeqCache:
        check_capacity(config.decoder, capacity)
        if prompt.source is None or prompt.source_lengths is None:
            raise ValueError("prompt.source: expected the encoder's tokens and their lengths, got None")
        if config.bounded and prompt.source.shape[1] > config.source_length:
            raise ValueError(
                f"prompt.source: the encoder has {config.source_length} positions and no more, "
                f"got {prompt.source.shape[1]}"
            )
        model, c = module(params), config.decoder
        memory = model.encode(prompt.source, prompt.source_lengths, dropout)
        batch = prompt.tokens.shape[0]
        dtype = memory.dtype if cache_dtype is None else cache_dtype
        own = kv.empty(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, dtype)
        keys, values = zip(*(layer.read(memory) for layer in model.layers), strict=True)
        return Seq2SeqCache(*own, keys, values, prompt.source_lengths)

    def extend(
        params: Params,
        cache: Seq2SeqCache,
        block: Block,
        pending: kv.Rows | None = None,
        taps: tuple[int, ...] = (),
        dropout: Dropout | None = None,
    ) -> Forward:
        own = kv.Cache(cache.keys, cache.values, cache.lengths)
        seen = _inside(cache.cross_keys[0].shape[2], cache.source_lengths)
        memory = tuple(Memory(kept, seen) for kept in zip(cache.cross_keys, cache.cross_values, strict=True))
        return module(params).extend(own, block, pending, taps, memory, dropout)

    def truncate(num_layers: int) -> LanguageModel:
        return language_model(
            dataclasses.replace(config, num_layers=first_layers(config.decoder, num_layers).num_layers),
            cache_dtype,
        )

    return LanguageModel(
        start=start,
        extend=extend,
        commit=commit,
        embed=lambda params, tokens: module(params).embed(tokens),
        head=lambda params, hidden: module(params).head(hidden),
        truncate=truncate,
        config=config,
        rows=lambda params, inputs, positions: module(params).rows(inputs, positions),
    )
