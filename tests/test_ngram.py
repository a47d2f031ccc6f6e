"""N-gram tables against textbook counting, and the drafter that draws from them."""

from __future__ import annotations

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_text
import zoo
from test_law import p_value

from jspec import drafters, engine, sampling, testing, text, verify
from jspec.checkpoint import Model
from jspec.io.tokenizer import Vocabulary, check_vocabularies
from jspec.types import Context, Prompt
from training import ngram, recipe
from training.data import Example, Record

V, START = 12, 0


def examples(count: int = 30, seed: int = 0) -> list[Example]:
    """Token 11 never occurs, 10 never has a successor, some tokens have many."""
    rng = np.random.default_rng(seed)
    return [
        Example(
            rng.integers(0, V, 3).tolist(), [*rng.geometric(0.3, rng.integers(1, 9)).clip(1, 9).tolist(), 10]
        )
        for _ in range(count)
    ]


def textbook(texts: list[Example], decoder_start: tuple[int, ...]) -> tuple[dict, dict]:
    """Occurrences of tokens and of pairs, one by one."""
    tokens, pairs = collections.Counter(), collections.Counter()
    for source, target in texts:
        last = decoder_start[-1] if decoder_start else source[-1]
        for token in target:
            tokens[token] += 1
            pairs[last, token] += 1
            last = token
    return tokens, pairs


def textbook_law(
    texts: list[Example], decoder_start: tuple[int, ...], kept: int, delta: float, discount: float
) -> np.ndarray:
    """P(x | w) for all w and x, with the ``kept`` most frequent successors."""
    tokens, pairs = textbook(texts, decoder_start)
    total = sum(tokens.values())
    law = np.zeros((V, V))
    for w in range(V):
        own = sorted((-n, x) for (first, x), n in pairs.items() if first == w)
        occurrences = sum(-n for n, _ in own)
        given = 0.0
        for n, x in own[:kept]:
            law[w, x] = max(-n - discount, 0) / occurrences
            given += law[w, x]
        for x in range(V):
            law[w, x] += (1 - given) * (tokens[x] + delta) / (total + delta * V)
    return law


@pytest.mark.parametrize("decoder_start", [(), (START,), (5, START)])
def test_counts_equal_a_textbook_count(decoder_start):
    texts = examples()
    counts = ngram.count(texts, V, decoder_start)
    tokens, pairs = textbook(texts, decoder_start)
    assert counts.tokens.tolist() == [tokens[x] for x in range(V)]
    found = list(zip(counts.first.tolist(), counts.second.tolist(), counts.pairs.tolist(), strict=True))
    assert found == sorted((w, x, n) for (w, x), n in pairs.items())


@pytest.mark.parametrize(("delta", "discount"), [(0.1, 0.75), (1.0, 0.0), (0.01, 1.0)])
@pytest.mark.parametrize("kept", [1, 3, V, 100])
def test_laws_equal_the_textbook_formula(kept, delta, discount):
    texts = examples()
    table = ngram.smooth(ngram.count(texts, V, (START,)), successors=kept, delta=delta, discount=discount)
    assert table.successors.shape == (V, min(kept, V))
    law = table.law(jnp.arange(V))
    assert (law >= 0).all()
    np.testing.assert_allclose(law.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(table.unigram.sum(), 1, atol=1e-6)
    np.testing.assert_allclose(law, textbook_law(texts, (START,), kept, delta, discount), atol=1e-6)
    # What never had a successor is followed by anything, as often as it occurs.
    np.testing.assert_allclose(law[10], table.unigram, atol=1e-7)


def test_a_unigram_model_looks_at_no_token():
    texts = examples()
    table = ngram.smooth(ngram.count(texts, V), order=1, delta=0.5)
    tokens, _ = textbook(texts, ())
    expected = np.array([tokens[x] + 0.5 for x in range(V)]) / (sum(tokens.values()) + 0.5 * V)
    assert table.successors.shape == (V, 0)
    np.testing.assert_allclose(table.law(jnp.arange(V)), np.tile(expected, (V, 1)), rtol=1e-6)


def test_padding_of_the_logits_has_no_probability():
    counts = ngram.count(examples(), V)
    table, wide = ngram.smooth(counts), ngram.smooth(counts, width=V + 4)
    law = wide.law(jnp.arange(V + 4))
    np.testing.assert_allclose(law[:V, :V], table.law(jnp.arange(V)), atol=1e-7)
    assert not law[:, V:].any()
    np.testing.assert_allclose(law.sum(1), 1, atol=1e-6)


def test_the_loss_is_that_of_the_law():
    texts, held_out = examples(), examples(seed=1)
    table = ngram.smooth(ngram.count(texts, V), successors=2)
    law = np.asarray(table.law(jnp.arange(V)), np.float64)
    _, pairs = textbook(held_out, ())
    expected = sum(-n * np.log(law[pair]) for pair, n in pairs.items()) / sum(pairs.values())
    assert ngram.loss(table, held_out) == pytest.approx(expected, rel=1e-6)


# --- the drafter --------------------------------------------------------------------------------------


def test_drafts_are_drawn_from_the_law_under_the_sampler():
    """Each node's law is P(x | its parent) with temperature and top-p, and the tokens follow it."""
    table, rows = zoo.bigram(V), 4000
    lm, params = testing.table_lm(np.full((V, V), 1 / V))
    drafter = drafters.ngram(table, 3)
    temperature = jnp.where(jnp.arange(rows) % 2 == 0, 1.0, 0.5)
    sampler = sampling.sampler(sampling.Settings(temperature, top_p=jnp.full(rows, 0.9)))
    tokens = jnp.tile(jnp.array([[3, 7]]), (rows, 1))
    lengths = jnp.full(rows, 2)
    state = drafter.method.init(drafter.params, Prompt(tokens, lengths), 9, lm)

    @jax.jit
    def propose(table, keys):
        context = Context(tokens, lengths, lengths + 9, (), sampler, lm, params, None)
        return drafter.method.propose(table, state, context, keys)[0]

    draft = propose(drafter.params, sampling.row_keys(jnp.arange(rows)))
    assert draft.valid.all()
    assert drafter.method.draws == "iid"
    for i in range(3):
        expected = sampler.law((), jnp.log(table.law(draft.tokens[:, i])))
        np.testing.assert_allclose(draft.laws[:, i], expected, atol=1e-6)
    first = np.asarray(draft.tokens)[::2, 1]
    law = np.asarray(draft.laws[0, 0])
    deviation = np.sqrt(law * (1 - law) / len(first))
    np.testing.assert_array_less(
        np.abs(np.bincount(first, minlength=V) / len(first) - law), 4.5 * deviation + 1e-9
    )


@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_joint_law_of_the_engine(rule):
    """Chi-square of three tokens of a Markov chain against all 64 that there are."""
    size, rows = 4, 20_000
    law = np.random.default_rng(6).dirichlet(np.ones(size), size)
    lm, params = testing.table_lm(law)
    state = engine.generate(
        params,
        Prompt(jnp.full((rows, 1), 2), jnp.ones(rows, jnp.int32)),
        sampling.row_keys(jnp.arange(rows)),
        target=lm,
        drafter=drafters.ngram(zoo.bigram(size), 2),
        verify=verify.named(rule),
        sampler=sampling.sampler(sampling.Settings(jnp.ones(rows))),
        max_new_tokens=3,
        capacity=4,
    )
    a, b, c = np.asarray(state.tokens)[:, 1:].T
    expected = law[2][:, None, None] * law[:, :, None] * law[None]
    p = p_value(np.bincount(16 * a + 4 * b + c, minlength=64), rows * expected.ravel())
    print(f"p = {p:.4f}")
    assert p > 1e-5


@pytest.mark.parametrize("order", [1, 2])
def test_acceptance_is_what_the_laws_say(order):
    """On text of a Markov chain the bigram model becomes the chain, and a draft after w is kept with
    probability sum_x min(p, q)."""
    rng = np.random.default_rng(5)
    law = rng.dirichlet(np.full(V, 0.3), V)
    lm, params = testing.table_lm(law)
    prompt = Prompt(jnp.asarray(rng.integers(0, V, (64, 1)), jnp.int32), jnp.ones(64, jnp.int32))
    sampler = sampling.sampler(sampling.Settings(jnp.ones(64)))

    def generate(drafter, rule, seed):
        return engine.generate(
            params,
            prompt,
            sampling.row_keys(jnp.arange(64) + seed),
            target=lm,
            drafter=drafter,
            verify=rule,
            sampler=sampler,
            max_new_tokens=200,
            record=engine.statistics,
        )

    state = generate(drafters.plain(), verify.target_only(), 1000)
    texts = [Example(row[:1].tolist(), row[1:].tolist()) for row in np.asarray(state.tokens)[:, :201]]
    table = ngram.smooth(ngram.count(texts, V), order=order)
    state = generate(drafters.ngram(table, 1), verify.token(), 0)
    alpha = np.minimum(law, np.asarray(table.law(jnp.arange(V)))).sum(1)
    tokens, offset, accepted = (
        np.asarray(x) for x in (state.tokens, state.record.offset, state.record.accepted)
    )
    at = np.argwhere((offset[:, 1:200] == 0) & (np.asarray(state.record.proposed)[:, 1:200] == 1))
    expected = alpha[tokens[at[:, 0], at[:, 1]]]
    kept = accepted[at[:, 0], at[:, 1] + 1]
    print(f"order {order}: expected alpha {expected.mean():.3f}, accepted {kept.mean():.3f} of {len(at)}")
    assert abs(kept.mean() - expected.mean()) < 4.5 * 0.5 / np.sqrt(len(at))
    assert (expected.mean() > 0.9) == (order == 2)


def test_refusals(tmp_path):
    table = zoo.bigram(V)
    model = Model(*testing.table_lm(np.full((V + 1, V + 1), 1 / (V + 1))))
    with pytest.raises(ValueError, match="table: expected one of the target's 13 tokens, got 12"):
        text.generate(model, [[1]], drafter=drafters.ngram(table), max_new_tokens=4)
    with pytest.raises(ValueError, match="num_tokens: expected a whole number >= 1, got 0"):
        drafters.ngram(table, 0)
    with pytest.raises(ValueError, match=r"examples: expected ids in 0 .. 11, got 1 .. 12"):
        ngram.count([Example([1], [12])], V)
    with pytest.raises(FileNotFoundError, match="table: no such file"):
        drafters.ngram(tmp_path / "none.npz")


def test_files(tmp_path):
    table, path = zoo.bigram(V), tmp_path / "table"
    drafters.save_ngram(path, table)
    jax.tree.map(np.testing.assert_array_equal, drafters.load_ngram(path), table)
    assert drafters.ngram(path).params._fields == table._fields
    assert drafters.load_ngram(path).vocabulary is None
    spoken = table._replace(vocabulary=Vocabulary((*"abcdefghi", "é", "\ud83d")))
    drafters.save_ngram(path, spoken)
    assert drafters.load_ngram(path).vocabulary == spoken.vocabulary
    with pytest.raises(ValueError, match="token 1 is 'b' for the drafter and 'c' for the target"):
        check_vocabularies(Vocabulary(("a", "c")), drafters.ngram(path).params)
    drafters.save_ngram(path, table)
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not an n-gram table"):
            drafters.load_ngram(path)
    with path.open("wb") as file:
        np.savez(file, unigram=np.ones(3))
    with pytest.raises(ValueError, match=r"is not an n-gram table: .*backoff"):
        drafters.load_ngram(path)
    for wrong in (
        table._replace(excess=table.excess * 2),
        table._replace(backoff=table.backoff[1:]),
        table._replace(successors=table.successors.at[0, 0].set(V)),
        table._replace(unigram=table.unigram.at[0].add(-1).at[1].add(1)),
    ):
        drafters.save_ngram(path, wrong)
        with pytest.raises(ValueError, match=r"table: .*: expected"):
            drafters.load_ngram(path)


def test_the_recipe(tmp_path):
    """A folder with a table that drafts; the second time nothing is counted."""
    model = Model(*testing.table_lm(np.full((V + 2, V + 2), 1 / (V + 2))), vocab_size=V)
    corpus = recipe.Corpus(examples(), examples(seed=1))
    config = ngram.Ngram(target="any", successors=4)
    table = ngram.run(config, corpus, tmp_path / "run", target=model)
    jax.tree.map(
        np.testing.assert_array_equal,
        table,
        ngram.smooth(ngram.count(corpus.train, V), successors=4, width=V + 2),
    )
    done = json.loads((tmp_path / "run/DONE").read_text())
    assert done["tokens"] == sum(len(target) for _, target in corpus.train)
    assert done["validation_loss"] == pytest.approx(ngram.loss(table, corpus.validation))
    before = (tmp_path / "run/ngram.npz").stat().st_mtime_ns
    again = ngram.run(config, corpus, tmp_path / "run", target=model)
    jax.tree.map(np.testing.assert_array_equal, table, again)
    assert (tmp_path / "run/ngram.npz").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"output: .* differs in successors"):
        ngram.run(ngram.Ngram(target="any", successors=5), corpus, tmp_path / "run", target=model)
    with pytest.raises(ValueError, match="validation"):
        ngram.run(config, recipe.Corpus(examples(), []), tmp_path / "other", target=model)
    inputs = json.loads((tmp_path / "run/inputs.json").read_text())
    assert (inputs["tokens"], inputs["decoder_start"]) == (None, [])
    with pytest.raises(ValueError, match="discount"):  # unseen pairs would have an infinite loss
        ngram.Ngram(discount=0)
    out = drafters.ngram(tmp_path / "run/ngram.npz", 2)
    assert out.method.width == 3


def test_prompts_of_a_chat_model_are_counted_as_it_gets_them(tmp_path):
    model = tiny_text.decoder()
    records = [Record("a", "the"), Record("b", "he")]
    table = ngram.run(ngram.Ngram(chat=True), recipe.Corpus(records, records), tmp_path / "run", target=model)
    chats = [model.tokenizer.chat([{"role": "user", "content": record.source}]) for record in records]
    texts = [
        Example(chat, [*model.tokenizer.encode(r.target), 1]) for chat, r in zip(chats, records, strict=True)
    ]
    expected = ngram.smooth(ngram.count(texts, model.vocab_size), width=263)
    assert table.vocabulary == model.vocabulary
    expected = expected._replace(vocabulary=model.vocabulary)
    jax.tree.map(np.testing.assert_array_equal, table, expected)
    inputs = json.loads((tmp_path / "run/inputs.json").read_text())
    assert inputs["tokens"] == recipe.text_fingerprint(model.vocabulary.tokens)
