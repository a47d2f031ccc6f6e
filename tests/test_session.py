"""Conversations: every turn equals `generate` on the whole conversation, and reads only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tiny_text import END, decoder

from jspec import testing
from jspec.output import Output
from jspec.text import Model, Session, generate


@pytest.fixture(scope="module")
def tiny() -> Model:
    return decoder()


def conversation(
    model: Model, turns: list[tuple[str, dict[str, Any]]], **fixed: Any
) -> Iterator[tuple[Session, Output]]:
    """Every turn equals `generate` on the whole conversation."""
    session = Session(model, **({"capacity": 256} | fixed))
    for number, (message, options) in enumerate(turns):
        messages = [*session.messages, {"role": "user", "content": message}]
        out = session.say(message, **options)
        alone = generate(model, model.tokenizer.chat(messages), **({"seed": number} | options))
        assert (out.tokens, out.finish_reasons) == (alone.tokens, alone.finish_reasons)
        yield session, out


ASCII = [2 + byte for byte in range(97, 123)]


def test_each_turn_is_that_of_the_whole_conversation(tiny):
    # Letters only: then the answer's tokens are also how the tokenizer would write it.
    options = {"max_new_tokens": 9, "allowed_tokens": ASCII}
    held = 0
    for session, out in conversation(tiny, [(m, options) for m in ("hi", "you?", "so")], system="s"):
        assert out.finish_reasons == ["length"]
        assert session.reused == held
        held = len(tiny.tokenizer.chat(session.messages[:-1])) + 9
    assert [message["role"] for message in session.messages] == ["system"] + ["user", "assistant"] * 3


def test_a_turn_that_ended_by_end_token_or_stop_sequence_goes_on(tiny):
    sequence = [ASCII[0]]
    only_end = {"max_new_tokens": 5, "allowed_tokens": [END]}
    letters = {"max_new_tokens": 5, "allowed_tokens": ASCII}
    reused = [
        session.reused for session, _ in conversation(tiny, [("a", only_end), ("b", letters), ("c", letters)])
    ]
    first = len(tiny.tokenizer.chat([{"role": "user", "content": "a"}])) + 1
    assert reused[1] == first
    assert reused[2] > first
    stopped = {"max_new_tokens": 5, "allowed_tokens": sequence, "stop": [sequence]}
    found = list(conversation(tiny, [("a", stopped), ("b", letters)]))
    assert found[0][1].texts == [""]  # the template leaves the stop out, so nothing can be kept
    assert found[1][0].reused == 0


def test_a_turn_cut_by_a_stop_string_is_read_again(tiny):
    options = {"max_new_tokens": 9, "allowed_tokens": ASCII}
    answer = Session(tiny, capacity=256).say("hi", **options).texts[0]
    turns = [("hi", options | {"stop": answer[3:5]}), ("more", options)]
    found = list(conversation(tiny, turns))
    assert found[0][1].finish_reasons == ["stop"]
    assert found[1][0].reused == 0


def test_an_abandoned_turn_has_not_taken_place(tiny):
    options = {"max_new_tokens": 9, "allowed_tokens": ASCII}
    session, other = Session(tiny, capacity=256), Session(tiny, capacity=256)
    first = session.say("hi", **options)
    for _ in session.stream("never mind", **options):
        break
    other.say("hi", **options)
    assert session.say("more", **options).tokens == other.say("more", **options).tokens
    assert len(session.messages) == 4
    assert first.tokens


def test_a_conversation_outgrows_its_cache():
    model = Model(*testing.table_lm(np.roll(np.eye(5), 1, axis=1)))
    session, reused = Session(model), []
    for length in (20, 500, 1):
        assert session.say([0] * length, max_new_tokens=3).tokens == [[1, 2, 3]]
        reused.append(session.reused)
    assert reused == [0, 0, 526]  # 512 slots, then 1536
    small = Session(model, capacity=256)
    small.say([0] * 250, max_new_tokens=3)
    with pytest.raises(ValueError, match="capacity"):
        small.say([0], max_new_tokens=3)
    assert small.say([0], max_new_tokens=2).tokens == [[1, 2]]


def test_a_conversation_of_ids():
    model = Model(*testing.table_lm(np.roll(np.eye(5), 1, axis=1)))
    session = Session(model)
    assert session.say([0], max_new_tokens=2).tokens == [[1, 2]]
    assert session.say([4, 0], max_new_tokens=2).tokens == [[1, 2]]
    assert session.reused == 3
    with pytest.raises(ValueError, match="turn: expected token ids"):
        session.say("hi")
    with pytest.raises(ValueError, match="system"):
        Session(model, system="s")
