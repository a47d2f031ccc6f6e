"""The front door: options, stops, streams, refills, reports, and one error for bad input."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_text import END, START, cycle, decoder, script, tokenizer

import jspec
from jspec import drafters, engine, sampling, testing, text, verify
from jspec.io.tokenizer import Vocabulary
from jspec.output import Output, Stats, Writer
from jspec.text import Model, Session, generate, stream
from jspec.types import Block, Prompt

TEXT = "abcdéfgh漢ij"
PROMPTS = [[40], [70, 71, 72, 73], [100, 90, 80, 70, 60, 50, 40]]


@pytest.fixture(scope="module")
def tiny() -> Model:
    return decoder()


@pytest.fixture(scope="module")
def wheel() -> Model:
    return cycle(TEXT)


def random_table(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(size), size)


def same(a: Output, b: Output) -> bool:
    return (a.tokens, a.texts, a.finish_reasons) == (b.tokens, b.texts, b.finish_reasons)


def row(output: Output, i: int) -> tuple[Any, ...]:
    assert output.texts is not None
    return output.tokens[i], output.texts[i], output.finish_reasons[i], output.stats.rows[i]


# --- the same as the engine, whatever the batch -----------------------------------------------------


def test_greedy_equals_the_engine_and_its_text_is_the_tokens_text(tiny):
    out = generate(tiny, PROMPTS, max_new_tokens=12)
    tokens = np.zeros((3, 7), np.int32)
    for i, prompt in enumerate(PROMPTS):
        tokens[i, : len(prompt)] = prompt
    real = jnp.arange(263)[None] < tiny.vocab_size
    state = engine.generate(
        tiny.params,
        Prompt(jnp.asarray(tokens), jnp.array([len(prompt) for prompt in PROMPTS])),
        sampling.row_keys(jnp.zeros(3, jnp.int32)),
        target=tiny.lm,
        drafter=drafters.plain(),
        verify=verify.target_only(),
        sampler=sampling.sampler(sampling.Settings(jnp.zeros(3)), [sampling.allow(real)]),
        stops=engine.Stops(jnp.array([END]), jnp.zeros((0, 1), jnp.int32)),
        max_new_tokens=12,
        record=engine.records(statistics=engine.statistics),
    )
    for i, prompt in enumerate(PROMPTS):
        assert out.tokens[i] == state.tokens[i, len(prompt) : state.lengths[i]].tolist()
        assert out.texts[i] == tiny.tokenizer.decode(out.tokens[i])


# Every step of the sampler is in use, so that all tests with these options share their compiled programs.
DRAFTER = testing.scripted(np.random.default_rng(0).integers(0, 261, 60), 3)
OPTIONS: dict[str, Any] = {
    "temperature": [0.0, 1.0, 0.7],
    "top_p": [1.0, 0.9, 0.5],
    "top_k": [0, 20, 0],
    "repetition_penalty": [1.3, 1.0, 1.1],
    "frequency_penalty": [0.0, 0.5, 0.0],
    "min_new_tokens": [0, 3, 0],
    "seed": [5, 6, 5],
}
LIMITS = [9, 14, 5]
SHARED: dict[str, Any] = {"drafter": DRAFTER, "logprobs": True}


def each(i: int, **changes: Any) -> dict[str, Any]:
    """The options of prompt i alone."""
    return {name: values[i] for name, values in OPTIONS.items()} | changes


@pytest.mark.slow
def test_refilled_rows_and_batch_rows_equal_rows_alone(tiny):
    together = generate(tiny, PROMPTS, max_new_tokens=LIMITS, **SHARED, **OPTIONS)
    refilled = generate(tiny, PROMPTS, max_new_tokens=LIMITS, batch_size=2, **SHARED, **OPTIONS)
    assert same(together, refilled)
    assert together.stats == refilled.stats
    for i in range(3):
        single = generate(tiny, PROMPTS[i], max_new_tokens=LIMITS[i], **SHARED, **each(i))
        assert row(single, 0) == row(together, i)
        np.testing.assert_allclose(single.logprobs[0], together.logprobs[i], atol=1e-5)
        np.testing.assert_allclose(single.logprobs[0], refilled.logprobs[i], atol=1e-5)


def test_a_seed_gives_the_same_answer_anywhere_and_another_seed_another(tiny):
    options = OPTIONS | {"temperature": 1.0, "seed": 7}
    alone = generate(tiny, PROMPTS[1], **SHARED, **each(1, temperature=1.0, seed=42)).tokens[0]
    for position in (0, 2):
        prompts = [PROMPTS[0]] * 3
        prompts[position] = PROMPTS[1]
        mixed = {name: [values[0]] * 3 for name, values in OPTIONS.items()}
        for name in mixed:
            mixed[name][position] = OPTIONS[name][1]
        mixed |= {"temperature": 1.0, "seed": [42 if i == position else 7 + i for i in range(3)]}
        assert generate(tiny, prompts, **SHARED, **mixed).tokens[position] == alone
    assert generate(tiny, PROMPTS[1], **SHARED, **each(1, temperature=1.0, seed=43)).tokens[0] != alone
    assert options["seed"] == 7


def test_samples_of_a_prompt_differ_and_do_not_depend_on_their_number(tiny):
    options = SHARED | each(1, seed=1)
    three = generate(tiny, PROMPTS[1], num_samples=3, **options)
    assert len({tuple(tokens) for tokens in three.tokens}) == 3
    assert generate(tiny, PROMPTS[1], num_samples=2, **options).tokens == three.tokens[:2]
    assert generate(tiny, PROMPTS[1], num_samples=3, batch_size=2, **options).tokens == three.tokens
    assert generate(tiny, PROMPTS[1], **options).tokens == three.tokens[:1]


def test_values_do_not_compile_again(tiny):
    generate(tiny, PROMPTS, max_new_tokens=LIMITS, **SHARED, **OPTIONS)
    before = engine._run._cache_size()
    changed = OPTIONS | {"temperature": 0.9, "top_p": 0.3, "seed": [3, 4, 9], "min_new_tokens": [1, 0, 0]}
    generate(tiny, ["hello", [7], "you there"], max_new_tokens=[3, 4, 0], **SHARED, **changed)
    assert engine._run._cache_size() == before


def test_penalties_act_inside_a_block():
    model = Model(*testing.table_lm(random_table(12)))
    options = {
        "max_new_tokens": 24,
        "repetition_penalty": [1.8, 1.0, 1.0],
        "frequency_penalty": [0.0, 0.9, 0.0],
    }
    prompts = [[0]] * 3
    plain = generate(model, prompts, **options)
    for tokens in plain.tokens:
        block = generate(model, prompts, drafter=testing.scripted([0, *tokens]), **options)
        assert same(plain, block)
    assert sum(block.stats.accepted_by_position) > 15
    assert len({tuple(tokens) for tokens in plain.tokens}) == 3


def test_logprobs_are_those_of_scoring_the_text(tiny):
    out = generate(tiny, PROMPTS, max_new_tokens=15, **SHARED, **OPTIONS)
    score = jax.jit(lambda params, ids: _score(tiny, params, ids))
    for prompt, tokens, logprobs in zip(PROMPTS, out.tokens, out.logprobs, strict=True):
        ids = np.zeros((1, 32), np.int32)
        ids[0, : len(prompt + tokens)] = prompt + tokens
        law = score(tiny.params, ids)
        expected = [float(law[len(prompt) + i - 1, token]) for i, token in enumerate(tokens)]
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def _score(model: Model, params: Any, ids: jax.Array) -> jax.Array:
    cache = model.lm.start(params, Prompt(ids, jnp.array([ids.shape[1]])), 64)
    forward = model.lm.extend(params, cache, Block(ids, jnp.arange(ids.shape[1])[None]))
    return jax.nn.log_softmax(model.lm.head(params, forward.hidden), axis=-1)[0]


# --- lengths and ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", range(7))
def test_exactly_as_many_tokens_as_asked_for(wheel, limit):
    out = generate(wheel, "a", drafter=testing.scripted(script(TEXT)), max_new_tokens=limit)
    assert out.tokens == [script(TEXT)[1 : 1 + limit].tolist()]
    assert out.finish_reasons == ["length"]


@pytest.mark.parametrize("start", range(1, 7))
def test_end_token_at_every_place_of_a_block(start):
    text = "abcdefgh"
    model = cycle(text, end=True)
    ids = [*script(text)[:8], END]
    out = generate(
        model, text[:start], drafter=testing.scripted([*ids, 50, 51, 52]), max_new_tokens=30, logprobs=True
    )
    assert out.texts == [text[start:]]
    assert out.tokens == [ids[start:]]
    assert out.finish_reasons == ["eos"]
    assert len(out.logprobs[0]) == len(out.tokens[0]) == out.stats.tokens


def test_an_end_token_has_no_text_even_if_it_is_a_letter(wheel):
    model = Model(wheel.lm, wheel.params, wheel.tokenizer, (2 + ord("d"), 2 + ord("h")))
    for options in ({}, {"drafter": testing.scripted(script(TEXT))}):
        out = generate(model, "a", max_new_tokens=9, **options)
        assert (out.texts, out.finish_reasons, out.tokens[0][-1]) == (["bc"], ["eos"], 2 + ord("d"))
        assert "".join(stream(model, "a", max_new_tokens=9, **options)) == "bc"


def test_without_tokenizer_and_end_token_ids_run_to_the_limit():
    model = Model(*testing.table_lm(np.roll(np.eye(5), 1, axis=1)))
    out = generate(model, [[0], [3]], max_new_tokens=4, stop=[[2, 3]])
    assert out.tokens == [[1, 2, 3], [4, 0, 1, 2]]
    assert out.finish_reasons == ["stop", "length"]
    assert out.texts is None
    assert list(stream(model, [0], max_new_tokens=2)) == [[1], [2]]


def one_by_one(model: Model, strings: list[str], limit: int) -> tuple[list[int], str, str]:
    """Tokens, text and reason by the rule itself: after each token, look for the stops in the whole text."""
    tokens = script(TEXT)[1 : limit + 1].tolist()
    for count in range(1, limit + 1):
        text = model.tokenizer.decode(tokens[:count]).rstrip("\ufffd")
        found = [text.find(stop) for stop in strings if stop in text]
        if found:
            return tokens[:count], text[: min(found)], "stop"
    return tokens, model.tokenizer.decode(tokens), "length"


@pytest.mark.parametrize("num_tokens", [1, 4, 7])
@pytest.mark.parametrize(
    "strings",
    [
        ["b"],
        ["dé"],
        ["éf"],
        ["漢"],
        ["h漢i"],
        ["cdé", "d"],
        ["gh漢ij", "h"],
        ["ja"],
        ["jab", "ij"],
        ["ef"],
        ["aa", "jb"],
    ],
)
def test_stop_strings_end_where_plain_decoding_would(wheel, strings, num_tokens):
    drafter = testing.scripted(script(TEXT), num_tokens)
    tokens, text, reason = one_by_one(wheel, strings, 25)
    out = generate(wheel, "a", drafter=drafter, max_new_tokens=25, stop=strings, logprobs=True)
    assert (out.tokens[0], out.texts[0], out.finish_reasons[0]) == (tokens, text, reason)
    assert len(out.logprobs[0]) == len(tokens) == out.stats.tokens
    assert sum(out.stats.accepted_by_position) <= out.stats.tokens
    assert out.stats.rounds == len(range(0, len(tokens), num_tokens + 1))
    live = stream(wheel, "a", drafter=drafter, max_new_tokens=25, stop=strings)
    pieces = list(live)
    assert "".join(pieces) == text
    assert same(live.output, out)
    assert live.output.stats == out.stats


def test_a_stream_never_shows_the_beginning_of_a_stop(wheel):
    shown = ""
    for piece in stream(wheel, "a", max_new_tokens=25, stop=["fgX", "gh漢"]):
        shown += piece
        assert not shown.endswith(("g", "h"))
    assert shown == "bcdéf"
    shown = list(stream(wheel, "a", max_new_tokens=5, stop="fgX"))
    assert shown == ["b", "c", "d", "é"]  # what was held back comes when nothing can follow


def test_a_row_stopped_by_text_is_refilled_and_the_others_go_on(wheel):
    drafter = testing.scripted(script(TEXT, 60)[None], 3)
    out = generate(
        wheel, ["a", "a", "ab", "a"], drafter=drafter, max_new_tokens=[20, 3, 20, 20], stop="f", batch_size=2
    )
    assert out.texts == ["bcdé", "bcd", "cdé", "bcdé"]
    assert out.finish_reasons == ["stop", "length", "stop", "stop"]


def test_stop_sequences_are_cut_from_the_text_and_kept_in_the_tokens(wheel):
    sequence = [2 + byte for byte in b"gh"]
    out = generate(wheel, "a", max_new_tokens=25, stop=[sequence, sequence[:1] * 2])
    assert (out.texts, out.finish_reasons) == (["bcdéf"], ["stop"])
    assert out.tokens[0][-2:] == sequence
    assert "".join(stream(wheel, "a", max_new_tokens=25, stop=[sequence])) == "bcdéf"


def test_a_special_token_as_stop_string_stops():
    model = cycle("abc", end=True)
    model = Model(model.lm, model.params, model.tokenizer, (), "no end", 0)
    assert generate(model, "a", stop="<|im_end|>", max_new_tokens=9).finish_reasons == ["stop"]
    assert generate(model, "a", max_new_tokens=4).finish_reasons == ["length"]


def test_no_end_before_the_minimum(wheel):
    out = generate(wheel, "a", max_new_tokens=30, min_new_tokens=4, stop="c")
    assert out.texts == ["bcdéfgh漢ijab"]  # the c at 2 does not count
    model = Model(*testing.table_lm(random_table(12)), eos=tuple(range(9)))
    out = generate(
        model,
        [[0]] * 3,
        drafter=testing.scripted([3, 10, 4, 11] * 8),
        max_new_tokens=12,
        min_new_tokens=[0, 5, 12],
        temperature=1.0,
        stop=[[9]],
    )
    assert [len(tokens) >= least for tokens, least in zip(out.tokens, [0, 5, 12], strict=True)] == [True] * 3
    assert len(out.tokens[0]) < 5
    assert all(token > 9 for token in out.tokens[1][:5] + out.tokens[2])


def test_nan_weights_give_no_text(wheel):
    broken = Model(wheel.lm, wheel.params * jnp.nan, wheel.tokenizer, wheel.eos)
    out = generate(broken, ["abc", "d"], logprobs=True)
    assert out.finish_reasons == ["nan", "nan"]
    assert out.texts == ["", ""]
    assert out.tokens == out.logprobs == [[], []]
    assert out.stats.mean_accepted_length is None


# --- what may come out ------------------------------------------------------------------------------


def test_bans_hold_for_every_token():
    model = Model(*testing.table_lm(random_table(10)))
    options = {"drafter": testing.scripted([3, 7, 5, 1] * 20), "max_new_tokens": 60, "temperature": 1.5}
    prompts = [[0], [1], [2]]
    out = generate(model, prompts, banned_tokens=[[3], [5], [3, 5]], **options)
    assert [set(range(10)) - set(tokens) for tokens in out.tokens] == [{3}, {5}, {3, 5}]
    out = generate(model, prompts, allowed_tokens=[6, 7, 8], first_tokens=[[6], [7], [8]], **options)
    assert [tokens[0] for tokens in out.tokens] == [6, 7, 8]
    assert [set(tokens) for tokens in out.tokens] == [{6, 7, 8}] * 3


def test_padding_never_comes_out():
    model = Model(*testing.table_lm(random_table(9)), vocab_size=5)
    out = generate(
        model, [[1], [2]], max_new_tokens=60, temperature=5.0, drafter=testing.scripted([3, 7, 8, 1] * 20)
    )
    assert {token for tokens in out.tokens for token in tokens} == set(range(5))


def test_own_processors_act():
    only = sampling.stateless(lambda logits: jnp.where(jnp.arange(9)[None] == 6, logits, -jnp.inf))
    model = Model(*testing.table_lm(random_table(9)))
    assert generate(model, [1], processors=[only], max_new_tokens=5).tokens == [[6] * 5]


# --- reports ----------------------------------------------------------------------------------------


def test_acceptance_counts_of_known_rounds(wheel):
    # Rounds of 4 drafts with 0, 1, 2 and 4 accepted, then one that the limit cuts to 2 of 2.
    right = script(TEXT, 40)
    wrong = right.copy()
    wrong[[1, 3, 6]] = 200  # root at 0: 0 accepted; at 1: 1; at 3: 2; at 6: 4; at 11: the last
    wrong[5] = right[5]
    out = generate(wheel, "a", drafter=testing.scripted(wrong), max_new_tokens=14)
    lengths = [1, 2, 3, 5, 3]
    assert out.stats.rounds == 5
    assert out.stats.mean_accepted_length == sum(lengths) / 5
    assert out.stats.accepted_by_position == (4, 3, 1, 1)
    assert out.stats.proposed_by_position == (5, 5, 4, 4)
    assert out.stats.acceptance_rate == 9 / 18
    assert out.stats.tokens == 14


def test_plain_decoding_proposes_nothing(wheel):
    stats = generate(wheel, ["a", "b"], max_new_tokens=[3, 5]).stats
    assert (stats.rounds, stats.tokens, stats.mean_accepted_length) == (8, 8, 1.0)
    assert stats.acceptance_rate is None
    assert [row.rounds for row in stats.rows] == [3, 5]
    assert Stats.pooled([]).mean_accepted_length is None


# --- drafters and rules -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_or_a_name_as_drafter(tiny):
    plain = generate(tiny, PROMPTS, max_new_tokens=12)
    assert same(plain, generate(tiny, PROMPTS, drafter=decoder(seed=3, logits=280), max_new_tokens=12))
    assert text.named_drafter("early_exit", tiny, num_tokens=2).method.width == 3
    for name in text.DRAFTERS[:-1]:  # "auto" measures
        assert text.named_drafter(name, tiny).method.width > 1 or name == "plain"
    with pytest.raises(ValueError, match=r"early_exit: expected arguments among .*'num_layers'.*'depth'"):
        text.named_drafter("early_exit", tiny, depth=2)


def test_another_vocabulary_is_refused_wherever_it_hides(tiny):
    tokens = list(tiny.vocabulary.tokens)
    tokens[40], tokens[41] = tokens[41], tokens[40]
    other = dataclasses.replace(
        decoder(), tokenizer=dataclasses.replace(tokenizer(), vocabulary=Vocabulary(tuple(tokens)))
    )
    with pytest.raises(ValueError, match=r"drafter: .* token 40 is"):
        generate(tiny, "a", drafter=other)
    with pytest.raises(ValueError, match=r"drafter: .* token 40 is"):
        generate(tiny, "a", drafter=drafters.model(other))
    carrier = drafters.early_exit(1, 2)
    carrier = dataclasses.replace(carrier, params=(carrier.params, other.vocabulary))
    with pytest.raises(ValueError, match=r"drafter: .* token 40 is"):
        generate(tiny, "a", drafter=carrier)
    with pytest.raises(ValueError, match=r"drafter: .*64"):
        generate(tiny, "a", drafter=Model(*testing.tiny_decoder(vocab_size=64)))


def test_settings_in_effect_are_reported(wheel):
    out = generate(
        wheel, ["a", "b", "c"], drafter=testing.scripted(script(TEXT), 3), max_new_tokens=2, batch_size=2
    )
    assert out.settings == {
        "draft_depth": 3,
        "draft_nodes": 4,
        "verify": "target_only",
        "lossless": True,
        "widths": (1, 4),
        "capacity": 256,
        "rows": 2,
        "rounds": 3,  # "a" takes one, "b" two, and "c" two in the row of "a"
    }


def test_a_stream_can_be_left_and_taken_up_again(wheel):
    live = stream(wheel, "a", max_new_tokens=4)
    for piece in live:
        assert piece == "b"
        break
    assert live.output is None
    assert list(live) == ["c", "d", "\ufffd"]
    assert (list(live), live.output.texts) == ([], ["bcd\ufffd"])


def test_prompts_may_be_arrays(wheel):
    expected = generate(wheel, "a", max_new_tokens=2).tokens
    for prompts in ([99], np.array([99]), [np.array([99], np.int32)], jnp.array([[99]]), ((99,),)):
        assert generate(wheel, prompts, max_new_tokens=2).tokens == expected


# --- bad input --------------------------------------------------------------------------------------

LM64 = testing.tiny_decoder(vocab_size=64, num_layers=1, context_length=40)

BAD = [
    ("", {}, r"prompts\[0\].*empty"),
    (["a", ""], {}, r"prompts\[1\].*empty"),
    ([], {}, "prompts: .*none"),
    ([[5], []], {}, r"prompts\[1\].*empty"),
    ("", {"chat": True}, r"prompts\[0\].*empty"),
    ([[261]], {}, r"prompts\[0\]: expected token ids in 0 .. 260, got 261"),
    ([[-1]], {}, r"prompts\[0\].*-1"),
    (3, {}, "prompts: .*int"),
    (None, {}, "prompts: .*None"),
    ([3.5], {}, r"prompts\[0\]: .*3.5"),
    ("a", {"banned_tokens": 3}, "banned_tokens: .*3"),
    ([[1.5]], {}, r"prompts\[0\].*1.5"),
    ("a\ud800", {}, "surrogate"),
    ("a", {"temperature": -0.1}, "temperature: .*-0.1"),
    ("a", {"temperature": float("nan")}, "temperature: .*nan"),
    ("a", {"temperature": "hot"}, "temperature: .*'hot'"),
    ("a", {"temperature": [0.5, 0.5]}, "temperature: .* 1 prompts, got 2"),
    ("a", {"top_p": 0.0}, "top_p: .*0.0"),
    ("a", {"top_p": 1.1}, "top_p: .*1.1"),
    ("a", {"min_p": -1}, "min_p"),
    ("a", {"top_k": -1}, "top_k"),
    ("a", {"top_k": 2.5}, "top_k"),
    ("a", {"repetition_penalty": 0}, "repetition_penalty"),
    ("a", {"repetition_penalty": 1e-46}, "repetition_penalty: expected a finite number of float32 > 0, got"),
    ("a", {"presence_penalty": float("inf")}, "presence_penalty"),
    ("a", {"frequency_penalty": 1e39}, "frequency_penalty: expected a finite number of float32, got 1e"),
    ("a", {"max_new_tokens": -1}, "max_new_tokens: .*-1"),
    ("a", {"max_new_tokens": 2.0}, "max_new_tokens: .*2.0"),
    ("a", {"max_new_tokens": 1200}, r"prompts\[0\]: .*1201 positions.*1024"),
    ("a", {"max_new_tokens": 30, "capacity": 30}, r"prompts\[0\]: .*31.*capacity.*30"),
    ("a", {"seed": -1}, "seed"),
    ("a", {"seed": 2**32}, "seed"),
    ("a", {"stop": [""]}, "stop: .*empty"),
    ("a", {"stop": [5]}, "stop: .*5"),
    ("a", {"stop": [2.5]}, "stop: .*2.5"),
    ("a", {"widths": 2}, "widths: .*2"),
    ("a", {"widths": (1.5,)}, "widths: .*1.5"),
    ("a", {"capacity": 300.5}, "capacity: .*300.5"),
    ("a", {"processors": [3]}, r"processors: .*\[3\]"),
    (b"a", {}, "prompts: .*bytes"),
    ([[True]], {}, r"prompts\[0\]: .*True"),
    ("a", {"stop": [[300]]}, "stop: .*300"),
    ("a", {"banned_tokens": [300]}, "banned_tokens: .*300"),
    ("a", {"allowed_tokens": []}, "allowed_tokens"),
    ("a", {"allowed_tokens": [4], "banned_tokens": [4]}, "allowed_tokens"),
    ("a", {"allowed_tokens": [4], "first_tokens": [5]}, "first_tokens"),
    ("a", {"allowed_tokens": [END], "min_new_tokens": 2}, "min_new_tokens"),
    ("a", {"min_new_tokens": 2, "stop": [[4, 5]]}, "min_new_tokens"),
    ("a", {"system": "s"}, "system"),
    ([[4]], {"chat": True}, r"prompts\[0\]: expected a string"),
    ("a", {"num_samples": 0}, "num_samples"),
    ("a", {"batch_size": 0}, "batch_size"),
    ("a", {"drafter": "sufix"}, "drafter: .*'sufix'; did you mean 'suffix'"),
    ("a", {"drafter": 3}, "drafter: .*int"),
    (
        "a",
        {"drafter": drafters.early_exit(1, 2), "verify": verify.with_replacement(), "widths": (9,)},
        "widths",
    ),
    ("a", {"drafter": drafters.early_exit(1, 2, sample=False), "verify": verify.kseq()}, "verify: kseq"),
]


@pytest.mark.parametrize(("prompts", "options", "message"), BAD)
def test_bad_input_is_one_error_before_anything_compiles(tiny, monkeypatch, prompts, options, message):
    def never(*args: Any, **keywords: Any) -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr(engine, "start", never)
    with pytest.raises(ValueError, match=message):
        generate(tiny, prompts, **options)
    if not {"num_samples", "batch_size"} & set(options) and isinstance(prompts, str):
        with pytest.raises(ValueError, match=message):
            stream(tiny, prompts, **options)


def test_text_needs_a_tokenizer():
    model = Model(*LM64)
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected token ids"):
        generate(model, "a")
    with pytest.raises(ValueError, match="stop: expected token ids"):
        generate(model, [[1]], stop="x")
    with pytest.raises(ValueError, match=r"eos: .*64"):
        Model(*LM64, eos=(64,))
    with pytest.raises(ValueError, match="vocab_size"):
        Model(*LM64, vocab_size=65)
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected token ids in 0 .. 63, got 99"):
        generate(Model(*LM64, tokenizer=tokenizer()), "aa")


def test_unknown_keywords_name_the_nearest():
    model = Model(*LM64)
    for call in (generate, stream, Session(model).say):
        arguments = ([1],) if call == Session(model).say else (model, [1])
        with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
            call(*(arguments if call in (generate, stream) else ([1],)), temprature=1.0)
    with pytest.raises(TypeError, match="num_beams"):
        generate(model, [1], num_beams=2)


def test_a_writer_reads_token_by_token_whatever_the_blocks_are():
    spoken = tokenizer()
    ids = spoken.encode("aé漢 the b\n\nQ: x")
    for size in (1, 2, 5, len(ids)):
        writer = Writer(spoken, ["\nQ:", "\n\nQ", "zz"])
        shown = ""
        for at in range(0, len(ids), size):
            shown += writer.push(ids[at : at + size], "length" if at + size >= len(ids) else None)
            if writer.finish:
                break
        assert (shown, writer.text, writer.finish) == ("aé漢 the b",) * 2 + ("stop",)
        assert spoken.decode(writer.tokens) == "aé漢 the b\n\nQ"


def test_the_package_offers_the_front_door():
    assert {"load", "generate", "stream", "Session", "drafters", "engine"} <= set(jspec.__all__)
    assert json.dumps(Stats(1, 2, (1,), (1,)).mean_accepted_length) == "2.0"
    assert START == 0


def test_what_one_row_may_not_does_not_bind_another():
    model = Model(*testing.table_lm(np.full((7, 7), 1 / 7)), eos=(6,))
    shared = {"min_new_tokens": [0, 2], "max_new_tokens": 3, "temperature": 1.0}
    out = generate(model, [[0], [1]], allowed_tokens=[[6], [2, 3]], **shared)
    assert out.tokens[0] == [6]
    assert set(out.tokens[1]) <= {2, 3}
    out = generate(model, [[0], [1]], first_tokens=[[6], [2, 3]], **shared)
    assert out.tokens[0] == [6]
    assert out.tokens[1][0] in (2, 3)
    with pytest.raises(ValueError, match="min_new_tokens: expected an allowed token that ends nothing"):
        generate(model, [[0], [1]], allowed_tokens=[[2], [6]], **shared)


def test_arrays_are_taken_like_lists_and_no_stop_like_an_empty_one():
    model = Model(*testing.table_lm(np.full((7, 7), 1 / 7)))
    arrays = {"banned_tokens": np.array([1, 2]), "temperature": np.array(0.5), "stop": None}
    lists = {"banned_tokens": [1, 2], "temperature": 0.5}
    assert generate(model, [0], **arrays).tokens == generate(model, [0], **lists).tokens
