"""PARD (arXiv 2504.18583), as AMD-AGI/PARD writes it: an ordinary language model that fills masks.

Read from pard/pard_train.py and pard/pard_infer.py of AMD-AGI/PARD at 8a0d2bd. A Hugging Face folder of any
decoder that `jspec.io.hf` knows, whose config.json says ``pard_token``, the id that stands for every mask,
and ``spd_type`` "pard". The mask's input is that id's row of the model's own embedding.

jspec's mask is a vector beside the model. If it is no row of the embedding (it was trained here), writing
puts it into the row of ``pard_token``, an id that no text has; nothing but that token's own logit changes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.drafters.masked import MaskedConfig, masked, masked_network
from jspec.drafters.model import HasModel
from jspec.drafters.nets import Network, Weights
from jspec.io import hf
from jspec.io import tokenizer as tokenizers
from jspec.io.heads.layout import Checkpoint, Raw
from jspec.models import DecoderConfig, language_model, registry
from jspec.types import Drafter

NUM_TOKENS = 8  # K of the published checkpoints' training


class Pard(NamedTuple):
    """As a `jspec.io.heads.layout.Layout`, of a whole language model instead of tensors of a table."""

    name: str
    drafter: Callable[..., Drafter]
    fits: Callable[[Raw, Collection[str]], bool]
    settings: Callable[[Raw], dict[str, Any]]

    def read(self, folder: Path, model: HasModel, dtype: DTypeLike | None, rope: float | None) -> Checkpoint:
        """See `read`; the model's rope base is its own."""
        return read(folder, model, dtype)

    def write(
        self,
        folder: Path,
        network: Network,
        weights: Weights,
        model: HasModel,
        raw: Raw | None,
        extras: Collection[str],
        num_tokens: int,
    ) -> Path:
        """See `write`; there are no extras, and no proposed length."""
        return write(folder, network, weights, model, raw)


PARD = Pard("pard", masked, lambda raw, names: "pard_token" in raw, lambda raw: {})


def read(folder: Path, model: HasModel, dtype: DTypeLike | None = None) -> Checkpoint:
    """A PARD checkpoint for its target.

    Raises:
      FileNotFoundError: nothing there.
      ValueError: a broken checkpoint (`hf.load_hf`), a mask that is no token, or another vocabulary than the
        target's.
    """
    config, params, folder = hf.load_hf(folder, dtype)
    raw = hf.read_json(folder / "config.json")
    token, theirs = raw["pard_token"], model.lm.config.vocab_size
    if not isinstance(config, DecoderConfig):
        raise ValueError(f"{folder}: architectures: expected a decoder, got {raw.get('architectures')}")
    if not isinstance(token, int) or not 0 <= token < config.vocab_size:
        raise ValueError(
            f"{folder}: pard_token: expected an id below {config.vocab_size}, the model's tokens, got {token}"
        )
    real = getattr(model, "vocab_size", theirs)
    if config.vocab_size < real:
        raise ValueError(
            f"{folder}: vocab_size: expected a target of at most {config.vocab_size} tokens, those of the "
            f"drafter, got {real}"
        )
    vocabulary, own = getattr(model, "vocabulary", None), tokenizers.from_folder(folder)
    if vocabulary is not None and own is not None:
        tokenizers.check_vocabularies(vocabulary, own.vocabulary)
    network = masked_network(MaskedConfig(vocab_size=theirs, lm=config, num_tokens=NUM_TOKENS))
    net = {"lm": params, "masks": _row(config, params["embedding"], token)}
    return Checkpoint(PARD, network, Weights(net), raw)


def _row(config: DecoderConfig, embedding: jax.Array, token: int) -> jax.Array:
    """What the model reads for a token, [1, E]."""
    return embedding[token][None] * jnp.asarray(config.embedding_scale, embedding.dtype)


def write(folder: Path, network: Network, weights: Weights, model: HasModel, raw: Raw | None = None) -> Path:
    """A masked network as a PARD checkpoint, with the target's tokenizer.

    Args:
      raw: entries of config.json to add; ``pard_token`` among them chooses the mask's id.
    Raises:
      ValueError: several masks, a block that is not causal, an encoder-decoder, an architecture that no known
        checkpoint has, a mask that is no token's where no id is free for it, or a folder that is not empty.
    """
    from jspec.checkpoint import Model

    config, net, raw = network.config, weights.net, dict(raw or {})
    for field, expected in (("shared_mask", True), ("causal", True)):
        if getattr(config, field) != expected:
            raise ValueError(f"config: the layout pard cannot say {field} = {getattr(config, field)}")
    if not isinstance(config.lm, DecoderConfig):
        raise ValueError("config: the layout pard has decoders only, got an encoder-decoder")
    params, mask = net["lm"], net["masks"]
    rows = params["embedding"] * jnp.asarray(config.lm.embedding_scale, params["embedding"].dtype)
    same = np.flatnonzero(np.asarray((rows == mask.astype(rows.dtype)).all(1)))
    token = raw.get("pard_token")
    if same.size and (token is None or token in same):
        token = int(same[0] if token is None else token)
    else:
        token = getattr(model, "vocab_size", config.lm.vocab_size) if token is None else token
        if token >= config.lm.vocab_size:
            raise ValueError(
                "pard_token: expected the id of a token that no text has, for the mask's row of the "
                f"embedding; all {config.lm.vocab_size} are tokens (raw={{'pard_token': ID}} names one)"
            )
        value = (mask[0] / config.lm.embedding_scale).astype(params["embedding"].dtype)
        params = params | {"embedding": params["embedding"].at[token].set(value)}
    tokenizer = getattr(model, "tokenizer", None)
    hf.save_hf(
        Model(language_model(config.lm), params, tokenizer, getattr(model, "eos", ()), "drafter"), folder
    )
    path = folder / "config.json"
    values = hf.read_json(path) | raw | {"pard_token": token, "spd_type": "pard"}
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    if dataclasses.asdict(registry.family(values).config(values)) != dataclasses.asdict(config.lm):
        raise ValueError("raw: expected entries of config.json that say the same model, got those of another")
    return folder
