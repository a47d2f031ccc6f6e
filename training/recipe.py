"""What recipes share: their data, the folder of a run, and the steps from one to the other."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import pydantic
import rich.console
import yaml
from jax.sharding import Mesh
from jaxtyping import Array

from jspec import parallel
from jspec.checkpoint import Model, load
from jspec.io import orbax
from jspec.types import PyTree
from training import data, hosts, readers
from training.config import Batching, Strict, Training, differences

CONFIG, INPUTS = "config.yaml", "inputs.json"
ROWS = "rows_multiple"  # among the inputs: see `shape_inputs`
# What a run without checkpoint leaves beside those two. The description goes first: while it is there, the
# tokenizer is (`describe`).
MADE = (orbax.MODEL, "tokenizer*.json", "chat_template.jinja", "metrics.jsonl", "text/drafter_*")
# What configurations name by its place, and the inputs that tell what is there: models may move.
PLACES = {
    "target": ("target", "vocabulary"),
    "checkpoint": ("checkpoint",),
    "drafter": ("drafter",),
    "drafter.checkpoint": ("drafter",),
    "token_filter.reference": ("reference",),
    "init": ("init",),
    "model.checkpoint": ("model",),
}
Texts = Sequence[data.Record] | Sequence[data.Example]


class Data(Strict):
    """Where the text of a run comes from, for the command line."""

    train: readers.DataConfig
    validation: readers.DataConfig


class Corpus(NamedTuple):
    """Text to train on and to evaluate with: records, or examples where there is no tokenizer."""

    train: Texts
    validation: Texts


def read(config: Data | None, folder: str | Path) -> Corpus:
    """The corpus that a configuration file names.

    Raises:
      ValueError: the file names none; see `readers.read` for the others.
    """
    if config is None:
        raise ValueError("data: expected train and validation in the configuration, got none")
    found = [readers.read(part, folder) for part in (config.train, config.validation)]
    for name, part in zip(Corpus._fields, found, strict=True):
        if part.skipped:
            _say(f"{name}: left out {part.skipped} pairs with an empty side")
    return Corpus(*(part.records for part in found))


def _say(text: str) -> None:
    rich.console.Console(stderr=True).print(text, highlight=False, soft_wrap=True)


# --- text -------------------------------------------------------------------------------------------


class Encoding(Protocol):
    """The settings of a recipe's configuration that say how its texts become tokens."""

    @property
    def limits(self) -> data.Limits:
        """What is cut or left out."""
        ...

    @property
    def chat(self) -> bool:
        """Whether sources are a user's messages."""
        ...


def encoded(config: Encoding, model: Model, texts: Texts, name: str) -> list[data.Example]:
    """Token ids as a model is given them; see `data.encode`. What was cut or left out is said on standard
    error."""
    if not texts:
        raise ValueError(f"{name}: expected at least one text, got none")
    if isinstance(texts[0], data.Example):
        return list(texts)  # type: ignore[arg-type]
    if model.tokenizer is None:
        raise ValueError(f"{name}: expected examples (token ids), because there is no tokenizer, got text")
    try:
        examples, counts = data.encode(
            texts,  # type: ignore[arg-type]
            model.tokenizer,
            encoder=bool(model.decoder_start),
            limits=config.limits,
            chat=config.chat,
            banned=model.banned,
        )
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if counts.examples != len(texts) or counts.truncated_sources or counts.truncated_targets:
        _say(f"{name}: {counts}")
    return examples


def check_positions(name: str, examples: Sequence[data.Example], *models: Model) -> None:
    """Refuse texts that are longer than the positions of a model have an end.

    Raises:
      ValueError: the longest one's length, and the number of positions.
    """
    for model in models:
        config, encoder = model.lm.config, bool(model.decoder_start)
        if not config.bounded:
            continue
        begins = [len(model.decoder_start) if encoder else len(example.source) for example in examples]
        longest = max(a + len(e.target) - 1 for a, e in zip(begins, examples, strict=True))
        told = [("answers" if encoder else "source and answer together", longest, config.context_length)]
        if encoder:
            told.append(("sources", max(len(e.source) for e in examples), config.source_length))
        for what, length, positions in told:
            if length > positions:
                raise ValueError(
                    f"limits: expected {what} of at most {positions} tokens, for {model.name} has no more "
                    f"positions, got {length} in {name}"
                )


def batches(
    examples: Sequence[data.Example],
    batching: Batching,
    training: Training,
    decoder_start: Sequence[int],
    *,
    mesh: Mesh | None = None,
    shuffle: bool = True,
) -> data.Batches:
    """`data.Batches` with a configuration's settings. Rows divide among micro-batches and devices."""
    return data.Batches(
        examples,
        decoder_start=decoder_start,
        batch_size=batching.batch_size,
        max_tokens=batching.max_tokens,
        buckets=batching.buckets,
        multiple=batching.multiple,
        rows_multiple=_rows_multiple(training, mesh),
        seed=training.seed,
        shuffle=shuffle,
    )


def _rows_multiple(training: Training, mesh: Mesh | None) -> int:
    return training.accumulate * (1 if mesh is None else mesh.shape[parallel.DATA])


def shape_inputs(batching: Batching, training: Training, mesh: Mesh | None) -> dict[str, int]:
    """What the rows of batches depend on beside the configuration, as inputs of the run: with ``max_tokens``
    they are rounded down to what the mesh divides. A ``batch_size`` is the same on every mesh, or refused."""
    return {} if batching.max_tokens is None else {ROWS: _rows_multiple(training, mesh)}


def held_out(
    examples: Sequence[data.Example],
    batching: Batching,
    training: Training,
    decoder_start: Sequence[int],
    mesh: Mesh | None = None,
) -> list[PyTree]:
    """Every example once, in order: what evaluations go over, again and again. Two shapes, of its own: an
    evaluation is short, and those of the training set may be too small."""
    found = once(examples, batching, training, decoder_start, mesh)
    return [parallel.shard_batch(mesh, found[step]) for step in range(found.steps_per_epoch)]


def once(
    examples: Sequence[data.Example],
    batching: Batching,
    training: Training,
    decoder_start: Sequence[int],
    mesh: Mesh | None = None,
) -> data.Batches:
    """The batches of `held_out`, on the host."""
    batching = batching.model_copy(update={"buckets": 2})
    return batches(examples, batching, training, decoder_start, mesh=mesh, shuffle=False)


# --- models -----------------------------------------------------------------------------------------


def given(name: str, model: Model | None, checkpoint: str | None, dtype: str) -> Model:
    """The model that is given, or the one that a configuration names.

    Raises:
      ValueError: there is neither; ``name`` is the setting's.
    """
    if model is not None:
        return model
    if checkpoint is None:
        raise ValueError(f"{name}: expected a checkpoint or a run's folder, got none")
    return load(checkpoint, dtype)


def describe(folder: Path, model: Model) -> None:
    """Write what `jspec.load` has to know of the model that is trained in ``folder``, unless it is there.

    The description comes last and every file whole, so that a run which was killed meanwhile is started again
    with a tokenizer that is whole, or with none.
    """

    def write() -> None:
        if orbax.is_run(folder):
            return
        fresh = folder / ".description"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        orbax.write_model(
            fresh,
            model.lm.config,
            eos=model.eos,
            decoder_start=model.decoder_start,
            vocab_size=model.vocab_size,
            tokenizer=model.tokenizer,
            banned=model.banned,
        )
        for path in sorted(fresh.iterdir(), key=lambda path: path.name == orbax.MODEL):
            os.replace(path, folder / path.name)
        fresh.rmdir()

    hosts.on_first(write)


def on_mesh(mesh: Mesh | None, model: Model) -> Model:
    """A model that is not trained, with its params on the mesh; as it is without one."""
    if mesh is None:
        return model
    placed = parallel.param_shardings(mesh, model.params, model.lm.config)
    return dataclasses.replace(model, params=parallel.shard(model.params, placed))


def shardings(mesh: Mesh | None, model: Model) -> PyTree | None:
    """Where trained params go: cut along both axes of the mesh."""
    if mesh is None:
        return None
    return parallel.param_shardings(mesh, model.params, model.lm.config, parallel.FULLY_SHARDED)


# --- the folder -------------------------------------------------------------------------------------


def open_folder(folder: Path, config: pydantic.BaseModel, inputs: Mapping[str, Any]) -> bool:
    """Make a run's folder, or check that it belongs to this run. Returns whether the run is finished.

    A run of another configuration that has come to no checkpoint yet has nothing to lose: it is replaced.
    Keys that the stored configuration lacks count as their defaults, and inputs that it lacks as equal, so
    that a version with more of them reads what an earlier one made. Where a model lies is no difference.

    Args:
      config: kept as ``config.yaml``; the same file starts the run again.
      inputs: what else the result depends on (the recipe's name, fingerprints of data and models).

    Raises:
      ValueError: the folder was made with another configuration or other inputs, which the message names, or
        with a mesh that gives its batches other rows, or it holds something else. A finished run has no more
        batches, and may be read on any mesh.
      OSError: the folder cannot be written.
    """
    inputs = json.loads(json.dumps(inputs))

    def opened() -> bool:
        try:
            return _opened(folder, config, inputs)
        except OSError as error:
            raise OSError(f"output: cannot write to {folder}: {error.strerror or error}") from error

    return hosts.on_first(opened)


def _opened(folder: Path, config: pydantic.BaseModel, inputs: Mapping[str, Any]) -> bool:
    finished = (folder / orbax.DONE).is_file()
    folder.mkdir(parents=True, exist_ok=True)
    changed = _changes(folder, config, inputs)
    if finished and changed is not None:
        changed = [key for key in changed if key != ROWS]
    if changed and (finished or orbax.complete_steps(folder / orbax.CHECKPOINTS)):
        if changed == [ROWS]:
            begun = json.loads((folder / INPUTS).read_text(encoding="utf-8"))[ROWS]
            raise ValueError(
                f"mesh: {folder} was begun with batches whose rows are multiples of {begun}, expected a mesh "
                f"with the same, got multiples of {inputs[ROWS]} (the mesh's data axis times accumulate): "
                "with max_tokens its batches would be others"
            )
        raise ValueError(
            f"output: {folder} was made with another configuration, which differs in "
            f"{', '.join(changed)}; expected the same one, or a new folder"
        )
    if changed:
        # The old inputs stand until the new ones do: they say whose folder this is.
        for made in (path for pattern in MADE for path in folder.glob(pattern)):
            made.unlink()
    if changed != []:
        orbax.write_json(folder / INPUTS, inputs)
        settings = config.model_dump(mode="json")
        orbax.write_text(folder / CONFIG, yaml.safe_dump(settings, sort_keys=False))
    return finished


def _changes(folder: Path, config: pydantic.BaseModel, inputs: Mapping[str, Any]) -> list[str] | None:
    """What differs from the run that ``folder`` was made for; None if it is new.

    Raises:
      ValueError: the folder was made for no run.
    """
    if not (folder / INPUTS).is_file():
        if any(path.name != f"{INPUTS}.tmp" for path in folder.iterdir()):  # of a start that was killed
            raise ValueError(
                f"output: {folder} holds files and is no run (it has no {INPUTS}); expected a new folder"
            )
        return None
    if not (folder / CONFIG).is_file():
        return [CONFIG]  # killed between the two
    old = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    with contextlib.suppress(pydantic.ValidationError):  # of a version with other rules: as it stands
        old = type(config).model_validate(old).model_dump(mode="json")
    before = json.loads((folder / INPUTS).read_text(encoding="utf-8"))
    known = {name: value for name, value in inputs.items() if name in before}
    moved = {key for key, told in PLACES.items() if not before.keys().isdisjoint(told)}
    changed = [key for key in differences(old, config.model_dump(mode="json")) if key not in moved]
    return changed + differences(before, known)


def origin(name: str, corpus: Corpus) -> dict[str, Any]:
    """The first of a run's inputs: the recipe and its text."""
    texts = {part: text_fingerprint(texts) for part, texts in zip(Corpus._fields, corpus, strict=True)}
    return {"recipe": name, **texts}


def text_fingerprint(examples: Sequence[Any]) -> str:
    """Of examples or records: equal for equal ones in equal order.

    >>> text_fingerprint([([1, 2], [3])]) == text_fingerprint([([1], [2, 3])])
    False
    """
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(example).encode())
    return digest.hexdigest()[:16]


@jax.jit
def _checksum(x: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32).reshape(-1)
    order = jax.lax.iota(jnp.uint32, bits.shape[0]) * jnp.uint32(2) + jnp.uint32(1)
    return (bits * order).sum(dtype=jnp.uint32)  # modulo 2**32: the same in whatever order it is summed


def _told(value: Any) -> Any:
    """A configuration as JSON values, without what is as its defaults have it: a field that a later version
    adds says nothing of a model that does not use it.

    >>> from jspec.models.rotary import Rotary
    >>> _told((Rotary((1.0,)), Rotary((1.0,), scale=2.0)))
    [['Rotary', {'frequencies': [1.0]}], ['Rotary', {'frequencies': [1.0], 'scale': 2.0}]]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {
            field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)
        }
        return [
            type(value).__name__,
            {name: _told(x) for name, (x, default) in given.items() if x != default},
        ]
    if isinstance(value, tuple | list):
        return [_told(x) for x in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def model_fingerprint(config: Any, params: PyTree) -> str:
    """Of a model: equal for equal architecture, weights and precision, wherever these lie.

    It is computed leaf by leaf, where the leaves are; those that are bound to no device go to the default
    one, so for what was made under `parallel.on_host` this belongs there, too.
    """
    leaves = jax.tree.leaves(params)
    told = json.dumps(_told(config), sort_keys=True) if dataclasses.is_dataclass(config) else repr(config)
    content = [told, [int(_checksum(x)) for x in leaves]]
    floats = [str(x.dtype) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    if set(floats) - {"float32"}:  # weights that are rounded already compute otherwise in another precision
        content.append(floats)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def speech_fingerprint(model: Model) -> str:
    """Of how a model is spoken to and when it stops, which is no part of its weights."""
    tokenizer = model.tokenizer
    template = None if tokenizer is None else getattr(tokenizer.backend, "chat_template", None)
    told = [model.eos, model.decoder_start, model.banned, model.vocab_size, template]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def check_vocabulary(name: str, target: Model, model: Model) -> None:
    """Refuse a model that speaks another vocabulary than the target.

    Raises:
      ValueError: naming what differs.
    """
    if target.vocabulary is not None and model.vocabulary is not None:
        index = target.vocabulary.first_difference(model.vocabulary)
        if index is not None:
            raise ValueError(f"{name}: expected the target's vocabulary, but token {index} differs")
    elif target.vocab_size != model.vocab_size:
        raise ValueError(f"{name}: expected the target's {target.vocab_size} tokens, got {model.vocab_size}")


def check_kind(name: str, target: Model, model: Model) -> None:
    """Refuse a model without encoder for a target with one, and the other way round."""
    wanted, found = (("decoder", "encoder-decoder")[bool(m.decoder_start)] for m in (target, model))
    if wanted != found:
        raise ValueError(f"{name}: expected a model of the target's kind, {wanted}, got {found}")
