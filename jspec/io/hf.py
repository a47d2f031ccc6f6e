"""Hugging Face checkpoints: a folder with config.json and safetensors, or a Hub id."""

from __future__ import annotations

import dataclasses
import json
import math
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
from jspec.models import Config, Seq2SeqConfig, check_dtype, registry
from jspec.models.decoder import Params
from jspec.models.families.base import ROW, TRANSPOSE, Family, Transform

if TYPE_CHECKING:
    from jspec.checkpoint import Model

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PATTERNS = ["*.json", "*.safetensors", "*.model", "*.spm", "*.txt", "*.jinja"]


def find_folder(path_or_id: str | Path, *, files: Collection[str] = (), name: str = "model") -> Path:
    """A local folder as it is, or the snapshot of a Hub id (downloaded unless HF_HUB_OFFLINE is set), with
    further ``files``. ``name`` is the argument's.

    Raises:
        FileNotFoundError: neither a folder with a config.json nor a model that can be reached.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{name}: {path_or_id}: the folder has no config.json")
        return folder
    try:
        # Only the top folder: others hold copies for other runtimes, "consolidated" is one more.
        return Path(
            huggingface_hub.snapshot_download(
                str(path_or_id), allow_patterns=[*PATTERNS, *files], ignore_patterns=["*/*", "consolidated*"]
            )
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{name}: {path_or_id!r} is neither a folder nor a Hub model within reach ({reason})"
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
    """The tensors of a folder's safetensors files, by name; of ``single`` alone, if a file is named."""

    def __init__(self, folder: Path, single: str | None = None):
        if single is None and (folder / INDEX).is_file():
            files = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        else:
            files = [single or SINGLE]
        self.files: dict[str, tuple[Path, Any]] = {}
        for path in (folder / file for file in files):
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file (weights are read from safetensors only)")
            try:
                opened = safe_open(path, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: truncated or not a safetensors file ({error})") from error
            self.files |= dict.fromkeys(opened.keys(), (path, opened))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of all tensors; nothing but the header is read."""
        return {name: tuple(opened.get_slice(name).get_shape()) for name, (_, opened) in self.files.items()}

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


def load_hf(path_or_id: str | Path, dtype: DTypeLike | None = jnp.float32) -> tuple[Config, Params, Path]:
    """Architecture, params and folder of a checkpoint.

    A head that the config calls tied but that is stored, with other values than the embedding, is used, as
    transformers 5 does.

    Args:
        path_or_id: a folder with config.json and safetensors (one file, or shards with their index), or the
            id of a model on the Hub.
        dtype: of the params, norms excepted (float32); the model computes in it. None: each as it is stored.

    Raises:
        FileNotFoundError: nothing there, or out of reach.
        ValueError: an architecture, setting, quantisation or tensor that is unknown, missing or misshapen, a
            dtype that the model overflows, or a broken file; the message names it.
    """
    folder = find_folder(path_or_id)
    raw = read_json(folder / "config.json")
    if {"kind", "config"} <= raw.keys() and "model_type" not in raw:
        raise ValueError(
            f"{folder}: expected a model, got a drafter of kind {raw['kind']!r}, which "
            "jspec.drafters.load reads"
        )
    family = registry.family(raw)
    config, tensors = family.config(raw), Tensors(folder)
    if dtype is not None:
        check_dtype(config, dtype)
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


def _generation(folder: Path) -> dict[str, Any]:
    """What a folder says about generating. As in transformers, one file says all of it: what the first does
    not say, or says is null, is not looked for in the second."""
    files = [folder / name for name in ("generation_config.json", "config.json")]
    return read_json(next((path for path in files if path.is_file()), files[-1]))


def decoder_start(folder: Path) -> tuple[int, ...]:
    """The tokens that an encoder-decoder's decoder begins with: the start token and, where the checkpoint
    forces a first token (BART, mBART), that one.

    Raises:
        ValueError: generation_config.json, or config.json where there is none, does not tell.
    """
    told = _generation(folder)
    start, forced = told.get("decoder_start_token_id"), told.get("forced_bos_token_id")
    start = told.get("bos_token_id") if start is None else start
    if not isinstance(start, int):
        raise ValueError(f"{folder}: decoder_start_token_id: expected the id of a token, got {start}")
    return (start,) if forced is None else (start, forced)


def banned(folder: Path) -> tuple[int, ...]:
    """The tokens that a checkpoint never lets out: ``suppress_tokens`` and ``bad_words_ids``.

    Raises:
        ValueError: a ban of another kind (a sequence of tokens, or of a first token); the message names it.
    """
    told = _generation(folder)
    words = told.get("bad_words_ids") or []
    if any(len(word) != 1 for word in words):
        raise ValueError(f"{folder}: bad_words_ids: expected single tokens, got {words}")
    if told.get("begin_suppress_tokens"):
        raise ValueError(
            f"{folder}: begin_suppress_tokens = {told['begin_suppress_tokens']} is not supported"
        )
    return tuple(sorted({*(told.get("suppress_tokens") or []), *(word[0] for word in words)}))


# --- writing ----------------------------------------------------------------------------------------


def save_hf(model: Model, folder: str | Path) -> Path:
    """Write a model as a Hugging Face folder that transformers loads: config.json, model.safetensors,
    generation_config.json and the tokenizer's files. Returns the folder.

    Whatever family the architecture came from, the first one that can express it is written
    (`registry.express`). The weights keep their dtypes, and `load_hf` gives the same params back, bit for
    bit, unless a T5-like model has scales of attention, embedding or head that T5 has no words for: these go
    into the weights (`without_scales`), and other params with the same logits come back.

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
    bans = {"suppress_tokens": list(model.banned)} if model.banned else {}
    for name, values in (("generation_config.json", generation | bans), ("config.json", raw)):
        (folder / name).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return folder


def without_scales(config: Config, params: Params) -> tuple[Config, Params]:
    """A T5-like model with scales that T5 has no words for, as one of the same logits without.

    Training likes the scales (Adam moves every number by about the learning rate, whatever its size); a T5
    checkpoint holds the products. Queries take that of the scores, the embedding s its own, and an untied
    head l that of the logits. A tied head reads the embedding, so there the final norm's gain takes what is
    left to be said, beside the scale E^-0.5 that T5 1.0 has::

        norm(x) g . e l  =  norm(x) g' . (s e) E^-0.5   with   g' = g (l / s) E^0.5

    Products are computed in float32 and rounded once, to the dtype of the weights. Other models, and scales
    that T5 has, come back as they are.
    """
    if not isinstance(config, Seq2SeqConfig) or config.positions != "relative":
        return config, params

    def scaled(x: jax.Array, scale: float) -> jax.Array:
        return (x.astype(jnp.float32) * scale).astype(x.dtype)

    if config.attention_scale != 1:
        scale = config.attention_scale
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: scaled(x, scale) if jax.tree_util.DictKey("query") in path else x, params
        )
        config = dataclasses.replace(config, attention_scale=1.0)
    plain, s, head = config.width**-0.5, config.embedding_scale, config.logit_scale
    known = head == 1 or math.isclose(head, plain, rel_tol=1e-6)
    if (s == 1 and known) or config.norm_placement != "pre":
        return config, params
    params = params | {"embedding": scaled(params["embedding"], s)}
    if config.tied:
        params["norm"] = params["norm"] | {"scale": scaled(params["norm"]["scale"], head / s / plain)}
        head = plain
    elif not known:
        params["unembedding"] = {"kernel": scaled(params["unembedding"]["kernel"], head)}
        head = 1.0
    return dataclasses.replace(config, embedding_scale=1.0, logit_scale=head), params


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
