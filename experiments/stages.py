"""Stages of a long experiment: each is done once, can be interrupted anywhere, and its time is kept.

``times.json`` has the seconds that every stage took, over all attempts, so that the total of a run that was
killed and started again is known, and the environment of its last attempt: a table may be made by several
processes, commits and machines. It is brought up to date every few seconds while a stage runs.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rich.console

from experiments import environment
from jspec.io import orbax

TIMES = "times.json"
BEAT = 5.0  # seconds between two updates of the file


class Stages:
    """The stages of the experiment in ``folder``; a line for each is printed.

    Attributes:
      environments: those of all stages.
      times: stage -> ``seconds`` (of all attempts), ``attempts``, ``done``, and ``environment``, the index of
        that of the last attempt; stages of older files have none.
    """

    def __init__(self, folder: Path, console: rich.console.Console) -> None:
        self.folder, self.console = folder, console
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / TIMES
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.environments: list[dict[str, str]] = stored.get("environments", [])
        self.times: dict[str, dict[str, Any]] = stored.get("stages", {})

    @property
    def total(self) -> float:
        """Seconds of all stages and attempts."""
        return sum(stage["seconds"] for stage in self.times.values())

    @contextlib.contextmanager
    def timed(self, name: str, done: bool = False) -> Iterator[None]:
        """Time what happens within. ``done``: it was finished before, so that this is no attempt."""
        if done:
            self.console.print(f"{name}: there already", highlight=False)
            yield
            return
        environment.make_room()
        entry = self.times.setdefault(name, {"seconds": 0.0, "attempts": 0, "done": False})
        here = environment.current()
        if here not in self.environments:
            self.environments.append(here)
        entry |= {"attempts": entry["attempts"] + 1, "environment": self.environments.index(here)}
        before, begun, over = entry["seconds"], time.monotonic(), threading.Event()

        def note() -> None:
            entry["seconds"] = round(before + time.monotonic() - begun, 1)
            content = {"total": round(self.total, 1), "environments": self.environments, "stages": self.times}
            orbax.write_json(self.folder / TIMES, content)

        def beat() -> None:
            while not over.wait(BEAT):
                with contextlib.suppress(OSError):  # a disk that is full is the stage's to find
                    note()

        note()
        heart = threading.Thread(target=beat, daemon=True)
        heart.start()
        try:
            yield
            entry["done"] = True
        finally:
            over.set()
            heart.join()
            note()
        again = f", {entry['attempts']} attempts" if entry["attempts"] > 1 else ""
        self.console.print(f"{name}: {clock(entry['seconds'])}{again}", highlight=False)

    def kept(self, name: str, inputs: Any, function: Callable[[], Any]) -> Any:
        """The JSON value of ``function()``, kept in a file below ``measured/`` with ``inputs`` (JSON, too).

        With the same inputs it is read from there; other inputs are another measurement and replace it. The
        file names the environment that the value was made in, which is none of the inputs. Objects are equal
        in whatever order their keys are: inputs whose order matters are lists.
        """
        path = self.folder / "measured" / (re.sub(r"[^\w.=]+", "-", name) + ".json")
        inputs = json.loads(json.dumps(inputs))
        if path.is_file():
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["inputs"] == inputs:
                with self.timed(name, done=True):
                    return stored["value"]
        with self.timed(name):
            value = json.loads(json.dumps(function()))
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"inputs": inputs, "environment": environment.current(), "value": value}
            orbax.write_json(path, content)
        return value

    def origins(self, label: Callable[[str], str | None]) -> str:
        """By which code and where the stages were made, as Markdown: a list for each environment.

        Args:
          label: what to call a stage; stages of one label are one, None: leave it out.
        """
        made: dict[int | None, dict[str, None]] = {}
        for name, entry in self.times.items():
            if (called := label(name)) is not None:
                made.setdefault(entry.get("environment"), {})[called] = None
        return "\n\n".join(
            f"Made by ({'; '.join(names)}):\n\n"
            + ("* not recorded" if index is None else environment.listing(self.environments[index]))
            for index, names in made.items()
        )


def clock(seconds: float) -> str:
    """Seconds, or minutes and seconds.

    >>> clock(7.21), clock(754)
    ('7.2 s', '12 min 34 s')
    """
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
