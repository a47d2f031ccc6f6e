"""The drafter that comes with the package, on the model that it was trained for."""

import json
from pathlib import Path

import pytest

import jspec
from experiments import study, table
from jspec.drafters import files

pytestmark = pytest.mark.smollm2
FOLDER = files.SHIPPED / "smollm2-135m"


def test_it_is_small_and_says_where_it_comes_from():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 24e6
    told = json.loads((FOLDER / "config.json").read_text())
    assert told["about"]["target"] == "smollm2-135m"
    assert "text" in told["about"]
    assert "command" in told["about"]
    assert (FOLDER / "SOURCE.md").is_file()


def test_it_is_no_model_of_its_own():
    with pytest.raises(ValueError, match=r"expected a model, got a drafter of kind 'eagle3', which jspec"):
        jspec.load(FOLDER)


def test_it_foresees_its_target():
    """Plain decoding's tokens, and clearly more than one a round: a net that reads the wrong place or other
    layers drafts nothing that is kept."""
    model = jspec.load("smollm2-135m")
    prompt = ["Name three things that a beginner should know about growing tomatoes."]
    options = {"max_new_tokens": 40, "chat": True}
    plain = jspec.generate(model, prompt, **options)
    demo = study.load(Path(__file__).parents[1] / "configs" / "demo_smollm2.yaml")
    (row,) = (row for row in demo.drafters if row.drafter == "trained")
    out = jspec.generate(model, prompt, drafter=table.build(row, model).drafter, **options)
    assert out.tokens == plain.tokens
    assert out.stats.mean_accepted_length > 1.3
