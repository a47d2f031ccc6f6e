"""EAGLE: one layer that foresees the target's hidden states, and drafts from them."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jspec.drafters import nets, recurrent
from jspec.drafters.autoregressive import Continue
from jspec.drafters.beam import TreeSettings
from jspec.drafters.nets import Network, Weights
from jspec.drafters.pairs import Recurrence, RecurrentConfig
from jspec.models.decoder import DecoderConfig
from jspec.models.layers import Attention, Dropout, Layer, Linear, Memory, Norm, Seen
from jspec.models.rotary import Angles
from jspec.types import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig(RecurrentConfig):
    """EAGLE-1 (arXiv 2401.15077), whose weights EAGLE-2 uses unchanged: ``fc [E(x); f] -> layers``, f what
    the target's head reads. As in the released code, no norm stands before the first attention or behind
    the last layer, so that the output can be compared with f itself."""

    bias: bool = True  # of fc


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config(RecurrentConfig):
    """EAGLE-3 (arXiv 2503.01840): ``fc [tapped layers] = f``; attention reads ``[norm E(x); norm f]``; the
    residual is f alone; a norm before the head. The first two switches are EAGLE-3.1's, the third is that of
    checkpoints by vllm-project/speculators.

    Raises:
      ValueError: as for `RecurrentConfig`; taps that do not increase from 0 on, or none.
    """

    taps: tuple[int, ...]  # the target's layers, by their inputs: `eagle3_taps` proposes three
    fc_norm: bool = False  # a norm on each tapped layer before fc
    feed_normed: bool = False  # later steps read the output behind the norm
    normed_residual: bool = False  # the residual is norm f

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise ValueError(f"taps: expected increasing layers of the target, got {self.taps}")
        super().__post_init__()


def eagle3_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high: the inputs of layers 2, L // 2 and L - 3, or of three evenly spread ones where
    these are not in that order.

    >>> eagle3_taps(32), eagle3_taps(4), eagle3_taps(2), eagle3_taps(1)
    ((2, 16, 29), (1, 2, 3), (0, 1, 2), (0, 1))
    """
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        taps = (num_layers // 4, num_layers // 2, num_layers - num_layers // 4)
    return tuple(dict.fromkeys(taps))


class Eagle(Recurrence):
    """The module of EAGLE-1: ``fc``, ``stack`` and, with ``head="own"``, ``head``."""

    def __init__(self, config: EagleConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.fc = Linear(2 * config.width, config.width, bias=config.bias, rngs=rngs)
        self.stack.layers[0].attention_norm = None
        self.stack.norm = None

    def join(self, embedded: Float[Array, "B N E"], carried: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        """See `Recurrence.join`."""
        return self.fc(jnp.concatenate([embedded, carried], axis=-1))


class PairLayer(Layer):
    """A layer over [E(x); f], 2E wide, whose attention reads both halves, and whose residual is f or, with
    ``normed_residual``, norm f."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, normed_residual: bool = False):
        super().__init__(config, rngs)
        self.normed_residual = normed_residual
        self.attention = Attention(config, rngs, inputs=2 * config.width)
        self.embedding_norm = Norm(config.width, config)

    def __call__(
        self,
        x: Float[Array, "B N 2E"],
        cached: tuple[Array, Array],
        pending: tuple[Array, Array] | None,
        seen: Seen,
        angles: Angles | None,
        memory: Memory | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Float[Array, "B N E"], tuple[Array, Array]]:
        """See `Layer`."""
        assert self.attention_norm is not None
        assert self.mlp_norm is not None
        embedded, carried = jnp.split(x, 2, axis=-1)
        normed = self.attention_norm(carried)
        both = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        y, rows = self.attention(both, cached, pending, seen, angles)
        x = (normed if self.normed_residual else carried) + y
        return x + self.mlp(self.mlp_norm(x)), rows


class Eagle3(Recurrence):
    """The module of EAGLE-3: ``fc``, ``fc_norm`` (a list, with `Eagle3Config.fc_norm`), ``stack``, whose
    layer 0 is a `PairLayer`, and, with ``head="own"``, ``head``."""

    def __init__(self, config: Eagle3Config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.stack.layers[0] = PairLayer(config.decoder, rngs, config.normed_residual)
        self.fc = Linear(len(config.taps) * config.width, config.width, bias=False, rngs=rngs)
        norms = [Norm(config.width, config.decoder) for _ in config.taps]
        self.fc_norm = nnx.List(norms) if config.fc_norm else None

    def fuse(self, features: Float[Array, "B N F"]) -> Float[Array, "B N E"]:
        """See `Recurrence.fuse`."""
        features = features.astype(self.dtype)
        if self.fc_norm is not None:
            chunks = jnp.split(features, len(self.fc_norm), axis=-1)
            features = jnp.concatenate(
                [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], axis=-1
            )
        return self.fc(features)

    def join(self, embedded: Float[Array, "B N E"], carried: Float[Array, "B N E"]) -> Float[Array, "B N 2E"]:
        """See `Recurrence.join`."""
        return jnp.concatenate([embedded, carried], axis=-1)


def _kind(config: object) -> tuple[type[Recurrence], tuple[int, ...]]:
    if isinstance(config, Eagle3Config):
        return Eagle3, config.taps
    if isinstance(config, EagleConfig):
        return Eagle, ()
    raise ValueError(f"config: expected an EagleConfig or an Eagle3Config, got {type(config).__name__}")


@functools.cache
def eagle_network(config: EagleConfig | Eagle3Config) -> Network:
    """The network of an architecture. Cached: equal configs give the same object.

    >>> network = eagle_network(Eagle3Config(width=8, vocab_size=11, head_dim=4, taps=(0, 1, 2)))
    >>> import jax
    >>> jax.eval_shape(network.init, jax.random.key(0))["stack"]["layers"][0]["attention"]["query"]
    {'kernel': ShapeDtypeStruct(shape=(16, 8), dtype=float32)}

    Raises:
      ValueError: another family's config.
    """
    kind, taps = _kind(config)
    return recurrent.network(kind, config, taps)


def eagle(
    network: Network,
    weights: Weights,
    num_tokens: int = 5,
    *,
    sample: bool = True,
    proceed: Continue | None = None,
    tree: TreeSettings | None = None,
) -> Drafter:
    """Draft with a layer that foresees the target's hidden states from its own guesses of them.

    Lossless in law with any lossless rule: chains are drawn from q, trees are chosen. Every drafted token
    after the first costs one pass of the network; one more absorbs each round. The state is the network's
    cache, one pair (feature, next token) a position.

    Args:
      network: of `eagle_network`.
      weights: its parameters; with a reduced vocabulary q = 0 outside of ``weights.ids``.
      num_tokens: the longest draft of a chain.
      sample: draw the chain from q under the sampler of the request, or take its argmax.
      proceed: `confidence(threshold)` or `entropy_bound(threshold)`: a chain stops earlier where they fail.
      tree: EAGLE-2's dynamic tree instead of a chain; ``num_tokens`` and ``sample`` do not matter then.
    Raises:
      ValueError: ``num_tokens`` < 1; another network; weights of another head; an impossible tree; a tree
        and ``proceed``; a target of another width or vocabulary (when first run).

    Reference: Li et al., arXiv 2401.15077, 2406.16858 (tree) and 2503.01840 (EAGLE-3).
    """
    kind, _ = _kind(nets.given(network, weights))
    return recurrent.drafter(kind, network, weights, num_tokens, sample, proceed, tree)
