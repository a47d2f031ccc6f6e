"""A trained model for everybody else: a Hugging Face folder of it."""

from __future__ import annotations

from pathlib import Path

import jspec
from jspec.io import hf, orbax


def run(run_dir: str | Path, folder: str | Path) -> Path:
    """Write the model of a run (as `jspec.load` reads it) as a folder that transformers loads.

    Returns the folder. See `jspec.io.hf.save_hf`: the weights are float32, as they were trained, and logits
    of transformers equal ours to rounding.

    Raises:
      FileNotFoundError: ``run_dir`` is no run, or has no complete checkpoint yet.
      ValueError: no known checkpoint can express the architecture, or ``folder`` is not empty.
    """
    run_dir = Path(run_dir).expanduser()
    if not orbax.is_run(run_dir):
        raise FileNotFoundError(f"run: expected a folder that training made, got {run_dir}")
    return hf.save_hf(jspec.load(run_dir), folder)
