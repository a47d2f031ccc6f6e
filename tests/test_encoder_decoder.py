"""The front door with an encoder-decoder: prompts are what the encoder reads."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from zoo import Tiny, reference

import jspec
from jspec import drafters, engine, sampling, testing

V, EOS, START = 13, 1, 0
SOURCES = [[5, 3, 9, EOS], [2, EOS], [7, 7, 4, 8, 2, 6, 11, EOS], [3, EOS], [9, 10, EOS]]


@pytest.fixture(scope="module")
def model() -> jspec.Model:
    lm, params = testing.tiny_seq2seq(seed=4, vocab_size=V)
    return jspec.Model(lm, params, eos=(EOS,), decoder_start=(START,))


@pytest.fixture(scope="module")
def answers(model: jspec.Model) -> list[list[int]]:
    """Greedy answers of up to 12 tokens, by full forwards."""
    return [
        reference(Tiny(model.lm, model.params, tuple(source)), [START], 12, (EOS,))[1:] for source in SOURCES
    ]


@pytest.mark.parametrize("batch_size", [None, 2])
def test_generate_equals_full_forwards_and_rows_are_refilled(model, answers, batch_size):
    out = jspec.generate(model, SOURCES, drafter=drafters.suffix(3), max_new_tokens=12, batch_size=batch_size)
    assert out.tokens == answers
    assert out.finish_reasons == ["eos" if a[-1] == EOS else "length" for a in answers]


@pytest.mark.slow
def test_a_smaller_encoder_decoder_drafts(model, answers):
    smaller = jspec.Model(
        *testing.tiny_seq2seq(seed=5, vocab_size=V, num_layers=1, num_encoder_layers=1, width=16),
        decoder_start=(START,),
    )
    out = jspec.generate(model, SOURCES, drafter=smaller, max_new_tokens=12)
    assert out.tokens == answers
    sampled = [
        jspec.generate(
            model, SOURCES[row], drafter=smaller, max_new_tokens=12, temperature=1.0, seed=row
        ).tokens
        for row in range(2)
    ]
    together = jspec.generate(
        model, SOURCES[:2], drafter=smaller, max_new_tokens=12, temperature=1.0, seed=[0, 1]
    )
    assert together.tokens == [sampled[0][0], sampled[1][0]]


@pytest.mark.parametrize("batch_size", [pytest.param(2, marks=pytest.mark.slow), 16])
def test_a_draft_model_reads_its_own_rows_source(model, answers, batch_size):
    """The target drafts for itself: a row that read another's source, or kept the one of the row before it,
    would be refused somewhere. With 16 rows two are refilled at a time, and one place is filled up."""
    endless = dataclasses.replace(model, eos=())
    sources = [SOURCES[i % len(SOURCES)] for i in range(5 if batch_size == 2 else 21)]
    limits = [12 - i % 4 for i in range(len(sources))]
    out = jspec.generate(endless, sources, drafter=model, max_new_tokens=limits, batch_size=batch_size)
    assert [len(tokens) for tokens in out.tokens] == limits
    for i, tokens in enumerate(out.tokens):
        expected = answers[i % len(SOURCES)]
        assert tokens[: len(expected)] == expected[: limits[i]]
    assert out.stats.acceptance_rate == 1


@pytest.mark.slow
def test_a_draft_model_with_fewer_source_positions(model, answers):
    """The padding that the target's width asks for is cut off; of a longer source it reads the beginning."""
    settings = dict(vocab_size=V, positions="learned", bounded=True, context_length=64, num_layers=1)
    smaller = jspec.Model(
        *testing.tiny_seq2seq(**settings, num_encoder_layers=1, source_length=6), decoder_start=(START,)
    )
    assert jspec.generate(model, SOURCES, drafter=smaller, max_new_tokens=12).tokens == answers


def test_a_decoder_only_model_drafts_for_an_encoder_decoder(model, answers):
    """A drafter sees the decoder's tokens; one without encoder makes do with them."""
    smaller = jspec.Model(*testing.tiny_decoder(seed=5, vocab_size=V, num_layers=1))
    assert jspec.generate(model, SOURCES, drafter=smaller, max_new_tokens=12).tokens == answers


def test_decoder_prefix(model, answers):
    prefix = answers[0][:3]
    out = jspec.generate(model, SOURCES[0], decoder_prefix=prefix, max_new_tokens=9)
    assert out.tokens == [answers[0][3:]]
    each = [answers[0][:2], answers[2][:1]]
    out = jspec.generate(model, [SOURCES[0], SOURCES[2]], decoder_prefix=each, max_new_tokens=[10, 11])
    assert out.tokens == [answers[0][2:], answers[2][1:]]


def test_stream_and_samples(model, answers):
    pieces = list(jspec.stream(model, SOURCES[2], max_new_tokens=12))
    assert [token for piece in pieces for token in piece] == answers[2]
    out = jspec.generate(model, SOURCES[:2], num_samples=2, temperature=1.0, max_new_tokens=6)
    assert len(out.tokens) == 4
    assert np.all([len(tokens) <= 6 for tokens in out.tokens])


def test_refusals(model):
    decoder = jspec.Model(*testing.tiny_decoder(vocab_size=V))
    with pytest.raises(ValueError, match="decoder_prefix: expected None, because model has no encoder"):
        jspec.generate(decoder, [1, 2], decoder_prefix=[3])
    with pytest.raises(
        ValueError, match=r"decoder_prefix: expected one, or one for each of 3 prompts, got 2"
    ):
        jspec.generate(model, SOURCES[:3], decoder_prefix=[[3], [4]])
    with pytest.raises(ValueError, match=r"decoder_prefix\[0\]: .*13"):
        jspec.generate(model, SOURCES[0], decoder_prefix=[13])
    with pytest.raises(ValueError, match="expected token ids, because model has no tokenizer, got a string"):
        jspec.generate(model, SOURCES[0], decoder_prefix="so")
    with pytest.raises(ValueError, match="chat: expected False, because model is an encoder-decoder"):
        jspec.generate(model, SOURCES[0], chat=True)
    with pytest.raises(ValueError, match="empty prompt"):
        jspec.generate(model, [[]])
    with pytest.raises(ValueError, match="a session needs a decoder-only model"):
        jspec.Session(model)
    with pytest.raises(ValueError, match="decoder_start: expected the tokens"):
        jspec.Model(model.lm, model.params)
    with pytest.raises(ValueError, match=r"decoder_start: .*13"):
        jspec.Model(model.lm, model.params, decoder_start=(13,))
    with pytest.raises(ValueError, match=r"prompt\.source: expected the encoder's tokens"):
        jspec.generate(decoder, [1, 2], drafter=drafters.model(model))
    bounded = jspec.Model(
        *testing.tiny_seq2seq(
            vocab_size=V, positions="learned", bounded=True, source_length=4, context_length=8
        ),
        decoder_start=(START,),
    )
    with pytest.raises(ValueError, match=r"prompts\[0\]: 8 tokens, model reads at most 4"):
        jspec.generate(bounded, SOURCES[2])
    for samples in (1, 2):
        with pytest.raises(
            ValueError,
            match=r"prompts\[1\]: 1 decoder tokens \(start and prefix\) and max_new_tokens=8 need 9",
        ):
            jspec.generate(bounded, [[3], [3]], max_new_tokens=[2, 8], num_samples=samples)
    banned = dataclasses.replace(model, banned=tuple(range(2, V)))
    with pytest.raises(ValueError, match=r"first_tokens: expected at least one token that is not banned"):
        jspec.generate(banned, SOURCES[0], first_tokens=[5])


def test_sources_that_do_not_fit_are_refused(model):
    """By the engine, whose callers pad on their own."""
    target = Tiny(model.lm, model.params, tuple(SOURCES[0]))
    shared = dict(target=model.lm, drafter=drafters.plain(), max_new_tokens=2, sampler=sampling.greedy(1))
    keys, prompt = sampling.row_keys(jnp.array([0])), target.prompt([[START]])
    for length in (-1, 5):
        with pytest.raises(ValueError, match=rf"prompt\.source: expected lengths in 0 \.\. 4, got {length}"):
            engine.start(model.params, prompt._replace(source_lengths=jnp.array([length])), keys, **shared)
    state = engine.start(model.params, prompt, keys, **shared)
    wider = prompt._replace(source=jnp.pad(prompt.source, ((0, 0), (0, 1))))
    with pytest.raises(
        ValueError, match=r"prompt\.source: expected the width of the state's other rows, got 5"
    ):
        engine.insert(model.params, state, [0], wider, keys, **shared)
