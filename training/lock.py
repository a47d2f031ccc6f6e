"""One process of a host at a time works on a run's folder."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from jspec.io import orbax
from training import hosts

try:
    import fcntl
except ImportError:  # no Unix: no locks
    fcntl = None  # pyright: ignore[reportAssignmentType]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def alone(run: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Have a recipe's ``run(config, corpus, output, ...)`` hold its folder (`held`)."""

    @functools.wraps(run)
    def locked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        output = args[2] if len(args) > 2 else kwargs["output"]
        with held(Path(cast(Any, output))):
            return run(*args, **kwargs)

    return locked


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep others out of a run's folder: a second start would remove what the first one is writing.

    The lock is the system's, on a file beside the folder that tells the process id, so that it is gone when
    the process is, however that ended. A finished run is not locked: it is only read. With several hosts,
    process 0 holds it; where files cannot be locked nobody does.

    Raises:
      ValueError: another process works on the folder.
    """
    kept: list[int] = []
    path = folder.absolute().with_name(f".{folder.absolute().name}.lock")

    def take() -> None:
        if not (folder / orbax.DONE).is_file() and (file := _locked(path)) is not None:
            kept.append(file)

    hosts.on_first(take)
    try:
        yield
    finally:
        for file in kept:
            path.unlink(missing_ok=True)
            os.close(file)


def _locked(path: Path) -> int | None:
    """The file, open and locked; None where there are no locks, or no such folder can be written."""
    if fcntl is None:
        return None
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:
            return None  # whoever opens the folder tells it better
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is(file, path):  # its holder has removed it meanwhile
                os.close(file)
                continue
            os.truncate(file, 0)
            os.write(file, f"{os.getpid()}\n".encode())
            return file
        except BlockingIOError:
            holder = os.read(file, 32).decode().strip() or "unknown"
            os.close(file)
            raise ValueError(
                f"output: process {holder} works on {path.parent / path.name[1:].removesuffix('.lock')}; "
                "expected a folder that no other run is in"
            ) from None
        except OSError:
            os.close(file)
            return None


def _is(file: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False
