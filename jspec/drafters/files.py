"""Trained drafters on disk, whoever trained them: `save` and `load`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from jspec.drafters import stored
from jspec.drafters.model import HasModel
from jspec.drafters.nets import Network, Weights
from jspec.io import heads, hf
from jspec.io.heads.target import check_target
from jspec.models import cast
from jspec.types import Drafter

#: Drafters that come with the package, by the name of their target.
SHIPPED = Path(__file__).parent / "trained"
TORCH = ("*.bin", "*.pt")  # in which public heads may be stored


def save(
    folder: str | Path,
    kind: str,
    network: Network,
    weights: Weights,
    *,
    num_tokens: int | None = None,
    accuracies: Sequence[Sequence[float]] | None = None,
    dtype: DTypeLike | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a draft network as a folder that `load` reads: config.json and model.safetensors.

    Rows of the target's head are not stored, only their ids: `load` gathers them again.

    Args:
      kind: its name in `jspec.drafters.kinds.KINDS`.
      num_tokens: the length of draft that `load` proposes; None: the method's own.
      accuracies: [K, R], how often the r-th choice at depth k is the target's first (`stored.Stored` has
        those that training saw); static trees are grown from them.
      dtype: of the stored parameters, norms excepted (float32): bfloat16 or float32; None: as they are.
      about: where it comes from (``target``, data, the command that made it), for people; ``target`` is what
        `load` loads if it is given no target.
    Raises:
      ValueError: an unknown kind, or a network of another one.
      OSError: it cannot be written.
    """
    config, found = network.config, stored.kinds.find(kind).config
    if type(config) is not found:
        raise ValueError(f"kind: expected that of a {type(config).__name__}, got {kind!r} ({found.__name__})")
    if dtype is not None:
        weights = weights._replace(net=cast(weights.net, dtype))
    stored.save(folder, kind, config, weights, num_tokens=num_tokens, accuracies=accuracies, about=about)


def load(
    folder_or_name: str | Path,
    model: HasModel | None = None,
    *,
    dtype: DTypeLike | None = None,
    rope_theta: float | None = None,
    **settings: Any,
) -> Drafter:
    """A trained drafter, ready for its target.

    Args:
      folder_or_name: a folder that `save` or ``python -m training`` wrote, a folder or a Hub id of a public
        checkpoint (`jspec.io.heads.LAYOUTS`: EAGLE, EAGLE-3, Medusa, Hydra, DFlash, DSpark, PARD, by their
        authors, SpecForge or vllm-project/speculators), or the name of a target whose drafter comes with the
        package (a folder of that name comes first).
      model: the target, as `jspec.load` returns it; None: the one that the drafter says it was made for.
      dtype: of the weights; None: the target's. Norms are float32.
      rope_theta: the base of a public drafter's rotary positions, where it is right that it differs from the
        target's.
      settings: of the drafting method (``num_tokens``, ``sample``, ``proceed``, ``tree``, ...), instead of
        what the checkpoint proposes. ``num_nodes`` of a drafter that was trained here: a tree of so many
        nodes, a block's likeliest ones, or the heads' best static one by the accuracies that their training
        saw.
    Raises:
      FileNotFoundError: nothing there.
      ValueError: a broken checkpoint, or one for another target: missing, left-over or misshapen tensors,
        another width, vocabulary, number of layers or rope base; the message names it, with both numbers.
    """
    folder = _find(folder_or_name)
    raw = hf.read_json(folder / stored.CONFIG)
    model = _target(folder, raw) if model is None else model
    wanted: DTypeLike = jax.tree.leaves(model.params)[0].dtype if dtype is None else dtype
    if _is_ours(raw):
        found = stored.load(folder, model)
        check_target(str(folder), found.network, model)
        weights = found.weights._replace(net=cast(found.weights.net, wanted))
        return stored.drafter(found._replace(weights=weights), **settings)
    checkpoint = heads.read(folder, model, dtype=wanted, rope_theta=rope_theta)
    layout, proposed = checkpoint.layout, checkpoint.layout.settings(checkpoint.raw)
    return stored.method(
        layout.name, layout.drafter, checkpoint.network, checkpoint.weights, proposed, settings
    )


def is_shipped(name: str) -> bool:
    """Whether a drafter comes with the package for the target of this name."""
    folder = SHIPPED / name
    return folder.parent == SHIPPED and (folder / stored.CONFIG).is_file()


def _find(folder_or_name: str | Path) -> Path:
    """The folder. What comes with the package goes by its target's name, where there is no such folder."""
    if not Path(folder_or_name).is_dir() and is_shipped(str(folder_or_name)):
        return SHIPPED / str(folder_or_name)
    return hf.find_folder(folder_or_name, files=TORCH, name="folder_or_name")


def _is_ours(raw: Mapping[str, Any]) -> bool:
    return "kind" in raw and "config" in raw


def _target(folder: Path, raw: Mapping[str, Any]) -> HasModel:
    """The model that a drafter was made for, by the name it gives."""
    from jspec.checkpoint import load as load_model

    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    told = (raw.get("about") or {}, raw, verifier)
    keys = ("target", "base_model_name_or_path", "name_or_path")
    name = next((values[key] for values, key in zip(told, keys, strict=True) if values.get(key)), None)
    if name is None:
        raise ValueError(f"model: expected the target of {folder}, which does not say whose drafter it is")
    return load_model(name)
