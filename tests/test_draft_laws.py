"""What a network is taught is what it drafts from: `Network.teach` against the laws of engine rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import NETWORKS, NUM_TOKENS, drafter_of
from zoo import encoder_decoder, target

from jspec import engine, sampling, verify
from jspec.drafters import nets
from jspec.types import Block, Info, Prompt

V = 11
PROMPTS = [[3], [1, 4, 1, 5], [2, 6, 5, 3, 5, 2, 6]]
NEW = [12, 9, 14]

#: Cases of the quick suite; the rest runs under `slow`.
QUICK: tuple[str, ...] = ("eagle3 own",)
QUICK_ENCODER_DECODER: tuple[str, ...] = ()


def recorded(info: Info) -> dict:
    """The draft of the round, beside every token that it emitted."""
    width = info.verdict.tokens.shape[1]

    def beside(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, None], (x.shape[0], width, *x.shape[1:]))

    depth = jnp.broadcast_to(jnp.arange(width)[None], info.verdict.tokens.shape)
    assert info.draft.laws is not None
    return {
        "depth": depth,
        "laws": beside(info.draft.laws),
        "tokens": beside(info.draft.tokens),
        "valid": beside(info.draft.valid),
    }


def names(chosen: tuple[str, ...]) -> list:
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in NETWORKS]


def check(name: str, model) -> None:
    network, weights, drafter = drafter_of(name, model, V)
    tiny = model(V)
    # What looks at the target's cache needs taps where there is none: in training.
    assert drafter.method.taps == (() if name.startswith(("glide", "assistant")) else network.taps)
    assert drafter.method.draws == "iid"
    prompt = tiny.prompt(PROMPTS)
    state = engine.generate(
        tiny.params,
        prompt,
        sampling.row_keys(jnp.arange(3)),
        target=tiny.lm,
        drafter=drafter,
        verify=verify.token(),
        sampler=sampling.sampler(sampling.Settings(jnp.ones(3))),
        max_new_tokens=jnp.array(NEW),
        record=recorded,
    )
    shown = jax.tree.map(np.asarray, state.record)
    tokens = np.asarray(state.tokens)
    rounds = [
        (row, slot)
        for row, given in enumerate(PROMPTS)
        for slot in range(len(given), len(given) + NEW[row])
        if shown["depth"][row, slot] == 0
    ]
    assert len(rounds) >= 6
    width = max(slot for _, slot in rounds) + NUM_TOKENS
    texts = np.zeros((len(rounds), width), np.int32)
    for i, (row, slot) in enumerate(rounds):  # the root stands at slot - 1
        texts[i, :slot] = tokens[row, :slot]
        texts[i, slot : slot + NUM_TOKENS] = shown["tokens"][row, slot, 1:]
    of = np.array([row for row, _ in rounds])
    anchors = jnp.array([[slot - 1] for _, slot in rounds], jnp.int32)
    lengths = anchors[:, 0] + 1 + NUM_TOKENS
    source = (None, None) if prompt.source is None else (prompt.source[of], prompt.source_lengths[of])
    whole = Prompt(jnp.asarray(texts), lengths, *source)
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], texts.shape)

    @jax.jit
    def taught(params, weights):
        cache = tiny.lm.start(params, whole, 0)
        forward = tiny.lm.extend(params, cache, Block(whole.tokens, positions), taps=network.taps)
        # Nothing from the anchor on may be read: it is not known yet where the engine drafts.
        unknown = (positions >= anchors)[..., None]
        hidden, taps = jax.tree.map(lambda x: jnp.where(unknown, 1e3, x), (forward.hidden, forward.taps))
        text = nets.Text(whole.tokens, lengths, anchors, hidden, taps, *source)
        logits = network.teach(weights, tiny.lm, params, text, NUM_TOKENS)
        return jax.nn.softmax(nets.spread(weights, logits, V))[:, 0]

    laws = np.asarray(taught(tiny.params, weights))
    drafted = 0
    for i, (row, slot) in enumerate(rounds):
        for k in range(NUM_TOKENS):
            if shown["valid"][row, slot, k + 1]:
                np.testing.assert_allclose(shown["laws"][row, slot, k], laws[i, k], atol=1e-5)
                drafted += 1
    assert drafted >= 1.5 * len(rounds)  # nothing where a budget ends, or before look-ahead tokens ran


@pytest.mark.parametrize("name", names(QUICK))
def test_the_engine_drafts_from_the_laws_that_are_taught(name):
    check(name, target)


@pytest.mark.parametrize("name", names(QUICK_ENCODER_DECODER))
def test_on_an_encoder_decoder_too(name):
    check(name, encoder_decoder)
