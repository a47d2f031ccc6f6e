"""What transformers are made of: linear maps, norms, attention, perceptrons, and the layer that joins them.

Modules are flax nnx and take their settings from a `DecoderConfig`, whichever model they belong to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jspec.checks import at_least
from jspec.models.attention import attend
from jspec.models.rotary import Angles, rotate

if TYPE_CHECKING:
    from jspec.models.decoder import DecoderConfig

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
SIZES = ("vocab_size", "width", "mlp_width", "num_layers", "num_heads", "head_dim", "context_length")


def check_config(config: Any, *sizes: str) -> None:
    """Refuse an architecture that no model can have.

    Raises:
      ValueError: a size (`SIZES`, and those named) below 1, or an unknown activation.
    """
    at_least(1, **{name: getattr(config, name) for name in (*SIZES, *sizes)})
    if config.activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {config.activation!r}")


class Dropout(NamedTuple):
    """Noise of a training step; None in its place means none. ``site`` tells the places of a model apart."""

    key: jax.Array
    rate: Float[Array, ""] | float

    def at(self, site: int) -> Dropout:
        """An independent stream."""
        return self._replace(key=jax.random.fold_in(self.key, site))


def drop(x: Float[Array, "*n"], dropout: Dropout | None, site: int) -> Float[Array, "*n"]:
    """Zero entries with probability ``dropout.rate``, and scale the others so that the mean stays."""
    if dropout is None:
        return x
    keep = 1 - jnp.asarray(dropout.rate, jnp.float32)
    kept = jax.random.bernoulli(jax.random.fold_in(dropout.key, site), keep, x.shape)
    return jnp.where(kept, x / keep.astype(x.dtype), jnp.zeros((), x.dtype))


@jax.custom_vjp
def product(x: Float[Array, "*n I"], kernel: Float[Array, "I O"]) -> Float[Array, "*n O"]:
    """``x @ kernel``, summed in float32 at least, and cheaper on CPU, above all its gradient.

    The kernel's gradient, x^T dy, sums over rows, for which XLA's CPU backend transposes one factor, together
    with the element-wise functions that make it, against the order of memory. JAX's own rule always chooses
    dy, even where that is the derivative of a wide perceptron's activation; here it is the narrower of the
    two. A training step of a T5 of 13M to 19M parameters takes 1.4 times less processor time.
    """
    return _contract(x, kernel, (x.ndim - 1,), (0,))


@jax.custom_vjp
def wide_product(x: Float[Array, "*n I"], kernel: Float[Array, "I O"]) -> Float[Array, "*n O"]:
    """`product` in float32, not rounded to the factors' dtype: what logits are. The gradients' products have
    factors of that dtype again."""
    return jax.lax.dot_general(
        x, kernel, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )


def _contract(x: Array, y: Array, x_axes: tuple[int, ...], y_axes: tuple[int, ...]) -> Array:
    """The sums of products over these axes, in the factors' dtype.

    XLA's CPU backend multiplies 16-bit numbers in hardware made for it (AMX) only where the result is
    float32: 512 rows take a quarter of the time then, and the sums are rounded once.
    """
    dot = functools.partial(jax.lax.dot_general, dimension_numbers=((x_axes, y_axes), ((), ())))
    if x.dtype.itemsize > 2:
        return dot(x, y)

    def wide(x: Array, y: Array) -> Array:
        return dot(x, y, preferred_element_type=jnp.float32).astype(x.dtype)

    return jax.lax.platform_dependent(x, y, cpu=wide, default=dot)


def _product_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(x, kernel), (x, kernel)


def _wide_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return wide_product(x, kernel), (x, kernel)


def _product_backward(residuals: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    dy = dy.astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    narrow, wide = (x, dy) if x.shape[-1] <= dy.shape[-1] else (dy, x)
    gradient = _contract(narrow, wide, rows, rows)
    return _contract(dy, kernel, (dy.ndim - 1,), (1,)), gradient if narrow is x else gradient.T


product.defvjp(_product_forward, _product_backward)
wide_product.defvjp(_wide_forward, _product_backward)


class Linear(nnx.Module):
    """``x @ kernel + bias`` with the kernel stored [in, out]."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (inputs, outputs)) * inputs**-0.5)
        self.bias = nnx.Param(jnp.zeros(outputs)) if bias else None

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Apply to the last axis."""
        y = product(x, self.kernel[...])
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


class Seen(NamedTuple):
    """What each row of a block sees, and T5's biases of the scores (None: no biases)."""

    cache: Bool[Array, "B 1_or_N S"]
    rows: Bool[Array, "B N M"]
    cache_bias: Float[Array, "B H N S"] | None = None
    rows_bias: Float[Array, "B H N M"] | None = None


class Attention(nnx.Module):
    """Multi-head attention with grouped key-value heads; it reads ``inputs`` numbers a row (None: the
    width)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, inputs: int | None = None):
        self.config = c = config
        linear = functools.partial(Linear, rngs=rngs)
        inputs = c.width if inputs is None else inputs
        self.query = linear(inputs, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.key = linear(inputs, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.value = linear(inputs, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        # Scores start with variance 1 whatever they are scaled by (T5: not at all).
        self.query.kernel[...] = self.query.kernel[...] * (c.head_dim**-0.5 / c.score_scale)
        self.out = linear(c.num_heads * c.head_dim, c.width, bias=c.out_bias)
        self.query_norm, self.key_norm = (Norm(c.head_dim, c) if c.qk_norm else None for _ in range(2))

    def _heads(self, x: Float[Array, "B N F"]) -> Float[Array, "B N H h"]:
        return x.reshape(*x.shape[:2], -1, self.config.head_dim)

    def __call__(
        self,
        x: Float[Array, "B N I"],
        cached: tuple[Array, Array],
        pending: tuple[Array, Array] | None,
        seen: Seen,
        angles: Angles | None,
    ) -> tuple[Float[Array, "B N E"], tuple[Array, Array]]:
        """The output, and the keys and values of pending and new rows together."""
        q = self._heads(self.query(x))
        q = q if self.query_norm is None else self.query_norm(q)
        q = q if angles is None else rotate(q, angles)
        k, v = self.rows(x, angles)
        if pending is not None:
            k, v = jnp.concatenate([pending[0], k], 1), jnp.concatenate([pending[1], v], 1)
        biases = (seen.cache_bias, seen.rows_bias)
        x = attend(
            q,
            cached,
            (k, v),
            seen.cache,
            seen.rows,
            self.config.score_scale,
            self.config.attention_softcap,
            biases,
        )
        return self.out(x), (k, v)

    def rows(
        self, x: Float[Array, "B N I"], angles: Angles | None
    ) -> tuple[Float[Array, "B N K h"], Float[Array, "B N K h"]]:
        """Keys and values of new rows."""
        k, v = self._heads(self.key(x)), self._heads(self.value(x))
        k = k if self.key_norm is None else self.key_norm(k)
        return k if angles is None else rotate(k, angles), v

    def read(self, memory: Float[Array, "B T E"]) -> tuple[Float[Array, "B K T h"], Float[Array, "B K T h"]]:
        """Keys and values of an encoder's output, as `look` takes them."""
        k, v = (self._heads(linear(memory)).swapaxes(1, 2) for linear in (self.key, self.value))
        return k, v

    def look(
        self, x: Float[Array, "B N E"], memory: tuple[Array, Array], seen: Bool[Array, "B 1 T"]
    ) -> Float[Array, "B N E"]:
        """Attention to an encoder's output alone (cross-attention)."""
        q = self._heads(self.query(x))
        none = jnp.zeros((q.shape[0], 0, *memory[0].shape[1:2], q.shape[3]), q.dtype)
        nothing = jnp.zeros((*q.shape[:2], 0), bool)
        return self.out(attend(q, memory, (none, none), seen, nothing, self.config.score_scale))


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


class Memory(NamedTuple):
    """What cross-attention of one layer reads."""

    cached: tuple[Float[Array, "B K T h"], Float[Array, "B K T h"]]
    seen: Bool[Array, "B 1 T"]


class Layer(nnx.Module):
    """Attention, cross-attention where the model has an encoder, and MLP, each with residual and norms."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.placement = config.norm_placement
        self.attention = Attention(config, rngs)
        self.cross = Attention(config, rngs) if config.cross else None
        self.mlp = MLP(config, rngs)
        self.attention_norm, self.attention_post_norm = self._norms(config)
        self.cross_norm, self.cross_post_norm = self._norms(config) if config.cross else (None, None)
        self.mlp_norm, self.mlp_post_norm = self._norms(config)

    def _norms(self, config: DecoderConfig) -> tuple[Norm | None, Norm | None]:
        before, after = self.placement in ("pre", "both"), self.placement in ("post", "both")
        return Norm(config.width, config) if before else None, Norm(config.width, config) if after else None

    def __call__(
        self,
        x: Float[Array, "B N E"],
        cached: tuple[Array, Array],
        pending: tuple[Array, Array] | None,
        seen: Seen,
        angles: Angles | None,
        memory: Memory | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Float[Array, "B N E"], tuple[Array, Array]]:
        """The next layer's input, and what `Attention` returns besides."""
        y, rows = self.attention(_before(x, self.attention_norm), cached, pending, seen, angles)
        x = self._add(x, drop(y, dropout, 0), self.attention_post_norm)
        if self.cross is not None:
            assert memory is not None
            y = self.cross.look(_before(x, self.cross_norm), memory.cached, memory.seen)
            x = self._add(x, drop(y, dropout, 1), self.cross_post_norm)
        y = self.mlp(_before(x, self.mlp_norm))
        return self._add(x, drop(y, dropout, 2), self.mlp_post_norm), rows

    def rows(
        self, x: Float[Array, "B N E"], angles: Angles | None
    ) -> tuple[Float[Array, "B N K h"], Float[Array, "B N K h"]]:
        """Keys and values of the layer's input."""
        return self.attention.rows(_before(x, self.attention_norm), angles)

    def read(self, memory: Float[Array, "B T E"]) -> tuple[Float[Array, "B K T h"], Float[Array, "B K T h"]]:
        """What cross-attention needs of an encoder's output."""
        assert self.cross is not None
        return self.cross.read(memory)

    def _add(self, x: Array, y: Array, norm: Norm | None) -> Array:
        if norm is None:
            return x + y
        # "post": the norm acts on the sum; "both": on the sublayer's output.
        return norm(x + y) if self.placement == "post" else x + norm(y)


def _before(x: Array, norm: Norm | None) -> Array:
    return x if norm is None else norm(x)


class Relative(NamedTuple):
    """T5's relative position bias (Raffel et al., arXiv 1910.10683, section 2.1): one number a head for each
    bucket of the distance between key and query."""

    buckets: int = 32
    distance: int = 128  # from here on all distances share the last bucket
    bidirectional: bool = False

    def bucket(self, relative: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """The bucket of ``key position - query position``.

        Half of the buckets (of each direction, if there are two) hold one distance each, the others grow
        logarithmically up to ``distance``. One direction, 32 buckets::

            distance  0 1 ... 15 | 16 17 18 ... 113 ...
            bucket    0 1 ... 15 | 16 16 16 ...  31 ...

        >>> Relative().bucket(jnp.array([3, 0, -1, -15, -16, -18, -19, -200])).tolist()
        [0, 0, 1, 15, 16, 16, 17, 31]
        """
        return jnp.asarray(_buckets(self))[self._clipped(relative)]

    def bias(
        self,
        table: Float[Array, "buckets H"],
        queries: Int[Array, "B_or_1 N"],
        keys: Int[Array, "B_or_1 M"],
    ) -> Float[Array, "B_or_1 H N M"]:
        """The biases of absolute positions, whatever order they stand in: a cache's, a block's, a tree's."""
        biases = table.astype(jnp.float32)[_buckets(self)]
        return biases[self._clipped(keys[:, None, :] - queries[:, :, None])].transpose(0, 3, 1, 2)

    def _clipped(self, relative: Int[Array, "*n"]) -> Int[Array, "*n"]:
        return jnp.clip(relative, -self.distance, self.distance) + self.distance


@functools.cache
def _buckets(relative: Relative) -> np.ndarray:
    """The buckets of -distance to distance.

    Made on the host, where the logarithm is the same for every device: some distances lie exactly where a
    bucket begins (16, 32 and 64 in the encoder of T5), and the least error would put them into another one.
    """
    buckets = relative.buckets // 2 if relative.bidirectional else relative.buckets
    exact = buckets // 2
    if not 0 < exact < relative.distance:
        raise ValueError(
            f"relative_buckets, relative_distance: expected at least {4 if relative.bidirectional else 2} "
            f"buckets and distances beyond half of them, got {relative.buckets} and {relative.distance}"
        )
    distances = np.arange(relative.distance + 1)
    ratio = np.log(np.maximum(distances, 1).astype(np.float32) / np.float32(exact))
    ratio = ratio / np.float32(math.log(relative.distance / exact)) * np.float32(buckets - exact)
    far = np.minimum(exact + ratio.astype(np.int32), buckets - 1)
    behind = np.where(distances < exact, distances, far)
    ahead = behind[1:] + buckets if relative.bidirectional else np.zeros_like(behind[1:])
    return np.concatenate([behind[::-1], ahead]).astype(np.int32)


def sinusoids(positions: Int[Array, "B N"], width: int) -> Float[Array, "B N E"]:
    """Marian's fixed positions: sines of all frequencies, then cosines (not in turn)."""
    half = (width + 1) // 2
    rates = jnp.asarray(10000.0 ** (-2.0 * np.arange(half) / width), jnp.float32)[None, None]
    angles = positions[..., None].astype(jnp.float32) * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)[..., : width - half]], -1)
