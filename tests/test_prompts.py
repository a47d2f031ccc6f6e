"""Prompts that a chat model writes itself."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import tiny_text

from jspec import testing
from jspec.text import Model
from training import prompts


def talker(**ends: str) -> Model:
    """After the template's line end it says one of the keys, each with the same chance; then its text."""
    spoken = tiny_text.tokenizer()
    law = np.full((len(spoken.vocabulary),) * 2, 1 / len(spoken.vocabulary), np.float32)

    def follows(text: str, laws: dict[int, float]) -> None:
        law[2 + ord(text)] = np.zeros(len(law))
        for token, mass in laws.items():
            law[2 + ord(text), token] = mass

    follows("\n", {2 + ord(first): 1 / len(ends) for first in ends})
    for first, then in ends.items():
        follows(first, {2 + ord(then) if then else tiny_text.END: 1.0})
    return Model(*testing.table_lm(law), spoken, spoken.eos, "talker", len(law))


def test_what_was_begun_is_what_the_template_writes_before_the_user():
    model = tiny_text.decoder()
    chat = model.tokenizer.chat([{"role": "user", "content": "ab"}])
    begin = prompts.before_user(model)
    assert chat[: len(begin)] == begin
    assert chat[len(begin)] == 2 + ord("a")


def test_prompts_are_whole_and_occur_once():
    model = talker(a="", b="", c="c", d=" ")  # c never ends; d goes on with a space, then anything
    found = prompts.write_prompts(model, 40, max_tokens=3)
    assert {"a", "b"} <= set(found)
    assert len(found) == len(set(found))
    assert not any(text.startswith("c") or not text for text in found)


def test_one_line_a_prompt(tmp_path):
    prompts.save_prompts(tmp_path / "p.jsonl", ["one\ntwo", "drei ü"])
    lines = (tmp_path / "p.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["one\ntwo", "drei ü"]


def test_a_model_without_template_is_refused():
    plain = tiny_text.tokenizer(chat_template=None)
    model = dataclasses.replace(tiny_text.decoder(), tokenizer=plain)
    with pytest.raises(ValueError, match="target: expected a model with a chat template, got tiny"):
        prompts.before_user(model)
