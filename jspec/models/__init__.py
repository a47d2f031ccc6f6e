"""Language models as pure functions over a plain dict of arrays."""

from jspec.models.cache import Cache, Rows
from jspec.models.decoder import DecoderConfig, init_params, language_model

__all__ = ["Cache", "DecoderConfig", "Rows", "init_params", "language_model"]
