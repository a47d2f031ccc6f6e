"""Hydra's heads (Ankner et al., arXiv 2402.05109), as zankner/Hydra writes them.

Read from hydra/model/hydra_model.py, hydra/model/hydra_heads/{mlp,prefix_mlp}_head.py and
hydra/train/train.py of zankner/Hydra at 7f39cbd. config.json has ``hydra_num_heads``, ``hydra_num_layers``,
``hydra_head_arch`` ("mlp" here), ``grounded_heads`` (true: heads read drafted tokens),
``hidden_state_offset`` and ``base_model_name_or_path``, no sizes; the tensors lie in hydra_lm_head.pt, K
heads of n blocks, head k over (k + 2) E numbers::

    hydra_mlp.{k}.0.linear.{weight [E, (k+2) E], bias}, hydra_mlp.{k}.0.res_connection.{weight, bias}
    hydra_mlp.{k}.{j}.linear.{weight [E, E], bias}           j = 1 ... n - 1
    hydra_lm_head.{k}.{weight [V, E], bias [V]}

With dropout in between (as Hydra++ is built) the blocks are 1, 3, ... and the head ``hydra_lm_head.{k}.1``;
both spellings are read, the first is written. hydra_lm_head.safetensors is read, too.

Hydra++ ("prefix-mlp") has a decoder layer below its heads, which jspec's have not: it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from jspec.drafters.head_nets import HeadsConfig, heads_network
from jspec.drafters.heads import heads
from jspec.drafters.model import HasModel
from jspec.io.heads.layout import Layout, Raw, Shapes, Table
from jspec.models.families.base import SAME, TRANSPOSE, linear, refuse


def _fits(raw: Raw, names: Collection[str]) -> bool:
    return "hydra_num_heads" in raw or any(name.startswith("hydra_mlp.") for name in names)


def _rename(names: Collection[str]) -> Mapping[str, str]:
    """Without the places of dropout layers."""
    if "hydra_lm_head.0.1.weight" not in names:
        return {name: name for name in names}

    def plain(name: str) -> str:
        name = re.sub(r"^(hydra_lm_head\.\d+)\.1\.", r"\1.", name)
        block = re.match(r"hydra_mlp\.(\d+)\.(\d+)\.", name)
        return name if block is None else f"hydra_mlp.{block[1]}.{int(block[2]) // 2}.{name[block.end() :]}"

    return {plain(name): name for name in names}


def _config(raw: Raw, shapes: Shapes, model: HasModel) -> HeadsConfig:
    refuse(raw, hydra_head_arch="mlp", grounded_heads=True, hidden_state_offset=0)
    if "hydra_lm_head.0.weight" not in shapes:
        raise ValueError("hydra_lm_head.0.weight: expected the tensors of at least one head, got none")
    vocab_size, width = shapes["hydra_lm_head.0.weight"]
    blocks = [re.fullmatch(r"hydra_mlp\.0\.(\d+)\.linear\.weight", name) for name in shapes]
    heads = [re.fullmatch(r"hydra_lm_head\.(\d+)\.weight", name) for name in shapes]
    count, depth = sum(map(bool, heads)), sum(map(bool, blocks))
    for key, found in (("hydra_num_heads", count), ("hydra_num_layers", depth)):
        if raw.get(key, found) != found:
            raise ValueError(f"{key}: expected the tensors of {raw[key]}, got those of {found}")
    return HeadsConfig(
        kind="hydra",
        width=width,
        vocab_size=vocab_size,
        num_heads=count,
        layers=depth,
        head="own",
        head_bias="hydra_lm_head.0.bias" in shapes,
    )


def _table(c: HeadsConfig) -> Table:
    for k in range(c.num_heads):
        for j in range(c.layers):
            ours, theirs = f"heads.{k}.blocks.{j}", f"hydra_mlp.{k}.{j}"
            yield from linear(f"{ours}.linear", f"{theirs}.linear", True)
            if j == 0:
                yield from linear(f"{ours}.skip", f"{theirs}.res_connection", True)
        yield f"head.{k}", f"hydra_lm_head.{k}.weight", TRANSPOSE
        if c.head_bias:
            yield f"head_bias.{k}", f"hydra_lm_head.{k}.bias", SAME


def _raw(c: HeadsConfig, model: HasModel, num_tokens: int) -> dict[str, Any]:
    return {
        "hydra_num_heads": c.num_heads,
        "hydra_num_layers": c.layers,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": getattr(model, "name", None),
    }


HYDRA = Layout(
    "hydra",
    heads_network,
    heads,
    _fits,
    _config,
    _table,
    _raw,
    file="hydra_lm_head.pt",
    stacked=("head", "head_bias"),
    own_head=True,
    rename=_rename,
)
