"""Folders that training makes: a model's description, its tokenizer, and orbax checkpoints of its params."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pydantic
from jax.sharding import Mesh
from jax.typing import DTypeLike
from orbax.checkpoint import v1 as ocp

from jspec import parallel
from jspec.io import tokenizer as tokenizers
from jspec.models import Config, DecoderConfig, Seq2SeqConfig, abstract_params, cast, check_dtype
from jspec.models.rotary import rotary
from jspec.types import PyTree

MODEL, DONE, CHECKPOINTS = "model.json", "DONE", "checkpoints"
COMPLETE = "commit_success.txt"  # orbax writes it last
KINDS: dict[str, Any] = {"decoder": DecoderConfig, "encoder-decoder": Seq2SeqConfig}


# --- architectures as plain values ------------------------------------------------------------------


def describe(config: Config) -> dict[str, Any]:
    """A config as JSON values, ``kind`` among them; `architecture` reads it back.

    >>> from jspec.testing import tiny_decoder
    >>> config = tiny_decoder(windows=(None, 8))[0].config
    >>> architecture(json.loads(json.dumps(describe(config)))) == config
    True
    """
    kind = next(name for name, cls in KINDS.items() if type(config) is cls)
    return {"kind": kind} | dataclasses.asdict(config)


def architecture(values: Mapping[str, Any], name: str = "architecture") -> Config:
    """A config from plain values: fields of `DecoderConfig` or `Seq2SeqConfig`, and ``kind``.

    ``rotary`` may be a rope description as checkpoints have it (``{rope_theta: 10000}``); one that holds up
    to some position only (longrope, dynamic) ends the model's positions there.

    Raises:
      ValueError: unknown, missing or wrong fields; one line.
    """
    values = dict(values)
    kind = values.pop("kind", None)
    if kind not in KINDS:
        raise ValueError(f"{name}.kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    known = {field.name for field in dataclasses.fields(KINDS[kind])}
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{name}: unknown key {unknown[0]!r} for a model of kind {kind!r}")
    bounds: list[int] = []
    try:
        for key in ("rotary", "local_rotary"):
            if isinstance(rope := values.get(key), Mapping) and "frequencies" not in rope:
                values[key], bound = rotary(rope, values["head_dim"], values["context_length"])
                if bound is not None:
                    bounds.append(bound)
        if bounds:
            values |= {"context_length": min(values["context_length"], *bounds), "bounded": True}
        return pydantic.TypeAdapter(KINDS[kind]).validate_python(values)
    except KeyError as error:
        raise ValueError(f"{name}: {error} is missing") from None
    except pydantic.ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f"{name}: {wrong}") from None


# --- writing ----------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(values, indent=1) + "\n")


def write_model(
    folder: Path,
    config: Config,
    *,
    eos: tuple[int, ...],
    decoder_start: tuple[int, ...],
    vocab_size: int,
    tokenizer: tokenizers.Tokenizer | None,
    banned: tuple[int, ...] = (),
) -> None:
    """Describe the model whose params the checkpoints of ``folder`` hold."""
    if tokenizer is not None:
        tokenizer.backend.save_pretrained(str(folder))
    values = {
        "architecture": describe(config),
        "eos": list(eos),
        "decoder_start": list(decoder_start),
        "vocab_size": vocab_size,
        "banned": list(banned),
    }
    write_json(folder / MODEL, values)


# --- reading ----------------------------------------------------------------------------------------


def complete_steps(checkpoints: Path) -> list[int]:
    """The steps of which there is a whole checkpoint, ascending. Unfinished ones do not count."""
    if not checkpoints.is_dir():
        return []
    folders = [path for path in checkpoints.iterdir() if path.name.isdigit()]
    return sorted(int(path.name) for path in folders if (path / COMPLETE).is_file())


def abstract(tree: PyTree) -> PyTree:
    """Shapes, dtypes and placement of a tree of arrays, not the arrays: orbax guesses no placement."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None) or here)

    return jax.tree.map(leaf, tree)


@dataclasses.dataclass(frozen=True)
class Run:
    """What `load_run` finds; the fields of a `jspec.Model`."""

    config: Config
    params: PyTree
    tokenizer: tokenizers.Tokenizer | None
    eos: tuple[int, ...]
    decoder_start: tuple[int, ...]
    vocab_size: int
    banned: tuple[int, ...]
    step: int


def is_run(folder: Path) -> bool:
    """Whether training made this folder."""
    return (folder / MODEL).is_file()


def load_run(folder: Path, dtype: DTypeLike = "float32", *, mesh: Mesh | None = None) -> Run:
    """A model that training made, at the step its ``DONE`` names, else at its newest complete checkpoint.

    Only params are read, no optimizer state.

    Args:
      mesh: where the params go (`parallel.param_shardings`), whatever mesh they were trained on; None: to
        this process' first device. A drafter belongs on its target's mesh (`parallel.check_together`).

    Raises:
      FileNotFoundError: there is no complete checkpoint.
      ValueError: a broken description, a checkpoint of other shapes, or a dtype that the model overflows.
    """
    values = _read(folder / MODEL)
    steps = complete_steps(folder / CHECKPOINTS)
    step = _read(folder / DONE)["step"] if (folder / DONE).is_file() else max(steps, default=None)
    if step is None or step not in steps:
        raise FileNotFoundError(f"{folder}: there is no complete checkpoint (yet)")
    config = architecture(values["architecture"], f"{folder / MODEL}: architecture")
    check_dtype(config, dtype)
    wanted = abstract_params(config)
    wanted = (
        abstract(wanted)
        if mesh is None
        else parallel.abstract(wanted, parallel.param_shardings(mesh, wanted, config))
    )
    try:
        path = str((folder / CHECKPOINTS / str(step)).absolute())
        params = ocp.load_checkpointables(path, {"params": wanted})["params"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{folder}: checkpoint {step}: {str(error).splitlines()[0]}") from error
    return Run(
        config,
        cast(params, dtype),
        tokenizers.from_folder(folder),
        tuple(values["eos"]),
        tuple(values["decoder_start"]),
        values["vocab_size"],
        tuple(values.get("banned", ())),  # descriptions of earlier versions have none
        step,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got: {error}") from None
