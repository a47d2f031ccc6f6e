"""Trained tokenizers: what goes in comes out, the special ids are T5's, the same text gives the same file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.io import tokenizer as tokenizers
from training import tokenizer
from training.data import Record
from training.tokenizer import TokenizerConfig

PAIRS = [
    Record("Two young, white males are outside near many bushes.", "Zwei junge weiße Männer sind im Freien."),
    Record("A man in a blue shirt (age 47) is standing.", "Ein Mann im blauen Hemd steht auf 3 Stühlen."),
    Record('Her "own" café \u2013 it\'s open 24/7!', "Ihr „eigenes“ Café \u2013 es ist 24/7 geöffnet!"),
    Record("Over the bridge: 50% off; only £3.50?", "Über die Brücke: 50 % Rabatt; nur 3,50 €?"),
    Record("naïve coöperation, ﬁve ½ apples…", "ÄÖÜ äöü ß, fünf ½ Äpfel…"),
]
TEXTS = [text for pair in PAIRS for text in pair]
CHARACTERS = sorted({c for text in TEXTS for c in text})


@pytest.fixture(scope="module")
def backend():
    return tokenizer.build(TEXTS, 160)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.train(PAIRS, TokenizerConfig(vocab_size=160), folder)
    return folder


@pytest.fixture(scope="module")
def spoken(folder):
    return tokenizers.from_folder(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_german_and_english_survive_the_round_trip(spoken, backend, text):
    ids = spoken.encode(text)
    assert spoken.decode(ids) == backend.normalizer.normalize_str(text)
    assert 2 not in ids
    assert ids == backend.encode(text).ids


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from([*CHARACTERS, "▁", "\t", "\n", "\u00a0", "\u2028", "\u200b"])))
def test_any_text_of_known_characters_survives_the_round_trip(backend, text):
    ids = backend.encode(text).ids
    normalised = backend.normalizer.normalize_str(text)
    assert backend.decode(ids) == normalised
    assert 2 not in ids
    assert ids[-1:] == [1]
    assert "  " not in normalised
    assert normalised == normalised.strip()


def test_normalisation_is_nfkc_and_one_space(backend):
    assert backend.normalizer.normalize_str(" ﬁve\u00a0 ½\n\tMu\u0308he▁Ⅳ ") == "five 1\u20442 Mühe IV"


def test_special_ids_are_those_of_t5(spoken):
    assert spoken.vocabulary.tokens[:3] == ("<pad>", "</s>", "<unk>")
    assert (spoken.backend.pad_token_id, spoken.backend.eos_token_id, spoken.backend.unk_token_id) == (
        0,
        1,
        2,
    )
    assert spoken.eos == (1,)
    assert spoken.encode("") == [1]
    assert spoken.encode("漢 a")[:2] == [spoken.backend.get_vocab()["▁"], 2]
    assert spoken.decode([0, *spoken.encode("Mann"), 0]) == "Mann"


def test_pieces_do_not_cross_words_numbers_or_punctuation(spoken):
    for piece in spoken.vocabulary.tokens[3:]:
        body = piece.removeprefix("▁")
        kinds = {"L" if c.isalpha() else "N" if c.isnumeric() else "P" for c in body}
        assert len(kinds) <= 1, piece
        assert "▁" not in body


def test_frequent_words_are_one_piece_and_rare_ones_are_not():
    backend = tokenizer.build(["der Hund"] * 50 + ["Zwetschge"], 30)
    assert backend.encode("der Hund").tokens == ["▁der", "▁Hund", "</s>"]
    assert len(backend.encode("Zwetschge").tokens) > 3


def test_without_an_end_token_prompts_can_be_continued(tmp_path):
    found = tokenizer.train(PAIRS, TokenizerConfig(vocab_size=160, append_end=False), tmp_path)
    assert found.eos == (1,)
    assert found.encode("Mann")[-1] != 1


@pytest.mark.parametrize("model_type", ["t5", "mt5", "marian"])
def test_a_model_folder_loads_it(folder, spoken, model_type, tmp_path):
    from transformers import AutoTokenizer

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    found = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert found(text)["input_ids"] == spoken.encode(text)
        assert found.decode(spoken.encode(text), skip_special_tokens=True) == spoken.decode(
            spoken.encode(text)
        )


def test_the_same_text_gives_the_same_file_in_another_process(folder):
    # Many ties: every pair of letters occurs equally often.
    program = (
        "import itertools\n"
        "from training import tokenizer\n"
        "words = [''.join(letters) for letters in itertools.permutations('abcdef', 4)]\n"
        "text = tokenizer.build(words, 80).to_str(pretty=True)\n"
    )
    here: dict[str, str] = {}
    exec(program, here)
    run = [sys.executable, "-c", program + "print(text)"]
    there = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert there.rstrip("\n") == here["text"]
    assert tokenizer.build(TEXTS, 160).to_str(pretty=True) == (folder / "tokenizer.json").read_text("utf-8")


def test_saving_leaves_nothing_else_behind(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_bad_text_and_sizes_are_refused():
    with pytest.raises(ValueError, match="texts: expected some text"):
        tokenizer.build(["", "  "], 100)
    needed = 3 + len(set("▁Zwei"))
    with pytest.raises(ValueError, match=f"vocab_size: expected at least {needed}, .* got 5"):
        tokenizer.build(["Zwei"], 5)
