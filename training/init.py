"""First parameters: at random, or a subset of another model's layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jspec import models
from jspec.models import Config, Seq2SeqConfig
from jspec.models.decoder import Params


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


def _checked(name: str, layers: Sequence[int], number: int) -> Sequence[int]:
    if not layers or not all(0 <= layer < number for layer in layers):
        raise ValueError(f"{name}: expected indices in 0 .. {number - 1}, got {list(layers)}")
    return layers
