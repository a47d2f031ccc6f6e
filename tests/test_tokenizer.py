"""Tokenizers against stored references, streaming against the whole text, broken files against one error."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_text import END, START, TEMPLATE, metadata, tokenizer
from tokenizers import decoders, processors

import jspec
from jspec.drafters import plain
from jspec.io import tokenizer as tokenizers
from jspec.io.gguf import find_smollm2, read_metadata
from jspec.io.tokenizer import Detokenizer, Tokenizer, Vocabulary
from jspec.testing import tiny_checkpoint

STORED = Path(__file__).parent / "fixtures" / "tokenizer_smollm2.json"


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return tokenizer()


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return tokenizers.from_gguf(read_metadata(find_smollm2()))


def pieces(spoken: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    stream, found, at = Detokenizer(spoken), [], 0
    for size in sizes:
        found.append(stream.push(ids[at : at + size]))
        at += size
    return [*found, stream.push(ids[at:]), stream.flush()]


# --- the embedded model -----------------------------------------------------------------------------


@pytest.mark.smollm2
def test_hard_strings_have_the_stored_ids(smollm2):
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    for case in stored["strings"]:
        assert smollm2.encode(case["text"]) == case["ids"], case["text"]
    assert len(stored["strings"]) > 200
    # What transformers makes of the file differs only where whitespace stands before a digit.
    differing = [case for case in stored["strings"] if "transformers" in case]
    assert 0 < len(differing) < 30
    for case in differing:
        assert smollm2.decode(case["transformers"]) == smollm2.decode(case["ids"])


@pytest.mark.smollm2
def test_chat_template_gives_the_stored_ids(smollm2):
    for case in json.loads(STORED.read_text(encoding="utf-8"))["chats"]:
        assert smollm2.chat(case["messages"]) == case["ids"]


@pytest.mark.smollm2
def test_both_end_tokens_and_no_beginning_token(smollm2):
    assert [smollm2.vocabulary.tokens[i] for i in smollm2.eos] == ["<|endoftext|>", "<|im_end|>"]
    assert smollm2.encode("Hello")[0] != smollm2.special_id("<|im_start|>") == 1


@pytest.mark.smollm2
def test_stored_strings_survive_the_round_trip_and_streaming(smollm2):
    for case in json.loads(STORED.read_text(encoding="utf-8"))["strings"]:
        found = pieces(smollm2, case["ids"], [1] * len(case["ids"]))
        assert "".join(found) == smollm2.decode(case["ids"])
        if "\ufffd" not in case["text"]:
            assert not any("\ufffd" in piece for piece in found)
        if "<" not in case["text"]:
            assert smollm2.decode(case["ids"]) == case["text"]


# --- streaming --------------------------------------------------------------------------------------


def test_pieces_of_any_bytes_are_the_whole_text(tiny):
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids = rng.integers(0, len(tiny.vocabulary), rng.integers(0, 40)).tolist()
        sizes = rng.integers(0, 5, 12).tolist()
        assert "".join(pieces(tiny, ids, sizes)) == tiny.decode(ids)


def test_no_piece_holds_half_a_character(tiny):
    text = "aé漢😀 the\u0301z\n👩‍👩‍👧"
    ids = tiny.encode(text)
    found = pieces(tiny, ids, [1] * len(ids))
    assert "".join(found) == text
    assert not any("\ufffd" in piece for piece in found)
    assert found[:2] == ["a", ""]  # then the first byte of é


def test_special_tokens_have_no_text_and_do_not_hold_it_back(tiny):
    assert pieces(tiny, [START, *tiny.encode("ab"), END], [1, 1, 1, 1])[:4] == ["", "a", "b", ""]


def test_a_decoder_that_drops_the_first_space_is_streamed_right():
    words = ["▁the", "▁", "cat", "▁sat", "s", ".", "▁▁on", "é"]
    decode = decoders.Metaspace().decode
    spoken = SimpleNamespace(decode=lambda ids: decode([words[i] for i in ids]))
    rng = np.random.default_rng(1)
    for _ in range(100):
        ids = rng.integers(0, len(words), 20).tolist()
        assert "".join(pieces(spoken, ids, rng.integers(0, 4, 8).tolist())) == spoken.decode(ids)


# --- encoding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["a", " ", " 123", "x", "'s", "\n\n"]),
        ("smollm", ["a", "  ", "1", "2", "3", "x", "'s", "\n\n"]),
        ("llama-bpe", ["a", " ", " ", "123", "x", "'s", "\n\n"]),
        ("qwen2", ["a", " ", " ", "1", "2", "3", "x", "'s", "\n\n"]),
    ],
)
def test_pre_tokenizers_split_as_their_name_says(pre, words):
    backend = tokenizer(pre=pre).backend.backend_tokenizer
    found = backend.pre_tokenizer.pre_tokenize_str("a  123x's\n\n")
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word, _ in found] == words


def test_merges_and_specials_inside_text(tiny):
    assert [tiny.vocabulary.tokens[i] for i in tiny.encode("the the1")] == ["the", "Ġthe", "1"]
    assert tiny.encode("a<|im_end|>the") == [2 + ord("a"), END, 259]
    assert tiny.decode(tiny.encode("a<|im_end|>the")) == "athe"
    assert (tiny.special_id("<|im_end|>"), tiny.special_id("the")) == (END, None)


def test_one_beginning_token_however_it_is_asked_for(tmp_path):
    message = [{"role": "user", "content": "a"}]
    spoken = tokenizer(add_bos_token=True)
    entries = metadata(add_bos_token=True) | {"tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    bare = tokenizers.from_gguf(entries)
    bare.backend.save_pretrained(tmp_path)  # what a saved model and a run of training keep
    for found in (spoken, bare, tokenizers.from_folder(tmp_path)):
        assert found.encode("a") == found.encode("<|im_start|>a") == [START, 2 + ord("a")]
        assert found.encode("a", special=False) == [2 + ord("a")]
        if found is spoken:
            assert found.chat(message).count(START) == 2  # the template's own
        else:
            assert found.chat(message) == [START, 2 + ord("a")]


def test_a_backend_that_adds_the_beginning_token_itself(tiny):
    backend = copy.deepcopy(tiny.backend)
    backend.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)]
    )
    spoken = dataclasses.replace(tiny, backend=backend)
    assert spoken.encode("a") == spoken.encode("<|im_start|>a") == [START, 2 + ord("a")]
    assert spoken.encode("") == [START]


def test_a_lone_surrogate_is_no_text(tiny):
    with pytest.raises(ValueError, match=r"text: .* U\+D83D at index 1"):
        tiny.encode("a\ud83d")


def test_chat_without_template_is_refused():
    spoken = tokenizer()
    spoken.backend.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        spoken.chat([{"role": "user", "content": "a"}])


def test_end_tokens_are_declared_ones_and_known_names():
    assert tokenizer().eos == (END,)
    assert tokenizer(eos_token_id=5, eot_token_id=7).eos == (END, 5, 7)


# --- broken metadata --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model"),
        ({"model": None}, "tokenizer.ggml.model"),
        ({"pre": "deepseek-r1"}, "tokenizer.ggml.pre.*deepseek-r1"),
        ({"pre": None}, "tokenizer.ggml.pre"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": ["h e", "x"]}, "tokenizer.ggml.merges"),
        ({"merges": ["he zz"]}, "tokenizer.ggml.merges"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type"),
        ({"eos_token_id": 262}, "tokenizer.ggml.eos_token_id.*262"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token"),
    ],
)
def test_broken_metadata_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        tokenizer(**changes)


# --- vocabularies -----------------------------------------------------------------------------------


def test_padding_is_no_token(tiny):
    assert len(tiny.vocabulary) == 261


def test_another_vocabulary_is_refused_and_names_the_first_id(tiny):
    tokens = list(tiny.vocabulary.tokens)
    tokens[7], tokens[9] = tokens[9], tokens[7]
    with pytest.raises(ValueError, match=r"token 7 is "):
        tokenizers.check_vocabularies(tiny.vocabulary, Vocabulary(tuple(tokens)))
    longer = Vocabulary((*tiny.vocabulary.tokens, "more"))
    with pytest.raises(ValueError, match="token 261 is 'more' for the drafter and None for the target"):
        tokenizers.check_vocabularies(tiny.vocabulary, {"deep": (1.0, [longer])})
    tokenizers.check_vocabularies(tiny.vocabulary, (tokenizer().vocabulary, plain()))


# --- folders ----------------------------------------------------------------------------------------


def test_folder_tokenizer_is_the_one_that_was_saved(tiny, tmp_path):
    tiny.backend.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, END]}))
    found = tokenizers.from_folder(tmp_path)
    assert found is not None
    for text in ("the  12 the\n", "é<|im_end|>😀", ""):
        assert found.encode(text) == tiny.encode(text)
    assert found.eos == (END, 5, 6)
    assert found.backend.chat_template == TEMPLATE
    tokenizers.check_vocabularies(tiny.vocabulary, found.vocabulary)


def test_folder_without_tokenizer_has_none(tmp_path):
    assert tokenizers.from_folder(tmp_path) is None
    assert tokenizers.end_ids(tmp_path) == ()


def test_folder_with_a_broken_tokenizer_is_refused(tiny, tmp_path):
    tiny.backend.save_pretrained(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="tokenizer of"):
        tokenizers.from_folder(tmp_path)


# --- SentencePiece ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def marian(tmp_path_factory) -> Path:
    """What a Marian checkpoint has in place of a tokenizer.json: two models and one vocabulary."""
    spm = pytest.importorskip("sentencepiece")
    folder, pieces = tmp_path_factory.mktemp("marian"), []
    for side, text in (("source", "a dog runs there"), ("target", "ein Hund rennt dort")):
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter([text] * 20),
            model_prefix=str(folder / side),
            vocab_size=24,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
        lines = (folder / f"{side}.vocab").read_text(encoding="utf-8").splitlines()
        pieces += [line.split("\t")[0] for line in lines]
        (folder / f"{side}.vocab").unlink()
    tokens = ["</s>", "<unk>", *dict.fromkeys(p for p in pieces if not p.startswith("<")), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    settings = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "de"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    told = {
        "eos_token_id": 0,
        "bad_words_ids": [[len(tokens) - 1]],
        "decoder_start_token_id": len(tokens) - 1,
    }
    (folder / "generation_config.json").write_text(json.dumps(told))
    return tiny_checkpoint(folder, "marian", vocab_size=len(tokens), eos_token_id=0)


@pytest.mark.filterwarnings("ignore:Recommended")  # sacremoses, for rare punctuation
def test_marian_reads_one_language_and_writes_another(marian):
    model = jspec.load(marian)
    pad = model.vocab_size - 1
    assert (model.eos, model.decoder_start, model.banned) == ((0,), (pad,), (pad,))
    spoken = model.tokenizer
    source, target = "a dog runs", "ein Hund rennt"
    assert spoken.encode(source)[-1] == spoken.encode_target(target)[-1] == 0
    assert spoken.decode(spoken.encode_target(target)) == target
    assert spoken.encode_target(target, special=False) == spoken.encode_target(target)[:-1]
    before = spoken.encode("dort")
    assert [spoken.vocabulary.tokens[i] for i in spoken.encode_target("dort")] == ["▁dort", "</s>"]
    assert spoken.encode("dort") == before != spoken.encode_target("dort")
    assert model.source_length == 64
    with pytest.raises(ValueError, match=r"prompts\[0\]: 65 tokens, .* reads at most 64"):
        jspec.generate(model, [[2] * 65])


def test_sentencepiece_is_named_where_it_is_missing(marian, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"source.spm needs sentencepiece.*pip install 'jspec\[sentencepiece\]'"
    ):
        tokenizers.from_folder(marian)
