"""Checkpoints by name, folder and file, and the embedded model end to end."""

from __future__ import annotations

import pytest
from tiny_text import END, decoder

from jspec import testing
from jspec.text import Session, generate, load, stream


@pytest.fixture(scope="module")
def tiny():
    return decoder()


def test_a_folder_with_tokenizer_and_one_without(tmp_path, tiny):
    folder = testing.tiny_checkpoint(tmp_path / "bare", vocab_size=263, num_hidden_layers=1)
    bare = load(folder)
    assert (bare.tokenizer, bare.eos, bare.vocab_size, bare.name) == (None, (2,), 263, "bare")
    assert len(generate(bare, [[5, 6]], max_new_tokens=3).tokens[0]) <= 3
    tiny.tokenizer.backend.save_pretrained(folder)
    full = load(str(folder))
    assert (full.eos, full.vocab_size) == ((END, 2), 261)
    out = generate(full, ["hi", "the"], chat=True, max_new_tokens=4, temperature=3.0)
    assert all(len(tokens) == 4 or tokens[-1] in (END, 2) for tokens in out.tokens)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'"),
        ("./nothing/here", "nothing/here"),
        ("/nothing.gguf", "no such GGUF file"),
    ],
)
def test_a_model_that_is_not_there(name, message):
    with pytest.raises(FileNotFoundError, match=message):
        load(name)


def test_files_that_are_broken(tmp_path):
    folder = testing.tiny_checkpoint(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ValueError, match="truncated"):
        load(folder)
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x05" * 40)
    with pytest.raises(ValueError, match="truncated"):
        load(tmp_path / "cut.gguf")
    with pytest.raises(ValueError, match="dtype"):
        load(folder, "int8")


@pytest.mark.smollm2
def test_smollm2_answers():
    model = load("smollm2-135m")
    question, capacity = "What is the capital of France?", 256
    out = generate(model, question, chat=True, max_new_tokens=24)
    assert out.texts == ["The capital of France is Paris."]
    assert (out.finish_reasons, out.tokens[0][-1]) == (["eos"], 2)
    assert "".join(stream(model, question, chat=True, max_new_tokens=24)) == out.texts[0]
    session = Session(model, capacity=capacity)
    assert session.say(question, max_new_tokens=24).tokens == out.tokens
    answer = session.say("And of Italy?", max_new_tokens=12)
    assert session.reused == len(model.tokenizer.chat(session.messages[:1])) + len(out.tokens[0])
    again = generate(model, model.tokenizer.chat(session.messages[:3]), max_new_tokens=12)
    assert (answer.tokens, "Rome" in answer.texts[0]) == (again.tokens, True)
