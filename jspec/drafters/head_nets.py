"""The networks of `jspec.drafters.heads`: Medusa's, Hydra's and blockwise parallel decoding's heads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.checks import check
from jspec.drafters import nets
from jspec.drafters.common import take
from jspec.drafters.nets import NetConfig, Network, Text, Weights
from jspec.models.layers import Linear, product
from jspec.types import LanguageModel, PyTree

KINDS = ("medusa", "hydra", "blockwise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsConfig(NetConfig):
    """K heads, h the hidden state they read, E(x) the target's embedding of a token.

    * ``medusa`` (Cai et al., arXiv 2401.10774, section 2.1): every head is ``layers`` residual blocks ``x +
      SiLU(W x + b)`` over h, W = 0 at first. Heads do not know of each other's tokens.
    * ``hydra`` (Ankner et al., arXiv 2402.05109): head k reads [h, E(root), E(x_1) ... E(x_{k-1})], (k + 1) E
      wide, which its first block narrows to E: ``S x + SiLU(W x + b)``, at first S x = h. Hydra++ is ``layers
      = 4``, taught with the target's laws; its decoder layer under the heads is not here.
    * ``blockwise`` (Stern, Shazeer, Uszkoreit 2018, arXiv 1811.03115, section 6): one hidden layer for all
      heads, ``h + W_k relu(U h + b) + c_k``, W_k = 0 at first. The paper's p_1, which also stands for the
      target's own head, is left as it is (footnote 1), so its k is K + 1.

    Raises:
      ValueError: as for `NetConfig`; an unknown kind, or settings that are another kind's.
    """

    kind: Literal["medusa", "hydra", "blockwise"]
    num_heads: int = 4  # K
    layers: int = 1  # blocks a head; of medusa and hydra
    mlp_width: int | None = None  # of blockwise: units of the hidden layer for each head; None: 4 E
    head_bias: bool = False  # of "own" heads: Hydra's have one

    def __post_init__(self) -> None:
        check(self.kind in KINDS, "kind", f"one of {', '.join(KINDS)}", self.kind)
        super().__post_init__()
        self.at_least_one(("num_heads", "layers"))
        blockwise = self.kind == "blockwise"
        check(self.layers == 1 or not blockwise, "layers", "1 for blockwise heads", self.layers)
        check(
            self.mlp_width is None or (blockwise and self.mlp_width >= 1),
            "mlp_width",
            "a number >= 1 for blockwise heads, None for others",
            self.mlp_width,
        )
        check(
            not self.head_bias or self.head == "own", "head_bias", "false unless head = 'own'", self.head_bias
        )

    @property
    def own_head(self) -> tuple[int, ...]:
        """One kernel a head, as Medusa's are."""
        return self.num_heads, self.width, self.columns


class Residual(nnx.Module):
    """``x + SiLU(W x + b)``, or ``S x + ...`` where x is ``inputs`` > E wide. At first h, x's beginning."""

    def __init__(self, inputs: int, width: int, rngs: nnx.Rngs):
        self.linear = Linear(inputs, width, bias=True, rngs=rngs)
        self.linear.kernel[...] = jnp.zeros((inputs, width))
        self.skip = Linear(inputs, width, bias=True, rngs=rngs) if inputs != width else None
        if self.skip is not None:
            self.skip.kernel[...] = jnp.eye(inputs, width)

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... E"]:
        """Apply to the last axis."""
        return (x if self.skip is None else self.skip(x)) + jax.nn.silu(self.linear(x))


class Head(nnx.Module):
    """Residual blocks, the first of which reads h and the embeddings of so many tokens."""

    def __init__(self, config: HeadsConfig, tokens: int, rngs: nnx.Rngs):
        inputs = [(tokens + 1) * config.width, *[config.width] * (config.layers - 1)]
        self.blocks = nnx.List([Residual(size, config.width, rngs) for size in inputs])

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... E"]:
        """Apply to the last axis."""
        for block in self.blocks:
            x = block(x)
        return x


class Heads(nnx.Module):
    """Everything that is trained."""

    def __init__(self, config: HeadsConfig, rngs: nnx.Rngs):
        self.config = c = config
        blockwise, reads = c.kind == "blockwise", c.kind == "hydra"
        units = c.num_heads * (4 * c.width if c.mlp_width is None else c.mlp_width)
        outputs = c.num_heads * c.width
        self.up = Linear(c.width, units, bias=True, rngs=rngs) if blockwise else None
        self.down = Linear(units, outputs, bias=True, rngs=rngs) if blockwise else None
        if self.down is not None:
            self.down.kernel[...] = jnp.zeros((units, outputs))
        self.heads = (
            None if blockwise else nnx.List([Head(c, (k + 1) * reads, rngs) for k in range(c.num_heads)])
        )
        shape = c.own_head
        self.head = (
            nnx.Param(jax.random.normal(rngs.params(), shape) * c.width**-0.5) if c.head == "own" else None
        )
        self.head_bias = nnx.Param(jnp.zeros((c.num_heads, c.columns))) if c.head_bias else None

    def at_once(self, hidden: Float[Array, "... E"], num_tokens: int) -> Float[Array, "... K E"]:
        """The first heads' outputs, where none depends on another."""
        if self.heads is not None:
            return jnp.stack([self.heads[k](hidden) for k in range(num_tokens)], -2)
        assert self.up is not None
        assert self.down is not None
        out = self.down(jax.nn.relu(self.up(hidden)))
        out = out.reshape(*hidden.shape[:-1], self.config.num_heads, self.config.width)
        return hidden[..., None, :] + out[..., :num_tokens, :]

    def one(self, hidden: Float[Array, "... E"], k: Int[Array, ""]) -> Float[Array, "... E"]:
        """The output of blockwise head ``k`` (from 0), without the work for the others."""
        assert self.up is not None
        assert self.down is not None
        assert self.down.bias is not None
        width = self.config.width
        own = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=k * width, slice_size=width)
        out = product(jax.nn.relu(self.up(hidden)), own(self.down.kernel[...], axis=1))
        return hidden + out + jnp.expand_dims(own(self.down.bias[...]), tuple(range(hidden.ndim - 1)))

    def next(self, read: Float[Array, "... I"], k: int) -> Float[Array, "... E"]:
        """The output of Hydra's head ``k`` (from 0) over h and k + 1 embeddings side by side."""
        assert self.heads is not None
        return self.heads[k](read)


class Bound(NamedTuple):
    """The network at work: its module, and where its logits and embeddings come from."""

    module: Heads
    weights: Weights
    target: LanguageModel
    target_params: PyTree

    @property
    def dtype(self) -> jnp.dtype:
        """What the network computes in."""
        return dtype_of(self.weights)

    def logits(self, outputs: Float[Array, "... K E"], first: int = 0) -> Float[Array, "... K Vd"]:
        """Those of the heads from ``first`` on, float32."""
        own = self.module.head
        if own is None:
            return nets.logits(self.weights, self.target, self.target_params, outputs)
        count, bias = outputs.shape[-2], self.module.head_bias
        kernels = own[...][first : first + count]
        logits = jnp.einsum("...ke,kev->...kv", outputs, kernels, preferred_element_type=jnp.float32)
        if bias is None:
            return logits
        bias = bias[...][first : first + count].astype(jnp.float32)
        return logits + jnp.expand_dims(bias, tuple(range(logits.ndim - 2)))

    def at_once(self, hidden: Float[Array, "... E"], num_tokens: int) -> Float[Array, "... K Vd"]:
        """The logits of independent heads."""
        return self.logits(self.module.at_once(hidden, num_tokens))

    def next(self, read: Float[Array, "... I"], k: int) -> Float[Array, "... Vd"]:
        """Those of Hydra's head ``k`` (from 0)."""
        return self.logits(self.module.next(read, k)[..., None, :], first=k)[..., 0, :]

    def embed(self, tokens: Int[Array, "B N"]) -> Float[Array, "B N E"]:
        """The target's embeddings."""
        return self.target.embed(self.target_params, tokens).astype(self.dtype)

    def token(self, columns: Int[Array, ...]) -> Int[Array, ...]:
        """The target's ids of columns of the head."""
        return columns if self.weights.ids is None else self.weights.ids[columns]


def dtype_of(weights: Weights) -> jnp.dtype:
    """That of the network's parameters."""
    return jax.tree.leaves(weights.net)[0].dtype


@functools.cache
def binder(config: HeadsConfig) -> Callable[[Weights, LanguageModel, PyTree], Bound]:
    """The function that puts weights into the network."""
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Heads(config, nnx.Rngs(0))))

    def bind(weights: Weights, target: LanguageModel, target_params: PyTree) -> Bound:
        return Bound(nnx.merge(graphdef, weights.net), weights, target, target_params)

    return bind


@functools.cache
def heads_network(config: HeadsConfig) -> Network:
    """Heads as a network that can be taught. They read no taps but the last hidden state.

    ``init(key)`` makes a nested dict: ``heads[k]["blocks"][i]`` with ``linear`` and, where it narrows,
    ``skip`` (each ``kernel`` [in, out] and ``bias``); of blockwise heads ``up`` and ``down``; and with
    ``head="own"`` ``head`` [K, E, Vd], random, which the caller may set to the target's, and ``head_bias``
    [K, Vd] where the config has one. At first every other head repeats what the target's head says, the root.

    >>> network = heads_network(HeadsConfig(kind="medusa", width=8, vocab_size=11, num_heads=2))
    >>> jax.tree.map(jnp.shape, network.init(jax.random.key(0)))["heads"][1]
    {'blocks': {0: {'linear': {'bias': (8,), 'kernel': (8, 8)}}}}
    """
    bind = binder(config)

    def init(key: jax.Array) -> PyTree:
        return nnx.to_pure_dict(nnx.state(Heads(config, nnx.Rngs(params=key)), nnx.Param))

    def teach(
        weights: Weights, target: LanguageModel, target_params: PyTree, text: Text, num_tokens: int
    ) -> Float[Array, "B A K Vd"]:
        check(1 <= num_tokens <= config.num_heads, "num_tokens", f"1 to {config.num_heads}", num_tokens)
        net = bind(weights, target, target_params)
        before = jnp.clip(text.anchors - 1, 0, text.hidden.shape[1] - 1)
        known = (text.anchors > 0)[..., None]
        hidden = jnp.where(known, nets.along(text.hidden, before), 0).astype(net.dtype)
        if config.kind != "hydra":
            return net.at_once(hidden, num_tokens)
        laid = text.anchors[..., None] + jnp.arange(num_tokens, dtype=jnp.int32)[None, None]
        embedded = net.embed(take(text.tokens, laid.reshape(laid.shape[0], -1)))
        embedded = embedded.reshape(*laid.shape[:2], -1)  # of the root and the drafted tokens, side by side
        outputs = []
        for k in range(num_tokens):
            read = jnp.concatenate([hidden, embedded[..., : (k + 1) * config.width]], axis=-1)
            outputs.append(net.module.next(read, k))
        return net.logits(jnp.stack(outputs, -2))

    return Network(init, teach, (), config)
