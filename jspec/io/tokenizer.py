"""Text to token ids and back: tokenizers of GGUF files and Hugging Face folders behind one small class.

A GGUF file holds a byte-level BPE vocabulary, its merges, and the *name* of the rule that splits text into
words before any merge (`tokenizer.ggml.pre`). The rules known here are those of `PRE_TOKENIZERS`; another
name is an error, because a wrong split gives other ids without any other sign.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type

# Tokens that end a turn or a document although some files do not declare them as end tokens.
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "vocab.json",
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The token of each id, "" for an id without token. Equal by content.

    As a pytree it has no leaves, so a drafter can carry the vocabulary it was made for in its parameters,
    where `check_vocabularies` finds it.

    >>> Vocabulary(("a", "b")) == Vocabulary(("a", "b")), len(Vocabulary(("a", "b")))
    (True, 2)
    """

    tokens: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.tokens)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Vocabulary) and self.tokens == other.tokens)

    def first_difference(self, other: Vocabulary) -> int | None:
        """The first id that the two give different tokens, or that only one gives a token; None if equal.

        >>> Vocabulary(("x", "y", "z")).first_difference(Vocabulary(("x", "z", "y")))
        1
        """
        if self == other:
            return None
        pairs = enumerate(zip(self.tokens, other.tokens, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self), len(other)))


def check_vocabularies(target: Vocabulary, drafter: Any) -> None:
    """Refuse a drafter that carries (anywhere in its pytree) another vocabulary than the target's.

    How far either model pads its logits makes no difference.

    Raises:
      ValueError: naming the first id that differs.
    """
    for found in jax.tree.leaves(drafter, is_leaf=lambda node: isinstance(node, Vocabulary)):
        if not isinstance(found, Vocabulary) or (index := target.first_difference(found)) is None:
            continue
        theirs, ours = (v.tokens[index] if index < len(v) else None for v in (found, target))
        raise ValueError(
            f"drafter: expected the target's vocabulary, but token {index} is {theirs!r} for the drafter and "
            f"{ours!r} for the target ({len(found)} and {len(target)} tokens in all)"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back.

    Attributes:
      backend: a Hugging Face tokenizer (`PreTrainedTokenizerBase`); no torch involved.
      vocabulary: its length is the real vocabulary size, which a model may pad.
      eos: the ids that end a text or a turn; () when none is known.
    """

    backend: Any
    vocabulary: Vocabulary
    eos: tuple[int, ...]

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return self.backend.chat_template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of ``text``, with the beginning token where the checkpoint wants one, and never two, and
        with the end token where it wants that (T5's sources); without either if not ``special``.

        Special tokens written inside the text ("<|im_end|>") become their ids.

        Raises:
          ValueError: ``text`` holds a lone surrogate, which is no character.
        """
        return self._once_begun(self._ids(text, special=special))

    def encode_target(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of ``text`` as an answer: those of `encode`, unless the checkpoint cuts answers otherwise
        than sources (Marian has a SentencePiece model for each language). `decode` reads answers."""
        return self._once_begun(self._ids(text, special=special, side="text_target"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens; bytes that are no UTF-8 come out as U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation (``{"role": ..., "content": ...}``) by the checkpoint's chat template,
        up to the point where the assistant answers."""
        if not self.has_chat_template:
            raise ValueError("chat: expected a checkpoint with a chat template, but this one has none")
        text = self.backend.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return self._ids(text, special=False)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written ``text``, None if there is no such token."""
        for index, token in self.backend.added_tokens_decoder.items():
            if token.special and token.content == text:
                return index
        return None

    def _once_begun(self, ids: list[int]) -> list[int]:
        twice = len(ids) > 1 and ids[0] == ids[1] == self.backend.bos_token_id
        return ids[1:] if twice else ids

    def _ids(self, text: str, *, special: bool, side: str = "text") -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise ValueError(
                f"text: expected Unicode, got the lone surrogate U+{code:X} at index {error.start}"
            ) from None
        return self.backend(**{side: text}, add_special_tokens=special, verbose=False)["input_ids"]


class Detokenizer:
    """Text of a growing list of ids, piece by piece.

    A piece never holds half a character, and all pieces together (`flush` last) are the text of all ids.

    >>> from types import SimpleNamespace
    >>> half = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))
    >>> stream = Detokenizer(half)
    >>> [stream.push([65, 0xC3]), stream.push([0xA9]), stream.push([0xC3]), stream.flush()]
    ['A', 'é', '', '\ufffd']
    """

    # A decoder may treat the first id of a list differently (a leading space is dropped), so new ids are
    # decoded behind the ids of the piece before. `window` starts there, and its first `done` characters
    # have been handed out. Both are at a character's border, so nothing before them can change.

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []
        self._fresh = 0  # ids of the window whose text has been handed out
        self._done = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete."""
        self._window += ids
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) or len(text) == self._done:
            stable = text.rstrip(REPLACEMENT)
            piece = stable[self._done :]
            self._done = max(self._done, len(stable))
            return piece
        piece = text[self._done :]
        self._window = self._window[self._fresh :]
        self._fresh = len(self._window)
        self._done = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """What was held back: at the end of the text an incomplete character is U+FFFD."""
        piece = self._decode(self._window)[self._done :]
        self._done += len(piece)
        return piece


# --- GGUF -------------------------------------------------------------------------------------------


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


def _gpt2(*before: pre_tokenizers.PreTokenizer) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Name in llama.cpp -> how text is split before merging.
PRE_TOKENIZERS = {
    "gpt-2": lambda: _gpt2(),
    # Every digit (any \p{N}) is a piece of its own, and only then are words sought: "a  12" is
    # "a", "  ", "1", "2".
    "smollm": lambda: _gpt2(pre_tokenizers.Digits(individual_digits=True)),
    "llama-bpe": lambda: _split(_WORDS % r"\p{N}{1,3}"),
    "qwen2": lambda: _split(_WORDS % r"\p{N}"),
}


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata (`gguf.read_metadata`).

    Raises:
      ValueError: not a byte-level BPE tokenizer, an unknown pre-tokenizer, a missing or inconsistent entry;
        the message names the key.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model: expected 'gpt2' (byte-level BPE), got {kind!r}; "
            "load the checkpoint's Hugging Face folder instead"
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre: expected one of {sorted(PRE_TOKENIZERS)}, got {pre!r}")
    if metadata.get("tokenizer.ggml.add_eos_token", False):
        raise ValueError(
            "tokenizer.ggml.add_eos_token: expected false, because a prompt that ends with the end token "
            "cannot be continued, got true"
        )
    tokens = _entry(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type: expected {len(tokens)} entries, got {len(types)}")
    ids = _special_ids(metadata, len(tokens))
    special = {i for i, kind in enumerate(types) if kind == CONTROL} | set(ids.values())

    vocab = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in _entry(metadata, "merges"))]
    try:
        model = models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"tokenizer.ggml.merges: expected pairs of tokens, got {error}") from None
    backend = Backend(model)
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    chat_template = metadata.get("tokenizer.chat_template")
    if metadata.get("tokenizer.ggml.add_bos_token", False) and "bos" in ids:
        # The backend does it, text and chats alike, so that it is saved with it.
        bos = tokens[ids["bos"]]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, ids["bos"])]
        )
        if chat_template is not None and "bos_token" not in chat_template and bos not in chat_template:
            chat_template = "{{ bos_token }}" + chat_template
    for i, kind in enumerate(types):
        if i in special or kind == USER_DEFINED:
            token = AddedToken(tokens[i], normalized=False, special=i in special)
            (backend.add_special_tokens if i in special else backend.add_tokens)([token])

    def text(name: str) -> str | None:
        return tokens[ids[name]] if name in ids else None

    wrapped = _transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=text("bos"),
        eos_token=text("eos"),
        pad_token=text("padding"),
        chat_template=chat_template,
    )
    size = max(vocab.values()) + 1
    ends = {i for i in special if tokens[i] in END_TOKENS}
    ends |= {ids[name] for name in ("eos", "eot", "eom") if name in ids}
    return Tokenizer(
        backend=wrapped,
        vocabulary=Vocabulary(
            tuple(token if kind != UNUSED else "" for token, kind in zip(tokens, types, strict=True))[:size]
        ),
        eos=tuple(sorted(ends)),
    )


def _entry(metadata: Mapping[str, Any], name: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not value:
        raise ValueError(f"tokenizer.ggml.{name}: expected a list of strings, but the file has none")
    return list(value)


def _special_ids(metadata: Mapping[str, Any], size: int) -> dict[str, int]:
    """The ids that the file declares, by name ("bos", "eos", ...)."""
    ids = {}
    for name in ("bos", "eos", "eot", "eom", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        index = metadata.get(key)
        if index is None:
            continue
        if not 0 <= int(index) < size:
            raise ValueError(f"{key}: expected an id in 0 .. {size - 1}, got {index}")
        ids[name] = int(index)
    return ids


# --- Hugging Face folders ---------------------------------------------------------------------------


def from_folder(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, None where it has none.

    End tokens are the union of what the tokenizer, ``generation_config.json`` and ``config.json`` declare.

    Raises:
      ValueError: the tokenizer's files cannot be read, or need the package sentencepiece, which is not there.
    """
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    pieces = sorted(path.name for path in folder.iterdir() if path.suffix in (".spm", ".model"))
    if pieces and not (folder / "tokenizer.json").exists() and not importlib.util.find_spec("sentencepiece"):
        raise ValueError(
            f"tokenizer of {folder}: {pieces[0]} needs sentencepiece, which is not installed "
            "(pip install 'jspec[sentencepiece]')"
        )
    try:
        backend = _transformers().AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        tokens = backend.get_vocab()
    except Exception as error:  # whatever a broken file makes the library raise
        raise ValueError(f"tokenizer of {folder}: expected a readable tokenizer, got: {error}") from error
    vocabulary = [""] * (max(tokens.values()) + 1)
    for token, i in tokens.items():
        vocabulary[i] = token
    ends = {*end_ids(folder), *([] if backend.eos_token_id is None else [backend.eos_token_id])}
    return Tokenizer(backend, Vocabulary(tuple(vocabulary)), tuple(sorted(ends)))


def end_ids(folder: Path) -> tuple[int, ...]:
    """The end tokens that a folder's ``generation_config.json`` and ``config.json`` declare, maybe none."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            declared = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            ids |= set(declared) if isinstance(declared, list) else {declared}
    return tuple(sorted(i for i in ids if i is not None))


def _transformers() -> Any:
    """The library, imported late (it takes seconds) and without its advice to install torch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers
