"""Speculative decoding for JAX: many drafters, one exact engine.

>>> import jspec
>>> model = jspec.load("smollm2-135m")  # doctest: +SKIP
>>> out = jspec.generate(model, ["Hello!"], drafter=jspec.drafters.suffix(), chat=True)  # doctest: +SKIP
"""

from jspec import drafters, engine, sampling, verify
from jspec.output import Output, Stats
from jspec.text import Model, Session, Stream, generate, load, stream

__all__ = [
    "Model",
    "Output",
    "Session",
    "Stats",
    "Stream",
    "drafters",
    "engine",
    "generate",
    "load",
    "sampling",
    "stream",
    "verify",
]
__version__ = "0.1.0"
