"""N-gram language models as drafters: laws that are looked up, not computed."""

from __future__ import annotations

import functools
import json
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.checks import at_least
from jspec.drafters.autoregressive import draft_chain
from jspec.drafters.common import no_update
from jspec.io.tokenizer import Vocabulary
from jspec.types import Context, Draft, Drafter, Keys, LanguageModel, Method, Prompt


class NgramTable(NamedTuple):
    """The law of a token x after a token w::

        P(x | w) = excess of x among w's k successors (0 for any other x) + backoff[w] * unigram[x]

    Unigram: k = 0 and every back-off 1. Dense bigram: k = V. These are laws: for every w, the excesses and
    the back-off sum to 1, and so does ``unigram``. How many successors to store is a matter of memory, 8 k V
    bytes.
    """

    unigram: Float[Array, " V"]
    backoff: Float[Array, " V"]
    successors: Int[Array, "V k"]
    excess: Float[Array, "V k"]  # 0 where there is no such successor
    vocabulary: Vocabulary | None = None  # no leaves: the front door refuses a target of another one

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.unigram.shape[0]

    def law(self, tokens: Int[Array, " B"]) -> Float[Array, "B V"]:
        """The laws after ``tokens``.

        >>> table = NgramTable(*map(jnp.array, ([0.5, 0.5], [0.25, 1.0], [[1], [0]], [[0.75], [0.0]])))
        >>> table.law(jnp.array([0, 1])).tolist()
        [[0.125, 0.875], [0.5, 0.5]]
        """
        laws = self.backoff[tokens][:, None] * self.unigram[None]
        return jax.vmap(lambda law, index, more: law.at[index].add(more))(
            laws, self.successors[tokens], self.excess[tokens]
        )


ARRAYS = ("unigram", "backoff", "successors", "excess")


@functools.cache
def _ngram(num_tokens: int) -> Method:
    def init(params: NgramTable, prompt: Prompt, capacity: int, target: LanguageModel) -> tuple[()]:
        if params.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"table: expected one of the target's {target.config.vocab_size} tokens, "
                f"got {params.vocab_size}"
            )
        return ()

    def propose(
        params: NgramTable, state: tuple[()], context: Context, keys: Keys
    ) -> tuple[Draft, tuple[()]]:
        def step(carry: tuple[()], token: Array, t: Array, active: Array) -> tuple[tuple[()], Array]:
            return carry, jnp.log(params.law(token))

        draft, _ = draft_chain(context, keys, step, (), num_tokens=num_tokens, sample=True)
        return draft, state

    return Method(init, propose, no_update, width=num_tokens + 1, depth=num_tokens, draws="iid")


def ngram(table: NgramTable | str | Path, num_tokens: int = 3) -> Drafter:
    """Draft from a unigram or bigram model of the text that the target writes.

    Lossless in law with any lossless rule: each token is drawn from P(x | last token) under the sampler of
    the request, which takes log P for logits (temperature 1 leaves it, temperature 0 takes its first choice).
    A draft costs next to nothing (c of Theorem 3.8 is about 0), and acceptance is low: the paper has .2 for a
    bigram model on translation. `training.ngram` makes tables by counting.

    Args:
      table: an `NgramTable` or the file of one; it is as wide as the target's logits.
      num_tokens: the longest draft (gamma; 3 in the paper).
    Raises:
      ValueError: ``num_tokens`` < 1; a table of another size than the target's vocabulary (when first run).
      FileNotFoundError: there is no such file.

    Reference: Leviathan et al. 2023, arXiv 2211.17192, section 4.2 and Table 3.
    """
    at_least(1, num_tokens=num_tokens)
    return Drafter(table if isinstance(table, NgramTable) else load_ngram(table), _ngram(num_tokens))


def save_ngram(path: str | Path, table: NgramTable) -> None:
    """Write a table as ``.npz``, one array a field; the vocabulary, if known, as the bytes of a JSON list.

    Raises:
      OSError: the file cannot be written.
    """
    arrays: dict[str, Any] = {name: np.asarray(getattr(table, name)) for name in ARRAYS}
    if table.vocabulary is not None:
        arrays["vocabulary"] = np.frombuffer(json.dumps(table.vocabulary.tokens).encode(), np.uint8)
    with Path(path).open("wb") as file:  # to a file, since to a name savez would add a suffix
        np.savez_compressed(file, **arrays)


def load_ngram(path: str | Path) -> NgramTable:
    """Read a table.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds no table.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"table: no such file: {path}")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            unigram, backoff, successors, excess = (arrays[name] for name in ARRAYS)
            vocabulary = None
            if "vocabulary" in arrays:  # tables that were made without, or by earlier versions, have none
                vocabulary = Vocabulary(tuple(json.loads(arrays["vocabulary"].tobytes())))
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"table: {path} is not an n-gram table: {error}") from None
    shapes = [unigram.shape, backoff.shape, successors.shape, excess.shape]
    wanted = [unigram.shape, unigram.shape, (*unigram.shape, successors.shape[-1])]
    if shapes != [*wanted, wanted[-1]] or unigram.ndim != 1:
        raise ValueError(f"table: {path}: expected shapes [V], [V], [V, k], [V, k], got {shapes}")
    known = successors.dtype.kind == "i" and np.isin(successors, np.arange(len(unigram))).all()
    sums = np.append(backoff + excess.sum(1), unigram.sum())
    positive = all((array >= 0).all() for array in (unigram, backoff, excess))
    if not (known and positive and np.allclose(sums, 1, atol=1e-4)):
        raise ValueError(
            f"table: {path}: expected successors below {len(unigram)} and laws of sum 1, got others"
        )
    arrays = (jnp.asarray(array) for array in (unigram, backoff, successors, excess))
    return NgramTable(*arrays, vocabulary=vocabulary)
