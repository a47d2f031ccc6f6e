"""Language models as pure functions over a plain dict of arrays."""

from jspec.models.cache import Cache, Rows
from jspec.models.decoder import DecoderConfig
from jspec.models.params import Config, abstract_params, cast, init_params, is_norm, language_model
from jspec.models.seq2seq import Seq2SeqConfig

__all__ = [
    "Cache",
    "Config",
    "DecoderConfig",
    "Rows",
    "Seq2SeqConfig",
    "abstract_params",
    "cast",
    "init_params",
    "is_norm",
    "language_model",
]
