"""Hugging Face checkpoints: a folder with config.json and safetensors, or a Hub id."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jspec.io.params import fill, named
from jspec.models import Config, Seq2SeqConfig, registry
from jspec.models.decoder import Params
from jspec.models.families.base import ROW, TRANSPOSE, Family, Transform

if TYPE_CHECKING:
    from jspec.checkpoint import Model

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


# --- reading ----------------------------------------------------------------------------------------


def _table(family: Family, config: Config, prefix: str) -> list[tuple[str, str, Transform]]:
    """The weights of a model, head and its bias included."""
    rows = [(path, prefix + name, transform) for path, name, transform in family.weights(config)]
    if not config.tied:
        rows.append(("unembedding.kernel", family.head, TRANSPOSE))
    if config.head_bias and family.head_bias:
        rows.append(("head_bias", family.head_bias, ROW))
    return rows


def _prefix(family: Family, names: Collection[str]) -> str:
    """Checkpoints of the bare model lack the first part of the family's prefix, or all of it."""
    prefix = family.prefix
    while prefix and not any(name.startswith(prefix) for name in names):
        prefix = prefix.partition(".")[2]
    return prefix


def load_hf(path_or_id: str | Path, dtype: DTypeLike = jnp.float32) -> tuple[Config, Params, Path]:
    """Architecture, params and folder of a checkpoint.

    A head that the config calls tied but that is stored, with other values than the embedding, is used, as
    transformers 5 does.

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
    family = registry.family(raw)
    config, tensors = family.config(raw), Tensors(folder)
    names = set(tensors.files)
    prefix = _prefix(family, names)

    # One matrix, stored under one or more names, of which the head is the last.
    embedding = next(prefix + name for path, name, _ in family.weights(config) if path == "embedding")
    shared = [embedding, *(prefix + name for name in family.copies), *([family.head] if config.tied else [])]
    shared = [name for name in shared if name in names]
    others = [n for n in shared[1:] if not np.array_equal(tensors.read(n), tensors.read(shared[0]))]
    if any(name != family.head for name in others):
        raise ValueError(
            f"{folder}: {others[0]} differs from {shared[0]}; an encoder and a decoder with different "
            "embeddings are not supported"
        )
    config = registry.as_stored(config, family, tied=not others, head_bias=family.head_bias in names)
    rows = [
        (path, shared[0] if path == "embedding" and shared else name, transform.load)
        for path, name, transform in _table(family, config, prefix)
    ]

    def ignored(name: str) -> bool:
        return name in shared or name.endswith(family.ignored)

    return config, fill(config, rows, names, tensors.read, dtype, str(folder), ignored), folder


def decoder_start(folder: Path) -> tuple[int, ...]:
    """The tokens that an encoder-decoder's decoder begins with: the start token and, where the checkpoint
    forces a first token (BART, mBART), that one.

    Raises:
        ValueError: neither generation_config.json nor config.json tells.
    """
    files = [folder / name for name in ("generation_config.json", "config.json")]
    told = [read_json(path) for path in files if path.is_file()]

    def find(key: str) -> int | None:
        return next((values[key] for values in told if values.get(key) is not None), None)

    start, forced = find("decoder_start_token_id"), find("forced_bos_token_id")
    start = find("bos_token_id") if start is None else start
    if not isinstance(start, int):
        raise ValueError(f"{folder}: decoder_start_token_id: expected the id of a token, got {start}")
    return (start,) if forced is None else (start, forced)


# --- writing ----------------------------------------------------------------------------------------


def save_hf(model: Model, folder: str | Path) -> Path:
    """Write a model as a Hugging Face folder that transformers loads: config.json, model.safetensors,
    generation_config.json and the tokenizer's files. Returns the folder.

    The weights keep their dtypes; `load_hf` gives the same params back, bit for bit. Whatever family the
    architecture came from, the first one that can express it is written (`registry.express`). Scales of
    attention, embedding and head that T5 has no words for go into the weights (`without_scales`).

    Raises:
        ValueError: the folder is not empty, or no family can express the model; the message says why.
        OSError: the folder cannot be written.
    """
    folder = Path(folder).expanduser()
    config, params = without_scales(model.lm.config, model.params)
    family, raw = registry.express(config)
    generation = _token_ids(model)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: expected a new or an empty one, got {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    table = _table(family, config, family.prefix)
    try:
        save_file(named(params, table), folder / SINGLE, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder}: cannot write {SINGLE} ({error})") from error
    if model.tokenizer is not None:
        model.tokenizer.backend.save_pretrained(str(folder))
    raw |= {"dtype": str(params["embedding"].dtype), **generation}
    for name, values in (("generation_config.json", generation), ("config.json", raw)):
        (folder / name).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return folder


def without_scales(config: Config, params: Params) -> tuple[Config, Params]:
    """A T5-like model with scaled attention or a scaled embedding, as one of the same logits without.

    Training likes the scales (Adam moves every number by about the learning rate, whatever its size); a T5
    checkpoint holds the products. Queries take that of the scores. What remains to be said of a tied
    embedding's after it went into the embedding goes into the final norm::

        norm(x) g . e l  =  norm(x) g' . (s e) E^-0.5   with   g' = g (l / s) E^0.5

    Other models come back as they are.
    """
    if not isinstance(config, Seq2SeqConfig) or config.positions != "relative":
        return config, params
    if config.attention_scale != 1:
        scale = config.attention_scale
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: x * jnp.asarray(scale, x.dtype) if jax.tree_util.DictKey("query") in path else x,
            params,
        )
        config = dataclasses.replace(config, attention_scale=1.0)
    if config.tied and config.embedding_scale != 1 and config.norm_placement == "pre":
        scale, plain = config.embedding_scale, config.width**-0.5
        embedding, gain = params["embedding"], params["norm"]["scale"]
        params = params | {
            "embedding": embedding * jnp.asarray(scale, embedding.dtype),
            "norm": params["norm"] | {"scale": gain * (config.logit_scale / scale / plain)},
        }
        config = dataclasses.replace(config, embedding_scale=1.0, logit_scale=plain)
    return config, params


def _token_ids(model: Model) -> dict[str, Any]:
    """What ``generate`` of transformers needs to know; None where it would assume something else."""
    if len(model.decoder_start) > 2:
        raise ValueError(f"decoder_start: expected at most 2 tokens, got {model.decoder_start}")
    backend = None if model.tokenizer is None else model.tokenizer.backend
    start, forced = (*model.decoder_start, None, None)[:2]
    pad = getattr(backend, "pad_token_id", None)
    return {
        "bos_token_id": getattr(backend, "bos_token_id", None),
        "eos_token_id": model.eos[0] if len(model.eos) == 1 else list(model.eos) or None,
        "pad_token_id": start if pad is None else pad,
        "decoder_start_token_id": start,
        "forced_bos_token_id": forced,
        "forced_eos_token_id": None,
    }
