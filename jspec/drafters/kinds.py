"""The kinds of draft networks by name, and their settings as plain values.

A family adds one line to `KINDS`; training, stored drafters and the command line find it there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pydantic

from jspec.drafters.attend import AssistantConfig, GlideConfig, attend, attend_config, attend_network
from jspec.drafters.block import block, block_tree
from jspec.drafters.block_network import BlockConfig, block_config, block_network
from jspec.drafters.eagle import Eagle3Config, EagleConfig, eagle, eagle3_taps, eagle_network
from jspec.drafters.head_nets import HeadsConfig, heads_network
from jspec.drafters.heads import heads
from jspec.drafters.lookahead_tokens import LookaheadConfig, lookahead_network, lookahead_tokens
from jspec.drafters.masked import MaskedConfig, masked, masked_network
from jspec.drafters.mtp import MtpConfig, MtpHeadsConfig, mtp, mtp_network
from jspec.drafters.nets import HeadKind, Network, rope_of
from jspec.types import Drafter


def _nothing(target: Any) -> dict[str, Any]:
    return {}


class Kind(NamedTuple):
    """A family of draft networks.

    ``config`` is its frozen dataclass, ``network(config) -> Network`` its cached factory and
    ``drafter(network, weights, num_tokens=..., **options) -> Drafter`` the method that it is served by;
    ``tree``, where there is one, drafts trees in its stead where ``num_nodes`` is given. ``defaults(target's
    config)`` are settings that follow from the target (head sizes, rope, which layers are tapped) where the
    user says nothing.
    """

    config: type[Any]
    network: Callable[[Any], Network]
    drafter: Callable[..., Drafter]
    tree: Callable[..., Drafter] | None = None
    defaults: Callable[[Any], dict[str, Any]] = _nothing


def _layer(target: Any) -> dict[str, Any]:
    """Sizes, biases, norms of queries and keys, and rotary base of the target's layers."""
    kv_heads = getattr(target, "num_kv_heads", target.num_heads)
    sizes = {"head_dim": target.head_dim, "num_heads": target.num_heads, "num_kv_heads": kv_heads}
    sizes |= {name: getattr(target, name, False) for name in ("qkv_bias", "qk_norm")}
    return sizes | {"mlp_width": target.mlp_width} | rope_of(target)


def _eagle3(target: Any) -> dict[str, Any]:
    return _layer(target) | {"taps": eagle3_taps(target.num_layers)}


def _heads(name: str) -> Kind:
    return Kind(HeadsConfig, heads_network, heads, defaults=lambda target: {"kind": name})


def _block(name: Any) -> Kind:
    def defaults(target: Any) -> dict[str, Any]:
        return dataclasses.asdict(block_config(target, name))

    return Kind(BlockConfig, block_network, block, block_tree, defaults)


def _attend(name: Any) -> Kind:
    config = GlideConfig if name == "glide" else AssistantConfig

    def defaults(target: Any) -> dict[str, Any]:
        return dataclasses.asdict(attend_config(target, name))

    return Kind(config, attend_network, attend, defaults=defaults)


def _bita(target: Any) -> dict[str, Any]:
    return {"num_prompts": 2}


KINDS: dict[str, Kind] = {
    "blockwise": _heads("blockwise"),
    "medusa": _heads("medusa"),
    "hydra": _heads("hydra"),
    "eagle": Kind(EagleConfig, eagle_network, eagle, defaults=_layer),
    "eagle3": Kind(Eagle3Config, eagle_network, eagle, defaults=_eagle3),
    "mtp": Kind(MtpConfig, mtp_network, mtp, defaults=_layer),
    "mtp_heads": Kind(MtpHeadsConfig, mtp_network, mtp, defaults=_layer),
    "dflash": _block("dflash"),
    "dspark": _block("dspark"),
    "causal_block": _block("causal"),
    "masked": Kind(MaskedConfig, masked_network, masked),
    "glide": _attend("glide"),
    "assistant": _attend("assistant"),
    "pass": Kind(LookaheadConfig, lookahead_network, lookahead_tokens),
    "bita": Kind(LookaheadConfig, lookahead_network, lookahead_tokens, defaults=_bita),
}


OF_THE_TARGET = ("width", "vocab_size")


def find(name: str) -> Kind:
    """The kind of that name.

    Raises:
      ValueError: there is none.
    """
    if name not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(sorted(KINDS))}, got {name!r}")
    return KINDS[name]


def configure(
    name: str,
    settings: Mapping[str, Any],
    target: Any,
    *,
    head: HeadKind = "target",
    draft_vocab: int | None = None,
) -> Any:
    """The config of a network for a target, from plain values (lists are read as tuples).

    Args:
      target: the target's config; width (of a network that reads it) and vocabulary are its.
    Raises:
      ValueError: an unknown kind or setting, or a wrong one; one line.
    """
    for key in (*OF_THE_TARGET, "head", "draft_vocab"):
        if key in settings:
            raise ValueError(f"network.{key}: expected none, it is {_whose(key)}")
    fields = {field.name for field in dataclasses.fields(find(name).config)}
    own = {key: getattr(target, key) for key in OF_THE_TARGET if key in fields}
    own |= {"head": head, "draft_vocab": draft_vocab}
    return build(name, {**find(name).defaults(target), **settings, **own})


def _whose(key: str) -> str:
    return "the target's" if key in OF_THE_TARGET else "a setting beside network"


def _left_out(given: Mapping[str, Any], made: Mapping[str, Any], path: str = "") -> str | None:
    """A key within a nested config that nobody read."""
    for key, value in given.items():
        if key not in made:
            return path + key
        if isinstance(value, Mapping) and isinstance(made[key], Mapping):
            inner = _left_out(value, made[key], f"{path}{key}.")
            if inner is not None:
                return inner
    return None


def build(name: str, values: Mapping[str, Any], where: str = "network") -> Any:
    """The config that `dataclasses.asdict` made these values of.

    Raises:
      ValueError: an unknown kind, unknown, missing or wrong settings; one line.
    """
    config = find(name).config
    known = {field.name for field in dataclasses.fields(config)}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{where}: unknown key {unknown[0]!r} for a drafter of kind {name!r}")
    try:
        made: Any = pydantic.TypeAdapter(config).validate_python(dict(values))
        if left_out := _left_out(values, dataclasses.asdict(made)):
            raise ValueError(f"{where}: unknown key {left_out!r} for a drafter of kind {name!r}")
        return made
    except pydantic.ValidationError as error:
        wrong = [
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}".removeprefix(": ").removeprefix("Value error, ")
            for e in error.errors()
        ]
        raise ValueError(f"{where}: {'; '.join(wrong)}") from None
