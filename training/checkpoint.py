"""Checkpoints of a run: complete or not there, the last few kept, one clear error when the disk is full."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from jspec.io import orbax
from jspec.types import PyTree
from training import hosts

policies = ocp.training.preservation_policies


class Checkpoints:
    """``folder/<step>/``, each with two trees: ``params``, and ``rest`` (optimizer state and step).

    Orbax writes a checkpoint beside its place, marks it as complete and then renames it, so a process that is
    killed leaves a folder of another name. What is not marked (a copy that was interrupted, say) is no
    checkpoint either: it is not listed, and removed when the run is opened again.
    """

    def __init__(self, folder: Path, keep: int, best: bool) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        hosts.on_first(self._clear)
        preserved: Any = policies.LatestN(n=keep)
        if best:
            lowest = policies.BestN(
                get_metric_fn=_validation_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False
            )
            preserved = policies.AnyPreservationPolicy([preserved, lowest])
        self._checkpointer = ocp.training.Checkpointer(str(self.folder), preservation_policy=preserved)

    def _clear(self) -> None:
        complete = orbax.complete_steps(self.folder)
        for path in self.folder.iterdir():
            if path.is_dir() and path.name not in map(str, complete):
                _remove(path)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        return max(orbax.complete_steps(self.folder), default=None)

    def save(self, step: int, params: PyTree, rest: PyTree, metrics: dict[str, float] | None) -> None:
        """Write one, and return when it is complete.

        Raises:
          OSError: it could not be written; the earlier ones are as they were.
        """
        try:
            self._checkpointer.save_checkpointables(
                step,
                {"params": params, "rest": rest},
                force=True,
                metrics=None if metrics is None else {**metrics},
            )
        except Exception as error:  # orbax and tensorstore raise many kinds for a disk that does not take it
            raise OSError(
                f"checkpoint: could not write step {step} to {self.folder}: {_reason(error)}; "
                f"the last good checkpoint is {self.last_good()}"
            ) from error

    def last_good(self) -> str:
        """For messages."""
        step = self.latest()
        return "none" if step is None else f"step {step}"

    def restore(self, step: int, params: PyTree, rest: PyTree) -> tuple[PyTree, PyTree]:
        """Both trees, with shapes, dtypes and placement of the arrays (or abstract arrays) given."""
        loaded = self._checkpointer.load_checkpointables(
            step, {"params": orbax.abstract(params), "rest": orbax.abstract(rest)}
        )
        return loaded["params"], loaded["rest"]

    def close(self) -> None:
        """Release what orbax holds. A save that failed was told by `save`; orbax would tell it again."""
        with contextlib.suppress(Exception):
            self._checkpointer.close()


def _remove(path: Path) -> None:
    """Remove a folder into which threads of a save that failed, in this process, may still be writing."""
    for seconds in (0.1, 0.5, 2):
        try:
            return shutil.rmtree(path)
        except OSError:
            time.sleep(seconds)
            if not path.exists():
                return None
    return shutil.rmtree(path)


def _validation_loss(metrics: PyTree) -> float:
    return metrics["validation_loss"]


def _reason(error: BaseException) -> str:
    """The first line of the innermost error: the operating system's words, where there are any."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
