"""``drafter="auto"``: what is chosen from given timings, and what is stored where."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jspec import auto, drafters, parallel, testing
from jspec.measure import CostCurve, Rounds, Trial
from jspec.text import Model

FREE = CostCurve((1, 64), (1.0, 1.0))
FREE_CHAINS = CostCurve((1, 2, 7, 8, 64), (1.0, 1.1, 1.1, 2.0, 9.0))
STEEP = CostCurve((1, 2, 64), (1.0, 2.0, 64.0))


class Characters:
    """A tokenizer of two tokens."""

    has_chat_template = False
    vocabulary = None

    def encode(self, text):
        return [ord(character) % 2 for character in text][:20]


@pytest.fixture
def model():
    lm, params = testing.table_lm([[0.1, 0.9], [0.8, 0.2]])
    return Model(lm, params, tokenizer=Characters(), name="toy")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jspec" / "auto"


class Fake:
    """Stands in for every measurement: seconds a token by drafter, and a plain output of ``period``."""

    def __init__(self, monkeypatch, curve, seconds, period=3):
        self.curve, self.seconds, self.decoded, self.sources = curve, seconds, [], []
        self.tokens = np.arange(30) % period + 2
        monkeypatch.setattr(auto, "measure_curve", self.measure_curve)
        monkeypatch.setattr(auto, "decode", self.decode)

    def measure_curve(self, target, params, widths, **settings):
        return self.curve

    def decode(self, params, tokens, key, *, drafter, **settings):
        width = drafter.method.width
        self.decoded.append(width)
        self.sources.append(settings["source"])
        kind = "plain" if width == 1 else "suffix" if width <= 9 else "tree"
        nothing = np.zeros(0, int)
        return Trial(self.tokens, Rounds(*[nothing] * 4), 0.0, len(self.tokens) * self.seconds[kind])


def test_the_fastest_is_taken(model, monkeypatch):
    fake = Fake(monkeypatch, FREE, {"plain": 1.0, "suffix": 0.5, "tree": 0.4})
    choice = auto.calibrate(model, quiet=True)
    assert (choice.drafter, choice.arguments) == ("token_recycling", {"num_nodes": 48})
    assert choice.speedup == pytest.approx(2.5)
    assert [name for name, _, _ in choice.candidates] == ["suffix", "token_recycling"]
    fake.seconds["tree"] = 0.6
    choice = auto.calibrate(model, quiet=True)
    assert (choice.drafter, choice.speedup) == ("suffix", pytest.approx(2.0))
    assert choice.build(model).method == drafters.suffix(num_tokens=8).method


@pytest.mark.parametrize("suffix", [0.98, 1.0, 2.0])
def test_plain_unless_clearly_faster(model, monkeypatch, suffix):
    Fake(monkeypatch, FREE, {"plain": 1.0, "suffix": suffix, "tree": suffix})
    choice = auto.calibrate(model, quiet=True)
    assert (choice.drafter, choice.build(model), choice.speedup) == ("plain", None, 1.0)


def test_length_and_match_follow_from_the_cost_curve(model, monkeypatch):
    seconds = {"plain": 1.0, "suffix": 0.5, "tree": 0.6}
    Fake(monkeypatch, FREE, seconds)
    assert auto.calibrate(model, quiet=True).arguments == {"num_tokens": 8, "min_match": 1}
    # A jump behind three tokens: two are drafted, and never where only one token matches.
    Fake(monkeypatch, CostCurve((1, 2, 3, 4, 64), (1.0, 1.6, 1.7, 9.0, 99.0)), seconds)
    assert auto.calibrate(model, quiet=True).arguments["num_tokens"] == 2
    # Nothing repeats, or nothing may be wide: nothing but plain decoding is timed.
    for curve, period in ((FREE_CHAINS, 30), (STEEP, 3)):
        fake = Fake(monkeypatch, curve, seconds, period)
        assert auto.calibrate(model, quiet=True).drafter == "plain"
        assert set(fake.decoded) == {1}


def test_calibrates_once(model, monkeypatch, cache, capsys):
    fake = Fake(monkeypatch, FREE, {"plain": 1.0, "suffix": 0.5, "tree": 0.6})
    first = auto.choice(model)
    assert "auto: suffix(num_tokens=8, min_match=1)" in capsys.readouterr().err
    calls = len(fake.decoded)
    assert auto.choice(model) == first
    assert auto.choose(model).method == first.build(model).method
    assert len(fake.decoded) == calls
    assert len(list(cache.iterdir())) == 1


def test_another_model_or_dtype_is_another_choice(model):
    lm, params = testing.table_lm([[0.1, 0.9], [0.7, 0.3]])
    others = [
        Model(lm, params),
        Model(model.lm, model.params.astype(jnp.bfloat16)),
        model,
        Model(model.lm, model.params),
    ]
    names = [auto._fingerprint(other) for other in others]
    assert names[2] == names[3]
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"drafter": "suffix"}', '{"drafter": "nothing", "arguments": {}, "speedup": 1.0}'],
)
def test_a_broken_file_is_measured_again(model, monkeypatch, cache, content):
    fake = Fake(monkeypatch, FREE, {"plain": 1.0, "suffix": 0.5, "tree": 0.6})
    cache.mkdir(parents=True)
    path = cache / f"{auto._fingerprint(model)}.json"
    path.write_text(content)
    assert auto.choice(model).drafter == "suffix"
    assert fake.decoded
    assert json.loads(path.read_text())["drafter"] == "suffix"


def test_a_stored_choice_that_no_longer_exists_is_measured_again(model, monkeypatch, cache):
    Fake(monkeypatch, FREE, {"plain": 1.0, "suffix": 0.5, "tree": 0.6})
    auto.choice(model)
    (path,) = cache.iterdir()
    path.write_text(path.read_text().replace("num_tokens", "num_tickets"))
    assert auto.choice(model).arguments == {"num_tokens": 8, "min_match": 1}


def test_a_folder_that_cannot_be_written_is_a_warning(model, monkeypatch, cache):
    Fake(monkeypatch, FREE, {"plain": 1.0, "suffix": 0.5, "tree": 0.6})
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="the choice was not stored"):
        assert auto.choice(model).drafter == "suffix"


def test_one_process_on_one_mesh_a_choice(model, monkeypatch):
    placed = parallel.shard(model.params, NamedSharding(parallel.make_mesh(1, 1), PartitionSpec()))
    assert auto._fingerprint(Model(model.lm, placed)) != auto._fingerprint(model)
    monkeypatch.setattr(auto.jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="drafter: 'auto' is for one process, and 2 must run"):
        auto.choose(model)


def test_all_prompts_of_an_encoder_decoder_have_one_width(monkeypatch):
    """Another width would be another program, and its compilation part of a timing."""
    lm, params = testing.tiny_seq2seq(vocab_size=8, context_length=64, source_length=20)
    fake = Fake(monkeypatch, FREE, {"plain": 1.0, "suffix": 0.5, "tree": 0.4})
    auto.calibrate(Model(lm, params, tokenizer=Characters(), decoder_start=(0,)), quiet=True)
    assert set(fake.sources) == {20}


def test_without_a_tokenizer(model):
    with pytest.raises(ValueError, match="drafter: 'auto' calibrates on text, but toy has no tokenizer"):
        auto.choose(Model(model.lm, model.params, name="toy"))


def test_calibration_prompts_are_no_demo_prompts():
    from experiments import prompts

    demo = {question.text for question in prompts.read(prompts.find("demo.jsonl"))}
    path = prompts.HERE.parent.parent / "jspec" / "data" / "calibration.jsonl"
    calibration = {question.text for question in prompts.read(path)}
    assert len(demo) == 16
    assert len(calibration) == 12
    assert not demo & calibration


def test_a_real_measurement(model, monkeypatch):
    """No stand-ins: a toy model, short texts."""
    monkeypatch.setattr(auto, "CURVE", (1, 2, 9))
    monkeypatch.setattr(auto, "TREE_COST", 0.0)
    monkeypatch.setattr(auto, "NEW_TOKENS", 12)
    monkeypatch.setattr(auto, "LENGTHS", (3,))
    monkeypatch.setattr(auto, "MIN_MATCHES", (1,))
    choice = auto.calibrate(model, quiet=True)
    assert choice.drafter in ("plain", "suffix")
    assert choice.curve.widths == (1, 2, 9)
    assert isinstance(choice.candidates, tuple)
