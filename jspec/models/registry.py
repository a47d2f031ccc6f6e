"""From a checkpoint's own words to ours and back: config.json and a config, tensor names and params.

A model family is one `Family`: a mapping of its config and a table of its weights. Nothing is guessed: an
architecture, rope type, activation or quantisation that is not known here is an error that names it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jspec.models.decoder import DecoderConfig
from jspec.models.families import bart, gpt2, llama, t5
from jspec.models.families.base import Family, Raw
from jspec.models.rotary import Rotary
from jspec.models.seq2seq import Seq2SeqConfig

FAMILIES: dict[str, Family] = llama.FAMILIES | gpt2.FAMILIES | bart.FAMILIES | t5.FAMILIES
ALIASES: dict[str, str] = bart.ALIASES | t5.ALIASES
MODEL_TYPES = {family.model_type: name for name, family in FAMILIES.items()}


def family(raw: Raw) -> Family:
    """The family a config.json names.

    Raises:
        ValueError: an unknown architecture or model type, or a quantised checkpoint.
    """
    kind = str(raw.get("model_type"))
    names = raw.get("architectures") or [MODEL_TYPES.get(kind, kind)]
    name = ALIASES.get(names[0], names[0])
    if len(names) != 1 or name not in FAMILIES:
        raise ValueError(
            f"architecture: expected one of {', '.join(FAMILIES)}, got {', '.join(map(str, names))}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"quantization_config: quantised checkpoints are not supported, got {method!r}")
    return FAMILIES[name]


def express(config: DecoderConfig | Seq2SeqConfig) -> tuple[Family, dict[str, Any]]:
    """A family whose checkpoints can hold a model of this architecture, and their config.json.

    A family can if its own reading of that config.json gives the architecture back (numbers within 1e-6 of
    each other are the same).

    Raises:
        ValueError: there is none; the message names what the nearest one loses.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    losses: list[tuple[list[str], str]] = []
    for name, candidate in FAMILIES.items():
        if candidate.raw is None or not isinstance(config, candidate.makes):
            continue
        raw = {"architectures": [name], "model_type": candidate.model_type, **candidate.raw(config)}
        made = as_stored(candidate.config(raw), candidate, tied=config.tied, head_bias=config.head_bias)
        lost = [field for field in fields if not _equal(getattr(made, field), getattr(config, field))]
        if not lost:
            return candidate, raw
        losses.append((lost, name))
    lost, name = min(losses, key=lambda loss: len(loss[0]))
    said = ", ".join(f"{field} = {getattr(config, field)!r}" for field in lost)
    raise ValueError(f"config: no known checkpoint can express it; the nearest, {name}, cannot say {said}")


def as_stored(config: Any, family: Family, *, tied: bool, head_bias: bool) -> Any:
    """The architecture of a checkpoint that stores these: a head that is not the embedding, though the
    config calls it tied, is used, and a head bias that is not stored is none."""
    return dataclasses.replace(
        config,
        tied=config.tied and tied,
        head_bias=head_bias if family.head_bias else config.head_bias,
    )


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Rotary) and isinstance(theirs, Rotary):
        first, second = (np.array([r.scale, *r.frequencies]) for r in (ours, theirs))
        return first.shape == second.shape and np.allclose(first, second, rtol=1e-6, atol=0)
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs
