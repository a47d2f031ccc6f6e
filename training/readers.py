"""Pairs of texts from files or the Hub: JSONL, TSV, parallel text files, Hub data sets, several of these.

What a reader cannot make a pair of is an error that names the file and the line. Nothing is left out
silently: pairs with an empty side are an error or, with ``skip_empty``, counted.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pydantic

from training.config import Count, Strict
from training.data import Record


class _Source(Strict):
    prefix: str = ""  # put before every source: "translate English to German: "
    max_records: Count | None = None  # the first so many; None: all
    skip_empty: bool = False  # leave out pairs with an empty side, instead of refusing them


class Jsonl(_Source):
    """One JSON object a line. Keys may be paths ("translation.en", "target.0"); lists are joined."""

    format: Literal["jsonl"]
    file: str
    source: str
    target: str


class Tsv(_Source):
    """Columns between tabs, no quoting: by number (from 0), or by name if the first line names them."""

    format: Literal["tsv"]
    file: str
    source: Annotated[int, pydantic.Field(ge=0, strict=True)] | str = 0
    target: Annotated[int, pydantic.Field(ge=0, strict=True)] | str = 1

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Tsv:
        if isinstance(self.source, str) != isinstance(self.target, str):
            raise ValueError(f"columns: expected two numbers or two names, got {self.source}, {self.target}")
        return self


class Parallel(_Source):
    """Two text files: line n of one belongs to line n of the other."""

    format: Literal["parallel"]
    source: str
    target: str


class Hub(_Source):
    """A data set of the Hugging Face Hub, read by the package ``datasets``.

    A folder of that name in the data folder is read in its place (a mirror, a machine without network).
    Columns may be paths, as for `Jsonl`.
    """

    format: Literal["hub"]
    id: str
    split: str
    config: str | None = None
    revision: str | None = None
    source: str
    target: str


One = Annotated[Jsonl | Tsv | Parallel | Hub, pydantic.Field(discriminator="format")]


class Several(Strict):
    """Data sets one after the other."""

    format: Literal["several"]
    parts: Annotated[tuple[One, ...], pydantic.Field(min_length=1)]


DataConfig = Annotated[Jsonl | Tsv | Parallel | Hub | Several, pydantic.Field(discriminator="format")]


class Corpus(NamedTuple):
    """What was read; ``skipped``: how many pairs with an empty side were left out."""

    records: list[Record]
    skipped: int


class _Pair(NamedTuple):
    source: str
    target: str
    places: tuple[str, str]  # of the two sides, for messages


def read(config: DataConfig, folder: str | Path = ".") -> Corpus:
    """The pairs that ``config`` describes; its paths are relative to ``folder``.

    Raises:
      FileNotFoundError: there is no such file or data set.
      ValueError: a line that is no pair, files of different numbers of lines, an empty side, no pair at all.
      ImportError: a Hub data set without the package ``datasets``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.tsv").write_text("one\\teins\\ntwo\\tzwei\\n")
    ...     read(Tsv(format="tsv", file="a.tsv", prefix="en-de: "), folder).records[1]
    Record(source='en-de: two', target='zwei')
    """
    if isinstance(config, Several):
        parts = [read(part, folder) for part in config.parts]
        records = [record for part in parts for record in part.records]
        return Corpus(records, sum(part.skipped for part in parts))
    pairs = itertools.islice(_READERS[config.format](config, Path(folder).expanduser()), config.max_records)
    records: list[Record] = []
    skipped = 0
    for pair in pairs:
        empty = next((i for i in (0, 1) if not pair[i].strip()), None)
        if empty is None:
            records.append(Record(config.prefix + pair.source, pair.target))
        elif config.skip_empty:
            skipped += 1
        else:
            more = _empty(pairs)
            raise ValueError(
                f"{pair.places[empty]}: expected text, got an empty {_Pair._fields[empty]} "
                f"(pair {len(records) + 1}, and {more} more pairs like it; skip_empty: true leaves them out)"
            )
    if not records:
        raise ValueError(f"{config.format} data: expected at least one pair, got none ({skipped} empty)")
    return Corpus(records, skipped)


def _empty(pairs: Iterator[_Pair]) -> int:
    """How many pairs have an empty side, up to the first line that is no pair."""
    number = 0
    with contextlib.suppress(ValueError):  # the empty side came first, and is the error to tell
        for pair in pairs:
            number += not (pair.source.strip() and pair.target.strip())
    return number


# --- text files -------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[str]:
    """Lines end at "\\n" alone: a stray form feed or U+2028 must not shift one file against another."""
    if not path.is_file():
        raise FileNotFoundError(
            f"data: no such file: {path.resolve()} (the command's --data DIR says where files are)"
        )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}:{number}: expected UTF-8, got {line[error.start : error.end]!r}"
                ) from None


def _parallel(config: Parallel, folder: Path) -> Iterator[_Pair]:
    paths = folder / config.source, folder / config.target
    sides = [list(_lines(path)) for path in paths]
    if len(sides[0]) != len(sides[1]):
        short, long = sorted((0, 1), key=lambda i: len(sides[i]))
        raise ValueError(
            f"{paths[short]}: expected {len(sides[long])} lines, as many as {paths[long]} has, got "
            f"{len(sides[short])}: line {len(sides[short]) + 1} has no partner"
        )
    for number, (source, target) in enumerate(zip(*sides, strict=True), 1):
        yield _Pair(source, target, (f"{paths[0]}:{number}", f"{paths[1]}:{number}"))


def _tsv(config: Tsv, folder: Path) -> Iterator[_Pair]:
    path = folder / config.file
    lines = enumerate(_lines(path), 1)
    columns = config.source, config.target
    if isinstance(config.source, str):
        names = next(lines, (1, ""))[1].split("\t")
        for name in columns:
            if name not in names:
                raise ValueError(f"{path}:1: expected a column named {name!r}, got {', '.join(names)}")
        columns = names.index(str(config.source)), names.index(str(config.target))
    source, target = (int(column) for column in columns)
    for number, line in lines:
        place, fields = f"{path}:{number}", line.split("\t")
        if len(fields) <= max(source, target):
            raise ValueError(
                f"{place}: expected at least {max(source, target) + 1} columns, got {len(fields)}"
            )
        yield _Pair(fields[source], fields[target], (place, place))


def _jsonl(config: Jsonl, folder: Path) -> Iterator[_Pair]:
    path = folder / config.file
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: expected a JSON object, got {error}") from None
        yield _pair(row, config, place)


# --- rows with keys ---------------------------------------------------------------------------------


def _pair(row: Any, config: Jsonl | Hub, place: str) -> _Pair:
    source, target = (_text(row, key, place) for key in (config.source, config.target))
    return _Pair(source, target, (place, place))


def _text(row: Any, key: str, place: str) -> str:
    """The text at the path ``key``: "translation.en" looks into an object, "target.0" into a list."""
    value = row
    for part in [key] if isinstance(row, Mapping) and key in row else key.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            found = ", ".join(value) if isinstance(value, Mapping) else repr(value)[:80]
            raise ValueError(f"{place}: expected {key!r}, got no {part!r} among: {found}") from None
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return " ".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{place}: {key}: expected text, got {type(value).__name__}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{place}: {key}: expected text, got half a surrogate pair, which is no character")
    return value


def _hub(config: Hub, folder: Path) -> Iterator[_Pair]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ImportError(
            "data: Hub data sets need the package datasets: pip install 'jspec[data]'"
        ) from None
    mirror = folder / config.id
    try:
        if mirror.is_dir():
            rows = datasets.load_dataset(str(mirror), config.config, split=config.split)
        else:
            rows = datasets.load_dataset(
                config.id, config.config, split=config.split, revision=config.revision
            )
    except (OSError, ValueError) as error:  # not there, no network; an unknown config or split
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(f"data set {config.id}: {' '.join(str(error).split())}") from error
    assert isinstance(rows, Iterable)
    for number, row in enumerate(rows):
        yield _pair(row, config, f"data set {config.id}, {config.split} row {number}")


_READERS: Mapping[str, Any] = {"jsonl": _jsonl, "tsv": _tsv, "parallel": _parallel, "hub": _hub}
