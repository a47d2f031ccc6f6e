"""Rotary positions (arXiv 2104.09864) and their scaled variants."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Angles = tuple[Float[Array, "B N r"], Float[Array, "B N r"]]  # cosine and sine of r pairs


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary positions in their general form: pair i of a head turns by ``position * frequencies[i]``.

    Every scaled variant whose frequencies do not change with the sequence's length is this with other
    frequencies; `rotary` computes them. A head wider than ``2 * len(frequencies)`` keeps its remaining
    entries as they are.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0  # of cosine and sine: the attention factor of yarn and longrope

    def angles(self, positions: Int[Array, "B N"]) -> Angles:
        """Cosine and sine for every position, float32."""
        frequencies = jnp.array(self.frequencies, jnp.float32)[None, None]
        angle = positions.astype(jnp.float32)[..., None] * frequencies
        return jnp.cos(angle) * self.scale, jnp.sin(angle) * self.scale


def rotate(x: Float[Array, "B N H h"], angles: Angles) -> Float[Array, "B N H h"]:
    """Turn the pairs (i, i + r) of each head; computed in float32, returned in the dtype of ``x``."""
    cos, sin = (a[:, :, None] for a in angles)
    r = cos.shape[-1]
    first, second = x[..., :r].astype(jnp.float32), x[..., r : 2 * r].astype(jnp.float32)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
    return turned if 2 * r == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * r :]], -1)


def rotary(rope: Mapping[str, Any], head_dim: int, context_length: int) -> tuple[Rotary, int | None]:
    """Frequencies of a rope description, and the number of positions up to which they hold (None: all).

    Known types: default, linear, llama3, yarn, longrope (also called su) and dynamic. The last two change the
    frequencies of *all* positions once a sequence outgrows ``original_max_position_embeddings`` (longrope) or
    the context length (dynamic). Keys that are already cached would then be wrong, so that length is returned
    as a bound; up to it, they are exact.

    Frequencies are computed in float32, as those of the checkpoints' reference implementation are.

    >>> rotary({"rope_type": "linear", "factor": 2.0, "rope_theta": 16.0}, 4, 64)[0].frequencies
    (0.5, 0.125)

    Raises:
        ValueError: an unknown type, or a missing setting.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = np.float32(need(rope, "rope_theta"))
    dim = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    powers = theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    frequencies, scale, bound = 1 / powers, 1.0, None
    original = rope.get("original_max_position_embeddings") or context_length
    if kind == "linear":
        frequencies = frequencies / np.float32(need(rope, "factor"))
    elif kind == "llama3":
        frequencies = _llama3(frequencies, rope, original)
    elif kind == "yarn":
        frequencies, scale = _yarn(powers, rope, dim, original, context_length)
    elif kind in ("longrope", "su"):
        frequencies, scale = _longrope(powers, rope, original, context_length)
        bound = original
    elif kind == "dynamic":
        bound = context_length
    elif kind != "default":
        known = "default, linear, llama3, yarn, longrope or dynamic"
        raise ValueError(f"rope_type: expected {known}, got {kind!r}")
    return Rotary(tuple(float(f) for f in frequencies), float(scale)), bound


def need(raw: Mapping[str, Any], key: str) -> Any:
    """A setting that has no default."""
    if raw.get(key) is None:
        raise ValueError(f"config: {key} is missing")
    return raw[key]


def _llama3(frequencies: np.ndarray, rope: Mapping[str, Any], original: int) -> np.ndarray:
    """Waves that turn less than ``low_freq_factor`` times over the original context are slowed by ``factor``,
    those that turn more than ``high_freq_factor`` times kept, those between blended."""
    factor, low, high = (need(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = original * frequencies / np.float32(2 * math.pi)
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return (1 - kept) * frequencies / np.float32(factor) + kept * frequencies


def _yarn(
    powers: np.ndarray, rope: Mapping[str, Any], dim: int, original: int, context_length: int
) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): a blend by the number of turns, and a factor on cosine and sine."""
    factor, theta = rope.get("factor") or context_length / original, need(rope, "rope_theta")

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1).astype(np.float32)
    frequencies = slowed / (np.float32(factor) * powers) + (1 - slowed) / powers

    def attention(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1

    scale, mscale, mscale_all = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if scale is None:
        scale = attention(mscale) / attention(mscale_all) if mscale and mscale_all else attention(1)
    return frequencies, scale


def _longrope(
    powers: np.ndarray, rope: Mapping[str, Any], original: int, context_length: int
) -> tuple[np.ndarray, float]:
    """LongRoPE (arXiv 2402.13753) within the original context: the short factors."""
    factors = np.asarray(need(rope, "short_factor"), np.float32)
    if factors.shape != powers.shape:
        raise ValueError(f"short_factor: expected {powers.size} numbers, got {factors.size}")
    factor, scale = rope.get("factor") or context_length / original, rope.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1 / (factors * powers), scale
