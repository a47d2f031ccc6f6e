"""First parameters: at random, a subset of another model's layers, or a draft network's as layers of its
target."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jspec import models
from jspec.checkpoint import Model
from jspec.drafters import stored
from jspec.drafters.nets import Network
from jspec.models import Config, Seq2SeqConfig
from jspec.models.decoder import Params
from jspec.types import PyTree


def random(config: Config, key: jax.Array) -> Params:
    """Random float32 params on the scales that a model is trained from.

    They are those of `models.init_params` but for one: an embedding that is not the head as well enters the
    residual stream with variance 1, as T5 1.1's does (Raffel et al., arXiv 1910.10683, and its code).
    """
    params = models.init_params(config, key)
    if not config.tied:
        params["embedding"] = params["embedding"] * (config.width**0.5 / config.embedding_scale)
    return params


def subset(
    config: Config, params: Params, layers: Sequence[int], encoder_layers: Sequence[int] | None = None
) -> tuple[Config, Params]:
    """A shallower model of some of another's layers, in the order given; everything else is copied.

    Args:
      layers: indices of the decoder's layers.
      encoder_layers: indices of the encoder's; None: all of them.

    Raises:
      ValueError: an index out of range, no layer at all, or encoder layers of a model without encoder.

    >>> from jspec.testing import tiny_decoder
    >>> lm, params = tiny_decoder(num_layers=3)
    >>> smaller, chosen = subset(lm.config, params, [0, 2])
    >>> smaller.num_layers, bool((chosen["layers"][1]["mlp"]["up"]["kernel"]
    ...                          == params["layers"][2]["mlp"]["up"]["kernel"]).all())
    (2, True)
    """
    changes: dict = {"num_layers": len(_checked("layers", layers, config.num_layers))}
    chosen = dict(params) | {"layers": {i: params["layers"][layer] for i, layer in enumerate(layers)}}
    if isinstance(config, Seq2SeqConfig):
        number = config.num_encoder_layers
        kept = _checked("encoder_layers", range(number) if encoder_layers is None else encoder_layers, number)
        changes["num_encoder_layers"] = len(kept)
        encoder = params["encoder"]
        chosen["encoder"] = encoder | {
            "layers": {i: encoder["layers"][layer] for i, layer in enumerate(kept)}
        }
    else:
        if encoder_layers is not None:
            raise ValueError(
                f"encoder_layers: expected None for a model without encoder, got {encoder_layers}"
            )
        if config.windows is not None:
            changes["windows"] = tuple(config.windows[layer] for layer in layers)
    copied = jax.tree.map(lambda x: jnp.array(x, jnp.float32), chosen)
    return dataclasses.replace(config, **changes), copied


def stored_network(folder: str | None, target: Model, network: Network) -> stored.Stored | None:
    """The stored drafter that a configuration's ``init`` names; None where it names none.

    Raises:
      ValueError: one for another target, or another network than ``network``.
      OSError: there is none.
    """
    if folder is None:
        return None
    before = stored.load(folder, target)
    if before.network.config != network.config:
        raise ValueError(f"init: expected a drafter with {network.config}, got {before.network.config}")
    return before


#: Parts of a layer that a draft network may lack.
LEFT_OUT = {"cross", "cross_norm", "cross_post_norm"}


def as_layers(net: PyTree, config: Config, params: Params, layers: Sequence[int]) -> PyTree:
    """A draft network whose layers begin as these of its target, and its last norm as the target's.

    What the network has beside them passes on the last of what it reads, the highest layer that it taps or
    the hidden state: a matrix onto the width from several vectors side by side is the identity for the last
    of them and 0 for the others, and so are the halves of an attention that reads pairs of an embedded token
    and a state (EAGLE-3). With L the highest tap and the layer that it begins as, such a network is the
    target's layer L once more; from there it learns to look ahead. What has no counterpart in the target
    stays as it is, and cross-attention is left out. EAGLE-1 is refused: its first layer has no norm, and the
    target's kernels, made for normed inputs, blow its states up.

    Raises:
      ValueError: a network without layers or with another number of them, a layer that the target lacks, or
        layers of other sizes or parts.
    """
    stack = net.get("stack", net)
    if "layers" not in stack:
        raise ValueError("layers: expected none, the network has no layers")
    if len(layers) != len(stack["layers"]):
        number = len(stack["layers"])
        raise ValueError(f"layers: expected one for each of the network's {number}, got {list(layers)}")
    _checked("layers", layers, config.num_layers)
    begun = {i: _as(own, params["layers"][layers[i]], config.width) for i, own in stack["layers"].items()}
    stack = stack | {"layers": begun}
    if stack.get("norm") is not None and "norm" in params:
        stack["norm"] = _as(stack["norm"], params["norm"], config.width)
    net = net | {"stack": stack} if "stack" in net else stack
    passing = {name: _passing(part, config.width) for name, part in net.items() if _is_linear(part)}
    return net | passing


def _as(own: PyTree, other: PyTree, width: int, path: str = "") -> PyTree:
    """``own`` with the values of ``other`` where both have them."""
    if not isinstance(own, dict):
        other = jnp.asarray(other, own.dtype)
        if own.shape == (2 * width, *other.shape[1:]) and other.shape[0] == width:
            other = jnp.concatenate([jnp.zeros_like(other), other])
        if own.shape != other.shape:
            raise ValueError(
                f"layers: expected a network with layers of the target's sizes, but {path} is {own.shape}, "
                f"and the target's {other.shape}"
            )
        return other
    others = other.keys() if isinstance(other, dict) else set()
    shared = own.keys() & others
    if missing := sorted(others - shared - LEFT_OUT):
        name = f"{path}.{missing[0]}".strip(".")
        raise ValueError(
            f"layers: expected a network whose layers have the parts of the target's, got none with {name}"
        )
    begun = {name: _as(own[name], other[name], width, f"{path}.{name}".strip(".")) for name in sorted(shared)}
    return own | begun


def _is_linear(part: PyTree) -> bool:
    return isinstance(part, dict) and "kernel" in part


def _passing(linear: PyTree, width: int) -> PyTree:
    """The last of several vectors, if it is a matrix onto the width."""
    kernel = linear["kernel"]
    if kernel.shape[1] != width or kernel.shape[0] % width:
        return linear
    return linear | {"kernel": jnp.zeros_like(kernel).at[-width:].set(jnp.eye(width, dtype=kernel.dtype))}


def _checked(name: str, layers: Sequence[int], number: int) -> Sequence[int]:
    if not layers or not all(0 <= layer < number for layer in layers):
        raise ValueError(f"{name}: expected indices in 0 .. {number - 1}, got {list(layers)}")
    return layers
