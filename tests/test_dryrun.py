"""The dry run of a small model says what the real one then takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from test_parallel import result, start
from typer.testing import CliRunner

from experiments import dryrun
from experiments.__main__ import app
from training import config

SIZES = {"kind": "encoder-decoder", "vocab_size": 256, "num_encoder_layers": 2, "head_dim": 16}
SETTINGS = {
    "name": "small",
    "target": {**SIZES, "width": 128, "mlp_width": 256, "num_layers": 2, "num_heads": 8},
    "drafter": {**SIZES, "width": 64, "mlp_width": 128, "num_layers": 1, "num_heads": 4},
    "step": {
        "batch_size": 8,
        "source": 16,
        "target": 8,
        "optimizers": [{"name": "adafactor"}, {"name": "adamw"}],
    },
    "decoding": {"batch_size": 8, "source": 16, "capacity": 37, "gamma": 2},
    "meshes": [{"data": 2, "model": 4}],
    "layers": 1,
}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "dryrun.yaml"
    path.write_text(yaml.safe_dump(SETTINGS | changes), encoding="utf-8")
    return path


@pytest.mark.slow
def test_bytes_are_those_of_real_arrays(tmp_path):
    found = result(start("dry_run", str(tmp_path), str(write(tmp_path))))
    assert found["said"] == found["held"]
    (step, layers, collectives, temporaries), (round_, *_) = found["programs"]
    assert (step, layers, round_) == ("training step, adafactor", 1, "decode round")
    assert collectives["all-gather"] > 0  # fully sharded weights are made whole where they are used
    assert collectives["all-reduce"] > 0
    assert temporaries > 0


def test_the_configuration_that_comes_with_the_project():
    folder = Path(__file__).parent.parent / "configs"
    settings = config.load(folder / "dryrun_t5_xxl.yaml", dryrun.DryRun)
    assert dryrun.parameters(settings.target) == 11_135_332_352  # of google/t5-v1_1-xxl
    assert dryrun.parameters(settings.drafter) == 76_961_152  # of google/t5-v1_1-small
    assert [mesh.data * mesh.model for mesh in settings.meshes] == [4, 16]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": {"kind": "decoder"}}, "target"),
        ({"meshes": []}, "meshes"),
        ({"mesh": 4}, "mesh: unknown key"),
    ],
)
def test_wrong_configurations(tmp_path, changes, message):
    outcome = CliRunner().invoke(app, ["dry-run", "--config", str(write(tmp_path, **changes))])
    assert outcome.exit_code == 1
    assert message in outcome.stderr
