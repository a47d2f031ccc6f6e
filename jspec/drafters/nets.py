"""What draft networks share: networks that read the target's hidden states and are trained to foresee it.

A network comes as two functions over one set of modules: the drafting method that the engine runs, and
`Network.teach`, which says what laws that method would draft from at given places of a known text. Training
differentiates the second; a test holds it against the first, position by position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec import sampling
from jspec.checks import at_least, between, instance
from jspec.models import ENDLESS
from jspec.models.layers import wide_product
from jspec.models.rotary import Rotary, rotary
from jspec.types import Block, Forward, LanguageModel, Prompt, PyTree, Verdict

#: Where a network's logits come from: the target's head; rows of it, those of a reduced vocabulary, gathered
#: once and frozen; or a head of its own, which is trained.
HeadKind = Literal["target", "rows", "own"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetConfig:
    """What every draft network is told: the sizes of its target, and its head. Hashable; never a dtype, which
    is that of the weights.

    Raises:
      ValueError: a size below 1, an unknown head, or a reduced vocabulary that does not go with it.
    """

    width: int  # E, the target's
    vocab_size: int  # V, the target's
    head: HeadKind = "target"
    draft_vocab: int | None = None  # Vd, columns of the head; None: all V

    def __post_init__(self) -> None:
        self.at_least_one(("width", "vocab_size"))
        if self.head not in ("target", "rows", "own"):
            raise ValueError(f"head: expected 'target', 'rows' or 'own', got {self.head!r}")
        if self.head == "target" and self.draft_vocab is not None:
            raise ValueError(f"draft_vocab: expected None with head='target', got {self.draft_vocab}")
        if self.head == "rows" and self.draft_vocab is None:
            raise ValueError("draft_vocab: expected a number with head='rows', got None")
        if not 1 <= self.columns <= self.vocab_size:
            raise ValueError(
                f"draft_vocab: expected 1 to {self.vocab_size} (vocab_size), got {self.draft_vocab}"
            )

    def check_layers(self, rope_theta: float, norm_eps: float) -> None:
        """Refuse a base of rotary positions below 1, or a norm's epsilon that is negative."""
        between(1, float("inf"), rope_theta=rope_theta)
        between(0, 1, norm_eps=norm_eps)

    def at_least_one(self, names: Iterable[str]) -> None:
        """Refuse sizes below 1; one that is None is left open."""
        at_least(1, **{name: getattr(self, name) for name in names})

    @property
    def columns(self) -> int:
        """Vd."""
        return self.vocab_size if self.draft_vocab is None else self.draft_vocab

    @property
    def own_head(self) -> tuple[int, ...]:
        """The shape of ``net["head"]`` with ``head="own"``."""
        return self.width, self.columns

    def check_target(self, config: Any) -> None:
        """Refuse a target that the network was not made for, by its config.

        Raises:
          ValueError: another width or vocabulary; with both numbers.
        """
        for name in ("width", "vocab_size"):
            expected, got = getattr(self, name), getattr(config, name, None)
            if got != expected:
                raise ValueError(f"target: expected {name} = {expected} as the network has, got {got}")


class Weights(NamedTuple):
    """Parameters of a draft network.

    ``head`` is None where the target's head is used, or the net's own, the kernel ``net["head"]`` [E, Vd],
    which is trained. ``ids`` are the target's ids of the head's columns, increasing; None: column i is
    token i.
    """

    net: PyTree
    head: Float[Array, "E Vd"] | None = None
    ids: Int[Array, " Vd"] | None = None


class Text(NamedTuple):
    """A known text and what the target shows of it, as `Network.teach` reads it.

    At an anchor a, the network is asked for the laws of tokens a + 1, a + 2, ... as if ``tokens[a]`` were
    the root of a round: it may read tokens up to a (and, for later laws, the drafted ones, which here are
    those of the text), and ``hidden`` and ``taps`` strictly before a, for the target has not run over its
    root yet.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, " B"]
    anchors: Int[Array, "B A"]
    hidden: Float[Array, "B T E"]
    taps: dict[int, Float[Array, "B T E"]]
    source: Int[Array, "B Ts"] | None = None  # an encoder-decoder's
    source_lengths: Int[Array, " B"] | None = None


class Network(NamedTuple):
    """A draft network. Static, and equal by config (made by a cached factory).

    ``init(key) -> net`` makes random parameters; ``teach(weights, target, target_params, text, num_tokens)
    -> logits [B, A, K, Vd]`` those of the K = ``num_tokens`` drafted tokens after each anchor, over the
    head's columns. ``taps`` are the target's layers it reads; none: the hidden state that the target's head
    reads.

    ``details``, if there is one, is called as ``teach`` and returns these logits and more that a loss may
    look at: "hidden" [B, A, K, E], what the net takes the target's hidden state to be where that law comes
    from (EAGLE's regression, arXiv 2401.15077); "confidence" [B, A, K], the logit of its being accepted
    (DSpark, arXiv 2607.05147).

    ``runs_target``: ``teach`` runs the target over the text itself (`run_over`), with rows of its own beside
    it, so stored hidden states would spare training nothing.
    """

    init: Callable[[jax.Array], PyTree]
    teach: Callable[..., Float[Array, "B A K Vd"]]
    taps: tuple[int, ...]
    config: Any
    details: Callable[..., tuple[Float[Array, "B A K Vd"], dict[str, Array]]] | None = None
    runs_target: bool = False


# --- what is read -----------------------------------------------------------------------------------


def features(taps: tuple[int, ...], shown: Forward | Text) -> Float[Array, "B N F"]:
    """The hidden states of ``taps`` side by side, or the last one: F = E * max(len(taps), 1)."""
    if not taps:
        return shown.hidden
    return jnp.concatenate([shown.taps[tap] for tap in taps], axis=-1)


def along(values: Float[Array, "B N F"], path: Int[Array, "B R"]) -> Float[Array, "B R F"]:
    """``values[b, path[b, d]]``: those of a verdict's nodes, depth by depth."""
    return jax.vmap(lambda row, at: row[at])(values, path)


def last(values: Float[Array, "B N F"], verdict: Verdict) -> Float[Array, "B F"]:
    """Those of the node that the last emitted token follows: of the last token before the next root."""
    at = jnp.maximum(verdict.num_emitted - 1, 0)
    node = jnp.take_along_axis(verdict.path, at[:, None], axis=1)
    return along(values, node)[:, 0]


def keep_finished(new: PyTree, old: PyTree, verdict: Verdict) -> PyTree:
    """``new``, and ``old`` in rows that emitted nothing; every leaf [B, ...]."""
    emits = verdict.num_emitted > 0
    return jax.tree.map(lambda a, b: jnp.where(emits.reshape(-1, *[1] * (a.ndim - 1)), a, b), new, old)


def run_over(target: LanguageModel, target_params: PyTree, text: Text) -> tuple[PyTree, Forward]:
    """An empty cache of the target (with an encoder's output in it), and its forward over a whole text: what
    the rows [B, T] of `Forward.rows` hold is what the engine commits."""
    prompt = Prompt(text.tokens, text.lengths, text.source, text.source_lengths)
    cache = target.start(target_params, prompt, 0)
    width = text.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], text.tokens.shape)
    return cache, target.extend(target_params, cache, Block(text.tokens, positions))


# --- the head ---------------------------------------------------------------------------------------


def logits(
    weights: Weights, target: LanguageModel, target_params: PyTree, hidden: Float[Array, "... E"]
) -> Float[Array, "... Vd"]:
    """Float32 logits over the head's columns."""
    kernel = weights.net.get("head") if weights.head is None else weights.head
    if kernel is None:
        # In the target's dtype: a product of two would convert the whole head at every call.
        return target.head(target_params, hidden.astype(dtype_of(target, target_params)))
    return wide_product(hidden, kernel.astype(hidden.dtype))


def spread(weights: Weights, logits: Float[Array, "... Vd"], vocab_size: int) -> Float[Array, "... V"]:
    """Logits over the target's vocabulary, from those over the head's columns: other tokens are impossible.

    >>> weights = Weights({}, jnp.ones((1, 2)), jnp.array([1, 3]))
    >>> (spread(weights, jnp.array([[5.0, 6.0]]), 4) > 0).tolist()
    [[False, True, False, True]]
    """
    if weights.ids is None:
        return logits
    full = jnp.full((*logits.shape[:-1], vocab_size), sampling.NEG_INF, logits.dtype)
    # The scatter wants columns first. XLA would have the head's product make them so, which its CPU backend
    # cannot for 16-bit factors and several rows (jaxlib 0.10.2: "Unsupported element type for DotThunk").
    logits = jax.lax.optimization_barrier(logits)
    return full.at[..., weights.ids].set(logits)


def rows_of_head(
    target: LanguageModel, target_params: PyTree, ids: Int[Array, " Vd"]
) -> Float[Array, "E Vd"]:
    """Columns of the target's head for a reduced vocabulary (FR-Spec, arXiv 2502.14856): a copy, for a gather
    at every step would cost more than it saves.

    Raises:
      ValueError: a head that is no linear map (a bias, a soft cap).
    """
    config = target.config
    if getattr(config, "head_bias", False) or getattr(config, "logit_softcap", None) is not None:
        raise ValueError(
            "head: expected 'target' or 'own' for a target whose head has a bias or a soft cap, got 'rows'"
        )
    dtype = dtype_of(target, target_params)
    return target.head(target_params, jnp.eye(config.width, dtype=dtype))[:, ids].astype(dtype)


def rope(theta: float, head_dim: int) -> Rotary:
    """Rotary positions of a net's own layers; they have no end."""
    return rotary({"rope_theta": theta}, head_dim, ENDLESS)[0]


def rope_base(config: Any) -> float | None:
    """The base of a target's rotary positions, from the ratio of its first frequencies, which most scalings
    leave alone; None without rotary positions, or where their ratios differ.

    >>> from jspec.testing import tiny_decoder
    >>> round(rope_base(tiny_decoder()[0].config))
    10000
    """
    rotary = getattr(config, "rotary", None)
    if rotary is None or len(rotary.frequencies) < 2:
        return None
    ratios = np.divide(rotary.frequencies[1:3], rotary.frequencies[: len(rotary.frequencies[1:3])])
    if np.ptp(ratios) > 1e-4 * ratios[0]:
        return None
    return float(ratios[0] ** -len(rotary.frequencies))


def rope_of(config: Any) -> dict[str, float]:
    """``rope_theta`` as a target's config has it, to four digits; {} where it has none."""
    base = rope_base(config)
    return {} if base is None else {"rope_theta": float(f"{base:.4g}")}


def dtype_of(target: LanguageModel, target_params: PyTree) -> jnp.dtype:
    """What the target computes in: the dtype of its embeddings (norms are float32 in any model)."""
    return jax.eval_shape(target.embed, target_params, jnp.zeros((1, 1), jnp.int32)).dtype


def given(network: Network, weights: Weights) -> Any:
    """The config of what a factory is given.

    Raises:
      ValueError: no network, or no weights.
    """
    instance(Network, "a draft network, as `jspec.drafters.kinds` makes them", network=network)
    instance(Weights, "a Weights of jspec.drafters.nets", weights=weights)
    return network.config


def check_weights(config: NetConfig, weights: Weights) -> None:
    """Refuse weights of another head than the config's.

    Raises:
      ValueError: head or ids missing, left over or of another shape.
    """
    wanted = {
        "head": (config.width, config.columns) if config.head == "rows" else None,
        'net["head"]': config.own_head if config.head == "own" else None,
        "ids": None if config.draft_vocab is None else (config.draft_vocab,),
    }
    given = {"head": weights.head, 'net["head"]': weights.net.get("head"), "ids": weights.ids}
    for name, expected in wanted.items():
        got = None if given[name] is None else tuple(given[name].shape)
        if got != expected:
            raise ValueError(
                f"weights.{name}: expected {expected} with head={config.head!r} and "
                f"draft_vocab={config.draft_vocab}, got {got}"
            )
