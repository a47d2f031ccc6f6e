"""Language models as pure functions over a plain dict of arrays."""

from jspec.models.cache import Cache, Rows
from jspec.models.decoder import DecoderConfig
from jspec.models.params import (
    Config,
    abstract_params,
    cache_dtype,
    cast,
    check_dtype,
    init_params,
    is_norm,
    language_model,
)
from jspec.models.seq2seq import ENDLESS, Seq2SeqConfig

__all__ = [
    "ENDLESS",
    "Cache",
    "Config",
    "DecoderConfig",
    "Rows",
    "Seq2SeqConfig",
    "abstract_params",
    "cache_dtype",
    "cast",
    "check_dtype",
    "init_params",
    "is_norm",
    "language_model",
]
