"""Readers and writers of the checkpoints of draft heads that other people publish, one file a layout.

`read` finds the layout by config.json and the names of the tensors; `write` takes one by its name.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from jax.typing import DTypeLike

from jspec.drafters.model import HasModel
from jspec.drafters.nets import Network, Weights
from jspec.io.heads import layout
from jspec.io.heads.dflash import DFLASH, DFLASH_SPECULATORS
from jspec.io.heads.eagle import EAGLE, EAGLE_SPECULATORS
from jspec.io.heads.eagle3 import EAGLE3, EAGLE3_SPECULATORS
from jspec.io.heads.hydra import HYDRA
from jspec.io.heads.layout import Checkpoint, Layout, Raw
from jspec.io.heads.medusa import MEDUSA
from jspec.io.heads.pard import PARD, Pard
from jspec.io.hf import read_json

#: In the order in which they are asked whether they know a checkpoint.
LAYOUTS: dict[str, Layout | Pard] = {
    entry.name: entry
    for entry in (
        PARD,
        EAGLE_SPECULATORS,
        EAGLE3_SPECULATORS,
        DFLASH_SPECULATORS,
        MEDUSA,
        HYDRA,
        DFLASH,
        EAGLE3,
        EAGLE,
    )
}


def recognise(folder: Path) -> Layout | Pard:
    """The layout of a head's folder.

    Raises:
      FileNotFoundError: no config.json, or no tensors.
      ValueError: none that is known.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder}: expected a folder with a config.json")
    raw, names = read_json(folder / "config.json"), layout.open_tensors(folder).shapes
    found = next((entry for entry in LAYOUTS.values() if entry.fits(raw, names)), None)
    if found is None:
        raise ValueError(
            f"{folder}: expected a drafter in one of the layouts {', '.join(LAYOUTS)}, but neither its "
            "config.json nor the names of its tensors are theirs"
        )
    return found


def read(
    folder: str | Path, model: HasModel, *, dtype: DTypeLike | None = None, rope_theta: float | None = None
) -> Checkpoint:
    """A public checkpoint for its target; see `layout.read`."""
    folder = Path(folder).expanduser()
    return recognise(folder).read(folder, model, dtype, rope_theta)


def write(
    folder: str | Path,
    name: str,
    network: Network,
    weights: Weights,
    model: HasModel,
    *,
    raw: Raw | None = None,
    extras: Collection[str] = (),
    num_tokens: int = 7,
) -> Path:
    """A network as a public checkpoint in the layout ``name``; see `layout.write`.

    Raises:
      ValueError: an unknown layout, a network that it cannot express, or a folder that is not empty.
    """
    if name not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {name!r}")
    folder = Path(folder).expanduser()
    return LAYOUTS[name].write(folder, network, weights, model, raw, extras, num_tokens)
