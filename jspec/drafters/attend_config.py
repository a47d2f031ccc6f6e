"""Sizes of the networks that look at the target's keys and values (`jspec.drafters.attend_nets`)."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, Literal

from jspec.checks import at_least
from jspec.drafters.nets import NetConfig, rope, rope_of
from jspec.models import ENDLESS
from jspec.models.decoder import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttendConfig(NetConfig, abc.ABC):
    """What both nets are told besides. `attend_config` fills it in for a target.

    Raises:
      ValueError: as for `NetConfig`; no layers, or negative ones.
    """

    layers: tuple[int, ...]  # of the target: whose keys and values each layer of the net looks at
    target_heads: int  # H of the target, and of the queries
    target_head_dim: int
    mlp_width: int
    query_norm: bool = False  # for a target that normalises its keys
    relative_buckets: int = 0  # of a bias by distance, for keys that hold no positions (T5); 0: none
    relative_distance: int = 128
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(self.layers))
        self.at_least_one(("target_heads", "target_head_dim", "mlp_width"))
        if not self.layers or min(self.layers) < 0:
            raise ValueError(f"layers: expected layers of the target, from 0 on, got {self.layers}")
        at_least(0, relative_buckets=self.relative_buckets)
        self.check_layers(1.0, self.norm_eps)

    @property
    @abc.abstractmethod
    def decoder(self) -> DecoderConfig:
        """Sizes of the net's layers, as their parts take them."""

    def check_target(self, config: Any) -> None:
        """Refuse a target that the net was not made for.

        Raises:
          ValueError: another width, vocabulary or shape of keys, or too few layers; with both numbers.
        """
        super().check_target(config)
        for mine, name in (("target_heads", "num_heads"), ("target_head_dim", "head_dim")):
            expected, got = getattr(self, mine), getattr(config, name, None)
            if got != expected:
                raise ValueError(f"target: expected {name} = {expected} as the network has, got {got}")
        if max(self.layers) >= config.num_layers:
            raise ValueError(
                f"target: expected more than {max(self.layers)} layers, which the network looks at, "
                f"got {config.num_layers}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlideConfig(AttendConfig):
    """GLIDE (arXiv 2402.02082): a small decoder over the target's embeddings, whose layers look at the target
    between self-attention and perceptron. In the paper, all of them at the target's last layer.

    Raises:
      ValueError: as for `AttendConfig`; an odd ``head_dim``, or ``num_kv_heads`` that do not divide the
        heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one(("num_heads", "num_kv_heads"))
        self.check_layers(self.rope_theta, self.norm_eps)
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number (rotary positions), got {self.head_dim}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads = {self.num_heads}, got {self.num_kv_heads}"
            )

    @property
    def decoder(self) -> DecoderConfig:
        """See `AttendConfig.decoder`."""
        sizes = (self.width, self.num_heads, self.num_kv_heads, self.head_dim)
        return _sizes(self, *sizes, rotary=rope(self.rope_theta, self.head_dim))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantConfig(AttendConfig):
    """The layout of Gemma 4's assistant: no keys and values of its own at all::

        x = pre_projection [E(token); h] -> layers -> norm -> y        h of the next step = post_projection y

    with h the target's last hidden state before the root at first. All steps stand at the root's position.
    ``head="own"`` reads y, [inner, Vd], as Gemma's small head does; the others read post_projection y.

    Raises:
      ValueError: as for `AttendConfig`.
    """

    inner: int  # width of the layers

    def __post_init__(self) -> None:
        self.at_least_one(("inner",))
        super().__post_init__()

    @property
    def own_head(self) -> tuple[int, ...]:
        """See `NetConfig.own_head`."""
        return self.inner, self.columns

    @property
    def decoder(self) -> DecoderConfig:
        """See `AttendConfig.decoder`; there is no self-attention."""
        return _sizes(self, self.inner, 1, 1, 2, sinusoidal=True)


def _sizes(
    c: AttendConfig, width: int, heads: int, kv_heads: int, head_dim: int, **positions: Any
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=c.vocab_size,
        width=width,
        mlp_width=c.mlp_width,
        num_layers=len(c.layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=ENDLESS,
        norm_eps=c.norm_eps,
        **positions,
    )


def decoder_of(target: Any) -> DecoderConfig:
    """The decoder in a target's config: an encoder-decoder's, or all of it."""
    return getattr(target, "decoder", target)


def attend_config(
    target: Any, kind: Literal["glide", "assistant"] = "glide", *, num_layers: int | None = None, **more: Any
) -> GlideConfig | AssistantConfig:
    """The network of a published kind for a target's config, its sizes the target's.

    ``more`` are fields of `GlideConfig` or `AssistantConfig`. "glide": one layer, which looks at the target's
    last one. "assistant": four of half the width; as in Gemma 4, the last one looks at the target's last
    layer that sees everything, the others at its last windowed layer (where there is none, at the same one).

    >>> from jspec.testing import tiny_decoder
    >>> attend_config(tiny_decoder(num_layers=4, windows=(8, 8, 8, None))[0].config, "assistant").layers
    (2, 2, 2, 3)

    Raises:
      ValueError: an unknown kind, or what the config refuses.
    """
    if kind not in ("glide", "assistant"):
        raise ValueError(f"kind: expected glide or assistant, got {kind!r}")
    c = decoder_of(target)
    count = (1 if kind == "glide" else 4) if num_layers is None else num_layers
    every = range(c.num_layers)
    whole = [i for i in every if c.window(i) is None] or list(every)
    local = [i for i in every if c.window(i) is not None] or whole
    given: dict[str, Any] = {
        "width": c.width,
        "vocab_size": c.vocab_size,
        "target_heads": c.num_heads,
        "target_head_dim": c.head_dim,
        "query_norm": c.qk_norm,
        "norm_eps": c.norm_eps,
    }
    if c.relative is not None:
        given |= {"relative_buckets": c.relative.buckets, "relative_distance": c.relative.distance}
    if kind == "assistant":
        inner = more.get("inner", max(c.width // 2, 1))
        layers = (local[-1],) * (count - 1) + (whole[-1],)
        own: dict[str, Any] = {"layers": layers, "inner": inner, "mlp_width": 4 * inner}
        return AssistantConfig(**(given | own | more))
    heads: dict[str, Any] = {"num_heads": c.num_heads, "num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
    own = {"layers": (c.num_layers - 1,) * count, "mlp_width": c.mlp_width} | rope_of(c)
    return GlideConfig(**(given | own | heads | more))
