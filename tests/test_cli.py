"""The command line: text on stdout, a summary on stderr, one line and exit code 2 for an error."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny_text import tokenizer

from jspec import testing, text
from jspec.cli import _describe, app


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = testing.tiny_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny",
        vocab_size=263,
        num_hidden_layers=1,
        max_position_embeddings=256,
    )
    tokenizer().backend.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def user_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        app(list(arguments), prog_name="jspec")
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def generated(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, str, str]:
    return run(capsys, "generate", "hi", "--target", str(folder), "--max-new-tokens", "9", *arguments)


def test_text_goes_to_stdout_and_one_line_to_stderr(capsys, folder):
    code, out, err = generated(capsys, folder)
    expected = text.generate(text.load(folder), "hi", max_new_tokens=9, chat=True)
    assert (code, out) == (0, expected.texts[0] + "\n")
    assert err.count("\n") == 1
    assert err.startswith(f"[{len(expected.tokens[0])} tokens, ")
    assert "tau 1.00, drafter none, finish" in err


def test_options_reach_the_sampler(capsys, folder, monkeypatch):
    seen: dict[str, Any] = {}

    def spy(model: text.Model, prompt: str, **options: Any) -> text.Stream:
        seen.update(options, prompt=prompt)
        return text.stream(model, [2], max_new_tokens=1)

    monkeypatch.setattr("jspec.cli.text", _Namespace(text, stream=spy))
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    arguments = "- --max-new-tokens 3 --temperature .5 --top-k 4 --top-p .9 --min-p .1 --seed 7"
    arguments += " --repetition-penalty 1.2 --stop a --stop b --no-chat --drafter early_exit"
    arguments += " --drafter-option num_tokens=2"
    arguments += " --drafter-option sample=false"
    code, _, _ = run(capsys, "generate", "--target", str(folder), *arguments.split())
    assert code == 0
    drafter = seen.pop("drafter")
    assert (drafter.method.depth, drafter.method.draws) == (2, "chosen")
    assert seen == {
        "prompt": "from stdin",
        "max_new_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "seed": 7,
        "stop": ["a", "b"],
        "chat": False,
        "system": None,
    }


class _Namespace:
    """A module with some names replaced."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__ = {**vars(module), **names}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "Missing argument"),
        (["generate", "hi", "--temprature", "1"], "--temprature"),
        (["generate", "hi", "--top-k", "many"], "--top-k"),
        (["generate", "hi", "--dtype", "int8"], "--dtype"),
        (["generate", "hi", "--target", "smollm2-135"], "did you mean 'smollm2-135m'"),
        (["generate", "hi", "--target", "/no/such.gguf"], "no such GGUF file"),
        (["translate"], "translate"),
        (["info", "--target", "./nowhere"], "nowhere"),
    ],
)
def test_an_error_is_one_line_and_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("jspec: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature=-1"], "temperature: expected a finite number >= 0, got -1.0"),
        (["--top-p=1.5"], "top_p"),
        (["--max-new-tokens=-1"], "max_new_tokens"),
        (["--max-new-tokens=1000"], "positions"),
        (["--seed=-1"], "seed"),
        (["--drafter=sufix"], "did you mean 'suffix'"),
        (["--drafter=./nowhere.gguf"], "no such GGUF file"),
        (["--drafter-option=a=1"], "--drafter-option"),
        (["--drafter=early_exit", "--drafter-option=depth"], "NAME=VALUE"),
        (["--drafter=early_exit", "--drafter-option=depth=3"], "early_exit: expected arguments among"),
        (["--no-chat", "--system=x"], "system"),
    ],
)
def test_bad_values_too(capsys, folder, arguments, message):
    code, out, err = generated(capsys, folder, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_info_lists_versions_devices_methods_and_the_model(capsys, folder):
    code, out, err = run(capsys, "info", "--target", str(folder))
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    for expected in (
        f"jax {jax.__version__}",
        str(jax.devices()[0]),
        "smollm2-135m",
        "early_exit Lossless in law",
        "block Lossless in law",
        "typical Lossy",
        "vocabulary 261 tokens, 263 logits",
        "chat template yes",
        "capacity multiples of 256",
    ):
        assert expected in words


def test_an_encoder_decoder_is_described_with_both_stacks():
    lm, params = testing.tiny_seq2seq(num_layers=1, num_encoder_layers=3, source_length=40)
    said = dict(_describe(text.Model(lm, params, decoder_start=(0,))))
    rows = [said[name] for name in ("encoder layers", "source positions", "decoder layers", "positions")]
    assert rows == ["3", "40", "1", "no end"]


def test_compiled_programs_are_kept_where_nothing_else_is_set(capsys, folder, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        generated(capsys, folder, "--max-new-tokens", "1")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jspec" / "jax")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
