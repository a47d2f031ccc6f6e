"""Multi-token prediction: modules that foresee more than the next token, on top of the target's trunk."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters import nets, recurrent
from jspec.drafters.autoregressive import Continue
from jspec.drafters.beam import TreeSettings
from jspec.drafters.nets import Network, Weights
from jspec.drafters.pairs import Recurrence, RecurrentConfig
from jspec.models import cache as kv
from jspec.models.attention import block_mask
from jspec.models.layers import Linear, Norm
from jspec.types import Block, Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpConfig(RecurrentConfig):
    """DeepSeek-V3's module (arXiv 2412.19437, section 2.2): ``M [norm E(x); norm h] -> layers``, then a norm
    before the target's head. One module is used again at every step, on its own output (FastMTP, arXiv
    2509.18362). h is what the target's head reads. The halves stand in the order of the released code; the
    paper has h first."""

    feed_normed: bool = False  # later steps read the output behind the last norm (MiMo)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpHeadsConfig(RecurrentConfig):
    """Meta's independent heads (Gloeckle et al., arXiv 2404.19737, section 2): ``num_layers`` layers side by
    side on the target's trunk, layer k for the k-th token after the root, and one norm behind all of them.
    The target's own last layer, which gives the root, is the first of their n heads.

    Raises:
      ValueError: as for `RecurrentConfig`; a negative tap.
    """

    tap: int | None = None  # the trunk's output: the input of this layer; None: what the target's head reads

    def __post_init__(self) -> None:
        if self.tap is not None and self.tap < 0:
            raise ValueError(f"tap: expected a layer of the target or None, got {self.tap}")
        super().__post_init__()

    @property
    def longest(self) -> int | None:
        """One token a layer."""
        return self.num_layers


class Mtp(Recurrence):
    """The shared module: ``embedding_norm``, ``hidden_norm``, ``projection`` (M), ``stack`` and, with
    ``head="own"``, ``head``."""

    def __init__(self, config: MtpConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.embedding_norm, self.hidden_norm = (Norm(config.width, config.decoder) for _ in range(2))
        self.projection = Linear(2 * config.width, config.width, bias=False, rngs=rngs)

    def join(self, embedded: Float[Array, "B N E"], carried: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        """See `Recurrence.join`."""
        both = [self.embedding_norm(embedded), self.hidden_norm(carried)]
        return self.projection(jnp.concatenate(both, axis=-1))


class MtpHeads(Recurrence):
    """Independent heads: ``stack``, whose layers all read the trunk, and, with ``head="own"``, ``head``. g is
    [K, E]: one output a head, of the last position the target has run over."""

    feeds_back = False

    def join(self, embedded: Float[Array, "B N E"], carried: Float[Array, "B N E"]) -> Float[Array, "B N E"]:
        """The trunk alone: the heads know nothing of the tokens after it, the root included."""
        return carried

    def read(self, g: Float[Array, "*n K E"], step: Int[Array, ""] | int) -> Float[Array, "*n E"]:
        """The output of head ``step``."""
        return super().read(jax.lax.dynamic_index_in_dim(g, step, axis=-2, keepdims=False), 0)

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of one g."""
        return (self.stack.config.num_layers, self.stack.config.width)

    def extend(
        self,
        cache: kv.Cache,
        x: Float[Array, "B N E"],
        positions: Int[Array, "B N"],
        mask: Bool[Array, "B N P+N"] | None = None,
        pending: kv.Rows | None = None,
    ) -> tuple[Float[Array, "B N K E"], kv.Rows]:
        """See `Recurrence.extend`. No head has pending rows: none reads a draft."""
        stack = self.stack
        c = stack.config
        block = Block(jnp.full_like(positions, -1), positions, mask)
        mask = block_mask(block, None)
        assert c.rotary is not None
        seen, angles = stack.see(cache, block, mask, positions)[None], c.rotary.angles(positions)
        outputs, keys, values = [], [], []
        for i, layer in enumerate(stack.layers):
            y, (k, v) = layer(x, (cache.keys[i], cache.values[i]), None, seen, angles)
            outputs.append(y)
            keys.append(k)
            values.append(v)
        g = jnp.stack(outputs, axis=2)
        # Never true; see `Stack.run`: writes to the cache must depend on everything that read it.
        positions = jnp.where((g[:, -1:, :, 0] > jnp.inf).any(-1), -1, positions)
        return g, kv.Rows(tuple(keys), tuple(values), positions)


def _kind(config: object) -> tuple[type[Recurrence], tuple[int, ...]]:
    if isinstance(config, MtpHeadsConfig):
        return MtpHeads, () if config.tap is None else (config.tap,)
    if isinstance(config, MtpConfig):
        return Mtp, ()
    raise ValueError(f"config: expected an MtpConfig or an MtpHeadsConfig, got {type(config).__name__}")


@functools.cache
def mtp_network(config: MtpConfig | MtpHeadsConfig) -> Network:
    """The network of an architecture. Cached: equal configs give the same object.

    >>> mtp_network(MtpHeadsConfig(width=8, vocab_size=11, head_dim=4, num_layers=3, tap=1)).taps
    (1,)

    Raises:
      ValueError: another family's config.
    """
    kind, taps = _kind(config)
    return recurrent.network(kind, config, taps)


def mtp(
    network: Network,
    weights: Weights,
    num_tokens: int = 3,
    *,
    sample: bool = True,
    proceed: Continue | None = None,
    tree: TreeSettings | None = None,
) -> Drafter:
    """Draft with the modules of multi-token prediction: one that is used again and again, or one a token.

    Lossless in law with any lossless rule: chains are drawn from q, trees are chosen. With `MtpConfig` every
    drafted token after the first costs one pass of the module; with `MtpHeadsConfig` none does, and the
    drafted tokens do not know of each other. One more pass absorbs each round.

    Args:
      network: of `mtp_network`.
      weights: its parameters; with a reduced vocabulary q = 0 outside of ``weights.ids`` (FastMTP's
        compressed vocabulary is ``head="rows"``).
      num_tokens: the longest draft of a chain; with `MtpHeadsConfig` at most ``num_layers``.
      sample: draw the chain from q under the sampler of the request, or take its argmax.
      proceed: `confidence(threshold)` or `entropy_bound(threshold)`: a chain stops earlier where they fail.
      tree: EAGLE-2's dynamic tree instead of a chain; ``num_tokens`` and ``sample`` do not matter then.
    Raises:
      ValueError: ``num_tokens`` out of its range; another network; weights of another head; an impossible
        tree; a tree and ``proceed``; a target of another width or vocabulary (when first run).

    Reference: DeepSeek-AI, arXiv 2412.19437; Cai et al., arXiv 2509.18362 (FastMTP); Gloeckle et al., arXiv
    2404.19737 (independent heads).
    """
    kind, _ = _kind(nets.given(network, weights))
    return recurrent.drafter(kind, network, weights, num_tokens, sample, proceed, tree)
