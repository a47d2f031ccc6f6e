"""Hugging Face checkpoints: a folder with config.json and safetensors, or a Hub id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import jax.numpy as jnp
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from jspec.io.params import fill
from jspec.models import registry
from jspec.models.decoder import DecoderConfig, Params

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def find_folder(path_or_id: str | Path) -> Path:
    """A local folder as it is, or the snapshot of a Hub id (downloaded unless HF_HUB_OFFLINE is set).

    Raises:
        FileNotFoundError: neither a folder with a config.json nor a model that can be reached.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{path_or_id}: the folder has no config.json")
        return folder
    try:
        # Only the top folder: others hold copies for other runtimes, "consolidated" is one more.
        return Path(
            huggingface_hub.snapshot_download(
                str(path_or_id), allow_patterns=PATTERNS, ignore_patterns=["*/*", "consolidated*"]
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"model: {path_or_id!r} is neither a folder nor a Hub model within reach ({reason})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError with the file's name if it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


class Tensors:
    """The tensors of a folder's safetensors files, by name."""

    def __init__(self, folder: Path):
        if (folder / INDEX).is_file():
            files = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        else:
            files = [SINGLE]
        self.files: dict[str, tuple[Path, Any]] = {}
        for path in (folder / file for file in files):
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file (weights are read from safetensors only)")
            try:
                opened = safe_open(path, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: truncated or not a safetensors file ({error})") from error
            self.files |= dict.fromkeys(opened.keys(), (path, opened))

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its own dtype."""
        path, opened = self.files[name]
        try:
            return opened.get_tensor(name)
        except (SafetensorError, AttributeError, TypeError) as error:
            raise ValueError(f"{path}: cannot read {name} ({error})") from error


def _table(family: registry.Family, config: DecoderConfig, names: Mapping[str, Any]) -> list[Any]:
    """The family's weights under the names that this checkpoint uses."""
    prefix = family.prefix
    # Checkpoints of the bare model lack the first part of the prefix, or all of it.
    while prefix and not any(name.startswith(prefix) for name in names):
        prefix = prefix.partition(".")[2]
    rows = [(path, prefix + name, transform) for path, name, transform in family.weights(config)]
    return rows if config.tied else [*rows, ("unembedding.kernel", family.head, np.transpose)]


def load_hf(path_or_id: str | Path, dtype: DTypeLike = jnp.float32) -> tuple[DecoderConfig, Params, Path]:
    """Architecture, params and folder of a checkpoint.

    Args:
        path_or_id: a folder with config.json and safetensors (one file, or shards with their index), or the
            id of a model on the Hub.
        dtype: of the params, norms excepted (float32); the model computes in it.

    Raises:
        FileNotFoundError: nothing there, or out of reach.
        ValueError: an architecture, setting, quantisation or tensor that is unknown, missing or misshapen, or
            a broken file; the message names it.
    """
    folder = find_folder(path_or_id)
    raw = read_json(folder / "config.json")
    family, config = registry.family(raw), registry.decoder_config(raw)
    tensors = Tensors(folder)
    rows = _table(family, config, tensors.files)
    embedding = next(name for path, name, _ in rows if path == "embedding")

    def ignored(name: str) -> bool:
        if name != family.head:
            return name.endswith(family.ignored)
        # A tied checkpoint may store its head twice, but not two different heads.
        return embedding in tensors.files and np.array_equal(tensors.read(name), tensors.read(embedding))

    params = fill(config, rows, tensors.files, tensors.read, dtype, str(folder), ignored)
    return config, params, folder
