"""The joint law of four tokens through the whole engine, against enumeration with the model itself."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import CASES, Tiny, draft, encoder_decoder, first_layer, full_logits, stranger, target

from jspec import drafters, engine, sampling, verify
from jspec.types import Drafter, Verifier

V, NEW, ROWS = 4, 4, 30_000
PROMPT = [1, 2, 1, 3, 2]
SEQUENCES = np.array(list(itertools.product(range(V), repeat=NEW)))
PENALTY = 1.7

#: Cases of the quick suite: block, tree and K-SEQ rules; chosen and iid drafts; chains and trees.
#: The rest runs under `slow`.
QUICK = (
    "model/block",
    "suffix tree/tree",
    "iid tree/kseq",
)


def exact_law(model: Tiny, temperature: float, top_p: float, penalty: float) -> np.ndarray:
    """Probability of each of the V^4 continuations, by a plain sort-based reference of the sampler."""
    whole = np.concatenate([np.tile(PROMPT, (len(SEQUENCES), 1)), SEQUENCES], axis=1)
    logits = full_logits(model, whole)
    probability = np.ones(len(SEQUENCES))
    for i in range(NEW):
        end = len(PROMPT) + i
        z = logits[:, end - 1].astype(np.float64)
        for row in range(len(whole)):
            for token in set(whole[row, :end]):
                z[row, token] = z[row, token] / penalty if z[row, token] > 0 else z[row, token] * penalty
        if temperature == 0:
            law = (z == z.max(-1, keepdims=True)).astype(float)
        else:
            law = np.exp((z - z.max(-1, keepdims=True)) / temperature)
            law /= law.sum(-1, keepdims=True)
        for row in law:
            order = np.argsort(-row)
            kept = np.searchsorted(np.cumsum(row[order]), top_p) + 1
            row[order[kept:]] = 0
        law /= law.sum(-1, keepdims=True)
        probability *= law[np.arange(len(whole)), SEQUENCES[:, i]]
    return probability


def p_value(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square over cells of at least 5 (the others pooled), Wilson-Hilferty's normal approximation."""
    large = expected >= 5
    c = np.append(counts[large], counts[~large].sum())
    e = np.append(expected[large], expected[~large].sum())
    c, e = (c[:-1], e[:-1]) if e[-1] < 5 else (c, e)
    statistic, freedom = ((c - e) ** 2 / e).sum(), len(e) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def sample(
    model: Tiny,
    drafter: Drafter,
    rule: Verifier,
    temperature: np.ndarray,
    top_p: float,
    penalty: float,
) -> np.ndarray:
    """Index into SEQUENCES of every row's four tokens."""
    rows = len(temperature)
    one = jnp.ones(rows)
    processors = [sampling.penalties(V, one * penalty, 0 * one, 0 * one)] if penalty != 1 else []
    settings = sampling.Settings(jnp.asarray(temperature), top_p=one * top_p if top_p < 1 else None)
    prompt = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), model.prompt([PROMPT]))
    state = engine.generate(
        model.params,
        prompt,
        sampling.row_keys(jnp.arange(rows) + 12345),
        target=model.lm,
        drafter=drafter,
        verify=rule,
        sampler=sampling.sampler(settings, processors),
        max_new_tokens=NEW,
        capacity=len(PROMPT) + NEW,
    )
    new = np.asarray(state.tokens)[:, len(PROMPT) :]
    return (new * V ** np.arange(NEW)[::-1][None]).sum(1)


def check(
    drafter: Drafter,
    rule: Verifier,
    top_p: float = 1.0,
    penalty: float = 1.0,
    rows: int = ROWS,
    model: Tiny | None = None,
) -> None:
    model = target(V) if model is None else model
    temperature = np.where(np.arange(2 * rows) % 2 == 0, 1.0, 0.6).astype(np.float32)
    temperature[-50:] = 0
    codes = sample(model, drafter, rule, temperature, top_p, penalty)
    for value in (1.0, 0.6):
        mine = codes[temperature == np.float32(value)]
        counts = np.bincount(mine, minlength=V**NEW)
        law = exact_law(model, value, top_p, penalty)
        assert counts[law == 0].sum() == 0, "a token outside the filtered law came out"
        p = p_value(counts, law * len(mine))
        print(f"temperature {value}: p = {p:.4f}")
        assert p > 1e-5
    assert (codes[temperature == 0] == exact_law(model, 0, top_p, penalty).argmax()).all()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]
)
def test_joint_law(name):
    check(CASES[name].drafter(target(V), draft(V)), CASES[name].verify())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model/block", "suffix tree/tree"])
def test_joint_law_with_penalty_and_top_p(name):
    check(CASES[name].drafter(target(V), draft(V)), CASES[name].verify(), top_p=0.8, penalty=PENALTY)


@pytest.mark.parametrize(
    "name", ["model/block", *(pytest.param(n, marks=pytest.mark.slow) for n in QUICK if n != "model/block")]
)
def test_joint_law_of_an_encoder_decoder(name):
    """The drafter has an encoder of its own, or none and the target's cross-attention in its cache."""
    model = encoder_decoder(V)
    check(CASES[name].drafter(model, first_layer(model)), CASES[name].verify(), model=model)


@pytest.mark.slow
def test_joint_law_with_a_stranger_for_a_drafter():
    check(drafters.model(stranger(V), 3), verify.block())


@pytest.mark.slow
def test_this_test_sees_a_wrong_rule():
    """A chosen draft judged as if it had been drawn, the commonest bug of the field."""
    drafter = drafters.model(stranger(V), 1)
    method = drafter.method

    def propose(*args):
        draft, state = method.propose(*args)
        best = jnp.argmax(draft.laws[:, 0], axis=-1).astype(jnp.int32)
        return draft._replace(tokens=draft.tokens.at[:, 1].set(best)), state

    wrong = dataclasses.replace(drafter, method=method._replace(propose=propose))
    temperature = np.ones(ROWS, np.float32)
    law = exact_law(target(V), 1.0, 1.0, 1.0) * ROWS
    for tried, low, high in ((wrong, 0, 1e-6), (drafter, 1e-5, 1)):
        counts = np.bincount(sample(target(V), tried, verify.token(), temperature, 1, 1), minlength=V**NEW)
        assert low <= p_value(counts, law) <= high
