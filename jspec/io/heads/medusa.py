"""Medusa's heads (Cai et al., arXiv 2401.10774), as FasterDecoding/Medusa writes them.

Read from medusa/model/medusa_model.py (11af0aa) and medusa/train/train_legacy.py (e2a5d20) of
FasterDecoding/Medusa.
config.json has ``medusa_num_heads``, ``medusa_num_layers`` and ``base_model_name_or_path``, no sizes; the
tensors lie in medusa_lm_head.safetensors (earlier: medusa_lm_head.pt), without prefix, K heads of n blocks::

    {k}.{j}.linear.weight [E, E], {k}.{j}.linear.bias [E]    j = 0 ... n - 1
    {k}.{n}.weight [V, E]                                    the head's own unembedding

Merged checkpoints put ``medusa_head.`` before each name. The original may build fewer heads than are stored;
here all that are stored are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from jspec.drafters.head_nets import HeadsConfig, heads_network
from jspec.drafters.heads import heads
from jspec.drafters.model import HasModel
from jspec.io.heads.layout import Layout, Raw, Shapes, Table, strip
from jspec.models.families.base import TRANSPOSE, linear

PREFIX = "medusa_head."


def _fits(raw: Raw, names: Collection[str]) -> bool:
    first = "0.0.linear.weight"
    return "medusa_num_heads" in raw or first in names or PREFIX + first in names


def _config(raw: Raw, shapes: Shapes, model: HasModel) -> HeadsConfig:
    found = [re.fullmatch(r"(\d+)\.(\d+)\.weight", name) for name in shapes]
    layers = {int(match[1]): int(match[2]) for match in found if match}
    count = len(layers)
    if sorted(layers) != list(range(count)) or len(set(layers.values())) != 1:
        raise ValueError(
            f"heads: expected tensors K.N.weight of heads 0, 1, ... of equal depth, got {layers}"
        )
    told, depth = raw.get("medusa_num_heads", count), layers[0]
    if told > count:
        raise ValueError(f"medusa_num_heads: expected the tensors of {told} heads, got those of {count}")
    if raw.get("medusa_num_layers", depth) != depth:
        raise ValueError(
            f"medusa_num_layers: expected tensors of {raw['medusa_num_layers']} blocks a head, got {depth}"
        )
    vocab_size, width = shapes[f"0.{depth}.weight"]
    return HeadsConfig(
        kind="medusa", width=width, vocab_size=vocab_size, num_heads=count, layers=depth, head="own"
    )


def _table(c: HeadsConfig) -> Table:
    for k in range(c.num_heads):
        for j in range(c.layers):
            yield from linear(f"heads.{k}.blocks.{j}.linear", f"{k}.{j}.linear", True)
        yield f"head.{k}", f"{k}.{c.layers}.weight", TRANSPOSE


def _raw(c: HeadsConfig, model: HasModel, num_tokens: int) -> dict[str, Any]:
    return {
        "medusa_num_heads": c.num_heads,
        "medusa_num_layers": c.layers,
        "base_model_name_or_path": getattr(model, "name", None),
    }


MEDUSA = Layout(
    "medusa",
    heads_network,
    heads,
    _fits,
    _config,
    _table,
    _raw,
    file="medusa_lm_head.safetensors",
    stacked=("head",),
    own_head=True,
    rename=strip(PREFIX),
)
