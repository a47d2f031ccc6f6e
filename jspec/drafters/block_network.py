"""A network that fills a whole block in one forward: DFlash, DSpark and the causal block.

The block is ``[root, mask, mask, ...]`` at positions a, a + 1, ... Each layer's keys and values are those of
the block's rows and those of the context: hidden states of the target at tokens 0 to a - 1, fused into one
vector a token and projected by the layer's own key and value maps ("injected"). Nothing is computed for the
context but these projections, so they can be kept in a cache, and a round adds those of its new tokens only.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.checks import at_least
from jspec.drafters import nets
from jspec.drafters.common import take
from jspec.drafters.nets import NetConfig, Network, Text, Weights, rope
from jspec.models import ENDLESS
from jspec.models import cache as kv
from jspec.models.attention import attend, see_cache, see_rows
from jspec.models.decoder import DecoderConfig
from jspec.models.layers import Layer, Linear, Norm, wide_product
from jspec.models.rotary import rotate
from jspec.types import LanguageModel, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig(NetConfig):
    """The architecture. The defaults are DFlash's; `block_config` fills it in for a target.

    Raises:
      ValueError: as for `NetConfig`; an odd ``head_dim``, ``num_kv_heads`` that do not divide the heads, or
        taps that do not increase from 0 on.
    """

    taps: tuple[int, ...]  # layers of the target that are read; none: what its head reads
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rope_theta: float = 10_000.0
    qk_norm: bool = True
    norm_eps: float = 1e-6
    window: int | None = None  # tokens seen, a row itself included; None: all
    causal: bool = False  # rows of the block see those before them only
    anchor_predicts: bool = False  # the root's row says the first token; else each mask says its own
    markov_rank: int = 0  # of a bias by the token before; 0: none
    confidence: bool = False  # a head that foresees acceptance

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "taps", tuple(self.taps))
        self.at_least_one(("num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_width"))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads: expected a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )
        self.check_layers(self.rope_theta, self.norm_eps)
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number (rotary positions), got {self.head_dim}")
        if tuple(sorted(set(self.taps))) != self.taps or (self.taps and self.taps[0] < 0):
            raise ValueError(f"taps: expected increasing layers of the target, got {self.taps}")
        at_least(1, window=self.window)
        at_least(0, markov_rank=self.markov_rank)

    @property
    def layer(self) -> DecoderConfig:
        """What a layer is made from."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            width=self.width,
            mlp_width=self.mlp_width,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            context_length=ENDLESS,
            rotary=rope(self.rope_theta, self.head_dim),
            qk_norm=self.qk_norm,
            norm_eps=self.norm_eps,
        )


Kind = Literal["dflash", "dspark", "causal"]
KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"anchor_predicts": True, "markov_rank": 256, "confidence": True},
    "causal": {"causal": True},
}


def tap_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """The taps of a target of ``num_layers`` layers, fewer than ``count`` if it is shallow.

    DFlash reads the outputs of layers round(linspace(1, L - 3, count)), which are the inputs of those that
    follow. (A target of 36 layers and count 5: outputs of layers 1, 9, 17, 25, 33.)

    >>> tap_layers(36, 5), tap_layers(2, 5), tap_layers(1, 2)
    ((2, 10, 18, 26, 34), (2,), (1,))
    """
    first = min(1, num_layers - 1)
    last = max(num_layers - 3, first)
    layers = [first + i * (last - first) / max(count - 1, 1) for i in range(count)]
    if count == 1:
        layers = [num_layers // 2]
    return tuple(sorted({min(round(layer) + 1, num_layers) for layer in layers}))


def block_config(
    target: Any, kind: Kind = "dflash", *, num_layers: int = 5, num_taps: int = 5, **settings: Any
) -> BlockConfig:
    """The block network of a published kind for a target's config. Its layers have the sizes and the
    rotary base of the target's; norms of queries and keys, biases and epsilon are DFlash's own.

    ``settings`` are fields of `BlockConfig`. "dflash": a bidirectional block (a `markov_rank` makes it
    semi-autoregressive); "dspark": the root's row predicts, too, with a Markov head of rank 256 and a
    confidence head; "causal": a causal block, for trees (JetSpec).

    >>> from jspec.testing import tiny_decoder
    >>> config = block_config(tiny_decoder()[0].config, "dspark", num_layers=1)
    >>> config.taps, config.markov_rank, config.causal
    ((2,), 256, False)

    Raises:
      ValueError: an unknown kind, or what `BlockConfig` refuses.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected {', '.join(KINDS)}, got {kind!r}")
    at_least(0, num_taps=num_taps)
    shape = {
        "width": target.width,
        "vocab_size": target.vocab_size,
        "taps": tap_layers(target.num_layers, num_taps) if num_taps else (),
        "num_layers": num_layers,
        "num_heads": target.num_heads,
        "num_kv_heads": getattr(target, "num_kv_heads", target.num_heads),
        "head_dim": target.head_dim,
        "mlp_width": target.mlp_width,
        **nets.rope_of(target),
    }
    return BlockConfig(**(shape | KINDS[kind] | settings))


class BlockNet(nnx.Module):
    """Fusion, layers, and the two small heads."""

    def __init__(self, config: BlockConfig, rngs: nnx.Rngs):
        self.config = c = config
        self.shape = shape = c.layer
        self.fuse = Linear(c.width * max(len(c.taps), 1), c.width, bias=False, rngs=rngs)
        self.context_norm = Norm(c.width, shape)
        self.mask = nnx.Param(jax.random.normal(rngs.params(), (c.width,)) * c.width**-0.5)
        self.layers = nnx.List([Layer(shape, rngs) for _ in range(c.num_layers)])
        self.norm = Norm(c.width, shape)
        own = (c.width, c.columns)
        normal = jax.random.normal
        self.head = nnx.Param(normal(rngs.params(), own) * c.width**-0.5) if c.head == "own" else None
        # The bias starts at 0: with a Markov head, a network begins as what it would be without one.
        rank = c.markov_rank
        self.previous = nnx.Param(normal(rngs.params(), (c.vocab_size, rank)) * rank**-0.5) if rank else None
        self.markov = nnx.Param(jnp.zeros((rank, c.columns))) if rank else None
        self.confidence = Linear(c.width + rank, 1, bias=True, rngs=rngs) if c.confidence else None

    @property
    def dtype(self) -> Any:
        """That of the keys and values, and of all rows."""
        return self.mask[...].dtype

    def context(self, features: Float[Array, "B N F"], positions: Int[Array, "B N"]) -> kv.Rows:
        """Keys and values of the context in every layer, from what the target shows at ``positions``."""
        x = self.context_norm(self.fuse(features.astype(self.dtype)))
        assert self.shape.rotary is not None
        angles = self.shape.rotary.angles(positions)
        keys, values = [], []
        for layer in self.layers:
            attention = layer.attention
            k, v = (
                linear(x).reshape(*x.shape[:2], -1, self.config.head_dim)
                for linear in (attention.key, attention.value)
            )
            keys.append(rotate(k if attention.key_norm is None else attention.key_norm(k), angles))
            values.append(v)
        return kv.Rows(tuple(keys), tuple(values), positions)

    def inputs(
        self, target: LanguageModel, target_params: PyTree, tokens: Int[Array, "B A n"]
    ) -> Float[Array, "B A n E"]:
        """The target's embeddings of the tokens, and the mask's vector where a token is -1."""
        batch, _, _ = tokens.shape
        x = target.embed(target_params, jnp.maximum(tokens, 0).reshape(batch, -1)).astype(self.dtype)
        return jnp.where(
            (tokens < 0)[..., None], self.mask[...][None, None, None], x.reshape(*tokens.shape, -1)
        )

    def __call__(
        self,
        x: Float[Array, "B A n E"],
        keys: tuple[Float[Array, "B K S h"], ...],
        values: tuple[Float[Array, "B K S h"], ...],
        anchors: Int[Array, "B A"],
    ) -> Float[Array, "B A n E"]:
        """What the head reads, of A blocks a row that share one context: the block with its root at position
        a sees context slots 0 to a - 1 (strictly before the root) and its own rows. One block a row when
        drafting, many in training.
        """
        c, scale = self.config, self.shape.score_scale
        batch, blocks, n, _ = x.shape
        positions = anchors[..., None] + jnp.arange(n, dtype=jnp.int32)[None, None]
        assert self.shape.rotary is not None
        angles = self.shape.rotary.angles(positions.reshape(batch, -1))
        own = jnp.tril(jnp.ones((n, n), bool)) if c.causal else jnp.ones((n, n), bool)
        own = jnp.broadcast_to(own[None], (batch, n, n))

        def heads(linear: Linear, norm: Norm | None, y: Array, *, turn: bool) -> Array:
            y = linear(y).reshape(batch, blocks * n, -1, c.head_dim)
            y = y if norm is None else norm(y)
            y = rotate(y, angles) if turn else y
            return y.reshape(batch, blocks, n, -1, c.head_dim)

        for i, layer in enumerate(self.layers):
            attention = layer.attention
            cached = (keys[i], values[i])

            # No parameters inside: under vmap, the gradient of one would be a copy a block.
            def look(
                q: Array, k: Array, v: Array, at: Array, positions: Array, cached: tuple = cached
            ) -> Float[Array, "B n H*h"]:
                seen = see_cache(cached[0].shape[2], at, positions, c.window)
                return attend(q, cached, (k, v), seen, see_rows(own, positions, positions, c.window), scale)

            assert layer.attention_norm is not None
            assert layer.mlp_norm is not None
            y = layer.attention_norm(x)
            q = heads(attention.query, attention.query_norm, y, turn=True)
            k = heads(attention.key, attention.key_norm, y, turn=True)
            v = heads(attention.value, None, y, turn=False)
            x = x + attention.out(jax.vmap(look, in_axes=1, out_axes=1)(q, k, v, anchors, positions))
            x = x + layer.mlp(layer.mlp_norm(x))
        return self.norm(x)

    def predicting(self, hidden: Float[Array, "B A n E"]) -> Float[Array, "B A K E"]:
        """The rows that predict: all n = K, or all but the root's, n = K + 1 (`block_width`)."""
        return hidden if self.config.anchor_predicts else hidden[:, :, 1:]

    def bias(self, previous: Int[Array, "*n"]) -> Float[Array, "*n Vd"] | None:
        """What the token before adds to the logits: ``W2 W1[x]``."""
        if self.previous is None or self.markov is None:
            return None
        rows = self.previous[...].at[previous].get(mode="clip")
        return wide_product(rows, self.markov[...])

    def foresee(self, hidden: Float[Array, "*n E"], previous: Int[Array, "*n"]) -> Float[Array, "*n"]:
        """Logits of acceptance: ``w [h_k; W1[x_{k-1}]] + b``, float32."""
        assert self.confidence is not None
        if self.previous is not None:
            hidden = jnp.concatenate([hidden, self.previous[...].at[previous].get(mode="clip")], axis=-1)
        return self.confidence(hidden)[..., 0].astype(jnp.float32)


def block_width(config: BlockConfig, num_tokens: int) -> int:
    """Rows of the block that drafts ``num_tokens``."""
    return num_tokens if config.anchor_predicts else num_tokens + 1


@functools.cache
def _graphdef(config: BlockConfig) -> Any:
    return nnx.graphdef(nnx.eval_shape(lambda: BlockNet(config, nnx.Rngs(0))))


def block_net(config: BlockConfig, net: PyTree) -> BlockNet:
    """The module with these weights."""
    return nnx.merge(_graphdef(config), net)


def teach_both(
    network: Network,
    weights: Weights,
    target: LanguageModel,
    target_params: PyTree,
    text: Text,
    num_tokens: int,
) -> tuple[Float[Array, "B A K Vd"], Float[Array, "B A K"] | None]:
    """What `Network.teach` returns, and beside it the logits of the confidence head (None without one).

    ``sigmoid`` of the latter at k foresees the acceptance of token k given that those before it are
    accepted; DSpark trains it towards ``sum_x min(p, q) = 1 - |p - q|_1 / 2`` with a binary cross-entropy.
    """
    config: BlockConfig = network.config
    net = block_net(config, weights.net)
    batch, length = text.tokens.shape
    num_anchors = text.anchors.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], (batch, length))
    rows = net.context(nets.features(config.taps, text), positions)
    keys, values = (tuple(x.swapaxes(1, 2) for x in side) for side in (rows.keys, rows.values))
    # The root and the tokens that come before each drafted one: x_a, x_{a+1}, ...
    steps = jnp.arange(num_tokens, dtype=jnp.int32)[None, None]
    previous = take(text.tokens, (text.anchors[..., None] + steps).reshape(batch, -1))
    previous = previous.reshape(batch, num_anchors, num_tokens)
    masks = ((0, 0), (0, 0), (0, block_width(config, num_tokens) - 1))
    x = net.inputs(target, target_params, jnp.pad(previous[..., :1], masks, constant_values=-1))
    hidden = net.predicting(net(x, keys, values, text.anchors))
    logits = nets.logits(weights, target, target_params, hidden)
    bias = net.bias(previous)
    logits = logits if bias is None else logits + bias
    return logits, net.foresee(hidden, previous) if config.confidence else None


@functools.cache
def block_network(config: BlockConfig) -> Network:
    """The network of a config, the same object for equal ones.

    ``net`` is a nested dict: ``fuse``, ``context_norm``, ``mask`` [E], ``layers[i]`` as a decoder's,
    ``norm``, and where the config has them ``head`` [E, Vd], ``previous`` [V, r] and ``markov`` [r, Vd]
    (W1, W2), ``confidence``.

    References: DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147; JetSpec, arXiv 2606.18394.
    """

    def init(key: jax.Array) -> PyTree:
        return nnx.to_pure_dict(nnx.state(BlockNet(config, nnx.Rngs(params=key)), nnx.Param))

    def teach(
        weights: Weights, target: LanguageModel, target_params: PyTree, text: Text, num_tokens: int
    ) -> Float[Array, "B A K Vd"]:
        return teach_both(network, weights, target, target_params, text, num_tokens)[0]

    def details(*arguments: Any) -> tuple[Float[Array, "B A K Vd"], dict[str, Any]]:
        logits, confidence = teach_both(network, *arguments)
        return logits, {"confidence": confidence}

    network = Network(init, teach, config.taps, config, details if config.confidence else None)
    return network
