"""Parameters of any model: made at random, described, cast."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jspec.models import decoder, seq2seq
from jspec.models.decoder import Decoder, DecoderConfig, Params
from jspec.models.seq2seq import Seq2Seq, Seq2SeqConfig
from jspec.types import LanguageModel

Config = DecoderConfig | Seq2SeqConfig


def language_model(config: Config, cache_dtype: str | None = None) -> LanguageModel:
    """The pure functions of an architecture; see the two factories of this name."""
    family = seq2seq if isinstance(config, Seq2SeqConfig) else decoder
    return family.language_model(config, cache_dtype)  # pyright: ignore[reportArgumentType]


def cache_dtype(dtype: DTypeLike) -> str | None:
    """How to cache keys and values of a model in ``dtype`` on this machine; None: as they are.

    XLA's CPU backend writes no 16-bit array in place: it converts the whole cache, forth and back, at every
    commit (120 ms a step for 32 rows of 256 slots of SmolLM2-135M, 1 ms in float32).
    """
    narrow = jnp.dtype(dtype).itemsize == 2
    return "float32" if narrow and jax.default_backend() == "cpu" else None


def _module(config: Config, rngs: nnx.Rngs) -> Decoder:
    return Seq2Seq(config, rngs) if isinstance(config, Seq2SeqConfig) else Decoder(config, rngs)


def init_params(config: Config, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Random parameters, kernels with variance 1 / inputs. Norms stay float32 whatever ``dtype`` is."""
    params = nnx.to_pure_dict(nnx.state(_module(config, nnx.Rngs(params=key)), nnx.Param))
    return cast(params, dtype)


def abstract_params(config: Config) -> Params:
    """The params as `jax.ShapeDtypeStruct` leaves: what a loader has to fill."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: _module(config, nnx.Rngs(0))), nnx.Param))


def is_norm(path: tuple[Any, ...]) -> bool:
    """Whether a path into params (keys, or jax key entries) leads to a norm's parameter."""
    return any(str(getattr(entry, "key", entry)).endswith("norm") for entry in path)


def check_dtype(config: Config, dtype: DTypeLike) -> None:
    """Refuse float16 for models with relative positions (T5, mT5): trained in bfloat16, they have activations
    beyond the 65,504 that float16 ends at, and without the clamps of other implementations NaN comes out."""
    if (
        jnp.dtype(dtype) == jnp.float16
        and isinstance(config, Seq2SeqConfig)
        and config.positions == "relative"
    ):
        raise ValueError(
            "dtype: expected bfloat16 or float32 for a T5-like model, whose activations overflow float16, "
            "got float16"
        )


def cast(params: Params, dtype: DTypeLike) -> Params:
    """Params in another dtype, norms left in float32."""
    return jax.tree_util.tree_map_with_path(lambda path, x: x if is_norm(path) else x.astype(dtype), params)
