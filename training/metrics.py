"""What a run tells: a JSONL file, TensorBoard events, and a progress bar with the loss and the time left."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import jax
import rich.console
import rich.progress
from tensorboardX import SummaryWriter

FILE = "metrics.jsonl"


class Metrics:
    """The files and the bar of one run, opened behind ``step``.

    ``metrics.jsonl`` has a line for every training step and every evaluation, each with ``step`` and numbers
    that depend on nothing but the run's inputs; so lines that lie beyond the checkpoint a run resumes from
    are cut off, and come again. Times stand in TensorBoard's events.
    """

    def __init__(self, folder: Path, step: int, steps: int, console: rich.console.Console | None = None):
        self._console = console or rich.console.Console(quiet=True)
        self._file: IO[str] | None = None
        if jax.process_index() == 0:  # of several hosts, one writes
            truncate(folder / FILE, step)
            self._file = (folder / FILE).open("a", encoding="utf-8")
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, flush_secs=30)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[loss]}"),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("left"),
            rich.progress.TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task(folder.name, total=steps, completed=step, loss="")
        self._bar.start()

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of one training step."""
        self._write(step, values)
        self._bar.update(self._task, completed=step, loss=f"loss {values['loss']:.4f}")

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of an evaluation, printed as well."""
        self._write(step, values)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self._console.print(f"step {step}: {shown}", highlight=False, soft_wrap=True)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def flush(self) -> None:
        """Put everything on the disk: no checkpoint may know a step that this file does not."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """End the bar and close the files."""
        self._bar.stop()
        if self._file is not None:
            self._file.close()
            self._board.close()


def read(path: Path) -> list[dict[str, float]]:
    """The complete lines of a metrics file, in order; [] if there is none."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(True) if line[-1] == "\n"
    ]


def truncate(path: Path, step: int) -> None:
    """Drop what lies beyond ``step``, and a line that was not finished; atomically, and only if needed."""
    if not path.exists():
        return
    kept = "".join(json.dumps(row) + "\n" for row in read(path) if row["step"] <= step)
    if kept != path.read_text(encoding="utf-8"):
        fresh = path.with_suffix(".tmp")
        fresh.write_text(kept, encoding="utf-8")
        os.replace(fresh, path)
