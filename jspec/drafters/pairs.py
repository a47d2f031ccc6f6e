"""Nets that read pairs of a feature and a token: sizes and modules of EAGLE and of multi-token prediction."""

from __future__ import annotations

import abc
import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.nets import NetConfig, rope
from jspec.models import ENDLESS, cache_dtype
from jspec.models import cache as kv
from jspec.models.attention import block_mask
from jspec.models.decoder import DecoderConfig, Stack
from jspec.types import Block


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(NetConfig):
    """What all recurrent nets are told besides: their layers.

    Raises:
      ValueError: as for `NetConfig`; an odd ``head_dim``, or ``num_kv_heads`` that do not divide the heads.
    """

    num_layers: int = 1
    head_dim: int = 64
    num_heads: int | None = None  # None: width // head_dim
    num_kv_heads: int | None = None  # None: num_heads
    mlp_width: int | None = None  # None: 3 * width
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one(("num_layers", "head_dim", "num_heads", "num_kv_heads", "mlp_width"))
        self.check_layers(self.rope_theta, self.norm_eps)
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number (rotary positions), got {self.head_dim}")
        heads, kv_heads = self.decoder.num_heads, self.decoder.num_kv_heads
        if heads % kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads = {heads}, got {kv_heads}")

    @property
    def longest(self) -> int | None:
        """The longest draft the net is made for; None: it runs on as long as one likes."""
        return None

    @property
    def decoder(self) -> DecoderConfig:
        """The layers."""
        heads = self.num_heads or max(1, self.width // self.head_dim)
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            mlp_width=self.mlp_width or 3 * self.width,
            num_layers=self.num_layers,
            num_heads=heads,
            num_kv_heads=self.num_kv_heads or heads,
            head_dim=self.head_dim,
            context_length=ENDLESS,
            rotary=rope(self.rope_theta, self.head_dim),
            qkv_bias=self.qkv_bias,
            qk_norm=self.qk_norm,
            norm_eps=self.norm_eps,
        )


class Recurrence(nnx.Module):
    """A net: pair -> layers with a cache -> output g -> what the head reads. Subclasses say how a pair is
    made; everything around them is the same."""

    feeds_back = True  # False: later laws are read from g alone, and drafting takes no pass of the net

    def __init__(self, config: RecurrentConfig, rngs: nnx.Rngs):
        self.stack = Stack(config.decoder, rngs)
        self.feeds_normed = bool(getattr(config, "feed_normed", False))
        self.head = _own_head(config, rngs) if config.head == "own" else None

    def fuse(self, features: Float[Array, "B N F"]) -> Float[Array, "B N E"]:
        """What stands for the target's feature in a pair, in the dtype of the net."""
        return features.astype(self.dtype)

    @abc.abstractmethod
    def join(self, embedded: Float[Array, "B N E"], carried: Float[Array, "B N E"]) -> Float[Array, "B N I"]:
        """The input of the layers: an embedded token, and the fused feature before it or what `feed` makes
        of an earlier output. Both in the dtype of the net."""

    def read(self, g: Float[Array, "*n E"], step: Int[Array, ""] | int) -> Float[Array, "*n E"]:
        """What the head reads, for the law of draft number ``step`` = 0, 1, ..."""
        return g if self.stack.norm is None else self.stack.norm(g)

    def feed(self, g: Float[Array, "*n E"]) -> Float[Array, "*n E"]:
        """What stands for the feature where the target has not run."""
        return self.read(g, 0) if self.feeds_normed else g

    @property
    def dtype(self) -> DTypeLike:
        """That of the weights (norms apart, which are float32)."""
        return self.stack.layers[0].attention.out.kernel[...].dtype

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of one g."""
        return (self.stack.config.width,)

    def start(self, batch: int, capacity: int) -> kv.Cache:
        """An empty cache of pairs."""
        c = self.stack.config
        dtype = cache_dtype(self.dtype) or self.dtype
        return kv.empty(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, dtype)

    def scratch(self, batch: int, count: int) -> kv.Rows:
        """Pending rows to be filled."""
        c = self.stack.config
        shape = (batch, count, c.num_kv_heads, c.head_dim)
        keys, values = (tuple(jnp.zeros(shape, self.dtype) for _ in range(c.num_layers)) for _ in range(2))
        return kv.Rows(keys, values, jnp.zeros((batch, count), jnp.int32))

    def extend(
        self,
        cache: kv.Cache,
        x: Float[Array, "B N I"],
        positions: Int[Array, "B N"],
        mask: Bool[Array, "B N P+N"] | None = None,
        pending: kv.Rows | None = None,
    ) -> tuple[Float[Array, "B N E"], kv.Rows]:
        """g of joined pairs, and their keys and values: as `LanguageModel.extend`, which reads the cache and
        never writes it. g comes before the last norm."""
        block = Block(jnp.full_like(positions, -1), positions, mask)
        mask = block_mask(block, None if pending is None else pending.positions)
        end = self.stack.config.num_layers
        out = self.stack.run(x, cache, block, mask, pending, (end,), None, None)
        return out.taps[end], out.rows


def _own_head(config: RecurrentConfig, rngs: nnx.Rngs) -> nnx.Param:
    kernel = jax.random.normal(rngs.params(), config.own_head)
    return nnx.Param(kernel * config.width**-0.5)


@functools.cache
def build(kind: type[Recurrence], config: RecurrentConfig) -> functools.partial:
    """``net -> module``, from a nested dict of arrays."""
    return functools.partial(nnx.merge, nnx.graphdef(nnx.eval_shape(lambda: kind(config, nnx.Rngs(0)))))
