"""The front door: strings (or token ids) in, strings out.

`load` gives a `Model`; `generate`, `stream` and `Session` decode with it. All three drive the same engine in
segments of rounds and look at the text between two segments; nothing here draws a token.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from jspec import auto, drafters, engine, parallel
from jspec import verify as rules
from jspec.batch import Batch, Request, source_width
from jspec.checkpoint import SMOLLM2, Model, load
from jspec.checks import at_least, instance
from jspec.drafters.described import called, trained
from jspec.io import tokenizer as tokenizers
from jspec.options import SamplingOptions, check_tokens, reject_unknown, resolve, whole_each
from jspec.output import Output, Result, collect
from jspec.prompts import as_requests, needed_capacity, system_messages
from jspec.types import Drafter, Verifier

__all__ = [
    "DRAFTERS",
    "SMOLLM2",
    "Model",
    "Session",
    "Stream",
    "generate",
    "load",
    "named_drafter",
    "stream",
]

SEGMENT = 8  # rounds between two looks for stop strings; what a row emits beyond its stop is cut off

DRAFTERS = (*drafters.NAMED, "auto", "trained")


# --- arguments --------------------------------------------------------------------------------------


def _as_drafter(drafter: Drafter | Model | str | None, model: Model) -> Drafter:
    """The drafter that ``drafter`` names, refused where it speaks another vocabulary."""
    if drafter is None:
        return drafters.plain()
    if isinstance(drafter, str):
        return named_drafter(drafter, model)
    if isinstance(drafter, Model):
        if (drafter.tokenizer is None or model.tokenizer is None) and drafter.vocab_size != model.vocab_size:
            raise ValueError(
                f"drafter: expected the target's {model.vocab_size} tokens, got {drafter.vocab_size}"
            )
        if drafter.vocabulary is not None and model.vocabulary is not None:
            tokenizers.check_vocabularies(model.vocabulary, drafter.vocabulary)
        return drafters.model(drafter)
    if not isinstance(drafter, Drafter):
        raise ValueError(
            "drafter: expected a Drafter (jspec.drafters), a Model, a name or None, "
            f"got {type(drafter).__name__}"
        )
    if model.vocabulary is not None:
        tokenizers.check_vocabularies(model.vocabulary, drafter.params)
    return drafter


def unknown_drafter(name: str) -> str:
    """The message for a name that is none of `DRAFTERS`."""
    near = difflib.get_close_matches(name, DRAFTERS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return (
        f"drafter: expected one of {', '.join(DRAFTERS)}, none, or a smaller model of the same vocabulary, "
        f"got {name!r}{hint}"
    )


def named_drafter(name: str, model: Model, **arguments: Any) -> Drafter:
    """The drafter that ``name`` stands for with this target; ``arguments`` are its factory's.

    "auto" is `auto.choose`; "trained" a draft network that comes with the package or lies in a folder
    (`drafters.described.trained`).

    Raises:
      ValueError: an unknown name or argument.
      FileNotFoundError: no trained drafter there.
    """
    if name not in DRAFTERS:
        raise ValueError(unknown_drafter(name))
    if name == "trained":
        return trained(model, **arguments)
    factory = functools.partial(_automatic, model) if name == "auto" else drafters.NAMED[name]
    return called(name, factory, arguments)


def _automatic(target: Model) -> Drafter:
    return auto.choose(target) or drafters.plain()


def _prepare(
    function: str,
    model: Model,
    drafter: Drafter | Model | str | None,
    verify: Verifier | str | None,
    widths: tuple[int, ...] | None,
    logprobs: bool,
    sampling: Mapping[str, Any],
    *,
    prompts: int,
    samples: int,
) -> Batch:
    """Everything that can be refused is refused here, before anything compiles."""
    own = (generate, stream, Session.__init__, Session.say)
    reject_unknown(function, list(sampling), [name for f in own for name in inspect.signature(f).parameters])
    if not isinstance(logprobs, bool):
        raise ValueError(f"logprobs: expected True or False, got {logprobs!r}")
    options = resolve(
        sampling,  # type: ignore[arg-type]
        prompts=prompts,
        samples=samples,
        width=model.lm.config.vocab_size,
        vocab=model.vocab_size,
        ends=model.eos,
        special_id=None if model.tokenizer is None else model.tokenizer.special_id,
        banned=model.banned,
    )
    resolved = _as_drafter(drafter, model)
    parallel.check_together("drafter", resolved.params, model.params)
    return Batch(
        model,
        resolved,
        rules.resolve(resolved.method, rules.named(verify) if isinstance(verify, str) else verify),
        options,
        engine.block_widths(resolved, widths),
        logprobs,
    )


# --- generate, stream, Session ----------------------------------------------------------------------


def generate(
    model: Model,
    prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    *,
    drafter: Drafter | Model | str | None = None,
    verify: Verifier | str | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    decoder_prefix: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | None = None,
    chat: bool = False,
    system: str | None = None,
    num_samples: int = 1,
    logprobs: bool = False,
    batch_size: int | None = None,
    capacity: int | None = None,
    widths: tuple[int, ...] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Output:
    """Continue prompts.

    The law of every answer is the target's under the sampling options whenever ``verify.lossless``; with
    temperature 0 and float32 the answer is that of plain decoding. A sequence depends on its own prompt,
    options and seed, and on nothing else of the call.

    Args:
      model: see `load`.
      prompts: one or several strings or lists of token ids. For an encoder-decoder (T5), what the encoder
        reads, end token included where the checkpoint wants one (strings get it from the tokenizer). The
        language of a source (mBART) is a setting of the tokenizer: ``model.tokenizer.backend.src_lang``.
      drafter: None: plain decoding; a name (one of `DRAFTERS`); a `Drafter` from
        `jspec.drafters`; a smaller `Model` of the same vocabulary.
      verify: acceptance rule from `jspec.verify`, or its name; None: the best lossless one for the draft.
      max_new_tokens: one number, or one a prompt.
      decoder_prefix: text or ids that an encoder-decoder's answer must go on from, one for all prompts or
        one each; they follow the start token and are no part of the answer. Text is encoded as the answer
        is, in the target language's vocabulary where the tokenizer has one (Marian).
      chat: put each prompt into the checkpoint's chat template, with ``system`` before it if given.
      num_samples: answers per prompt, each with a random stream of its own.
      logprobs: also return the log-probability of every new token.
      batch_size: rows decoded at a time; a finished row takes the next prompt. None: all prompts at once.
      capacity: slots of cache a row; None: the smallest multiple of 256 that fits.
      widths: block widths to switch over (`engine.block_widths`).
      **sampling: temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty,
        frequency_penalty, banned_tokens, allowed_tokens, first_tokens, min_new_tokens, processors, stop,
        seed; see `SamplingOptions`. The same prompt twice with the same seed gives the same answer.

    Raises:
      ValueError: bad input, before anything is compiled; the message names the argument.
      TypeError: an unknown keyword.

    >>> from jspec import testing
    >>> model = Model(*testing.table_lm([[0, 1, 0], [0, 0, 1], [1, 0, 0]]))
    >>> generate(model, [[0], [1]], max_new_tokens=[4, 2]).tokens
    [[1, 2, 0, 1], [2, 0]]
    """
    at_least(1, num_samples=num_samples, batch_size=batch_size)
    instance(Model, "a model as jspec.load returns it", model=model)
    requests = as_requests(model, prompts, chat, system, decoder_prefix)
    limits = whole_each("max_new_tokens", max_new_tokens, len(requests))
    batch = _prepare(
        "generate",
        model,
        drafter,
        verify,
        widths,
        logprobs,
        sampling,
        prompts=len(requests),
        samples=num_samples,
    )
    slots = needed_capacity(model, requests, limits, capacity)
    requests = [request for request in requests for _ in range(num_samples)]
    limits = np.repeat(limits, num_samples)
    rows = min(batch_size or len(requests), len(requests))
    batch.source_width = source_width(requests, model.source_length)
    batch.start(requests[:rows], limits[:rows], slots)
    results: dict[int, Result] = {}
    for sequence, _, finished in batch.decode(requests, limits, SEGMENT if batch.options.strings else None):
        if finished is not None:
            results[sequence] = finished
    return collect([results[i] for i in range(len(requests))], batch.settings)


class Stream:
    """Pieces of one answer as they come: text, or lists of ids where the model has no tokenizer.

    ``output`` is there at the end. All pieces together are its text (its tokens).
    """

    def __init__(self, pieces: Generator[str | list[int], None, Output]) -> None:
        self._pieces = pieces
        self.output: Output | None = None

    def __iter__(self) -> Iterator[str | list[int]]:
        return self

    def __next__(self) -> str | list[int]:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.output = self.output or end.value
            raise


def _stream_one(
    batch: Batch, request: Request, limits: np.ndarray
) -> Generator[str | list[int], None, Output]:
    for _, piece, finished in batch.decode([request], limits, rounds=1):
        if piece:
            yield piece
        if finished is not None:
            return collect([finished], batch.settings)
    raise AssertionError("a decoded sequence always finishes")


def stream(
    model: Model,
    prompt: str | Sequence[int],
    *,
    drafter: Drafter | Model | str | None = None,
    verify: Verifier | str | None = None,
    max_new_tokens: int = 128,
    decoder_prefix: str | Sequence[int] | None = None,
    chat: bool = False,
    system: str | None = None,
    logprobs: bool = False,
    capacity: int | None = None,
    widths: tuple[int, ...] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> Stream:
    """One answer, piece by piece: what `generate` gives for the same arguments, as it comes.

    A piece never holds half a character or the beginning of a stop string that may yet be completed.

    >>> from jspec import testing
    >>> model = Model(*testing.table_lm([[0, 1], [1, 0]]))
    >>> list(stream(model, [0], max_new_tokens=3))
    [[1], [0], [1]]
    """
    instance(Model, "a model as jspec.load returns it", model=model)
    requests = as_requests(model, prompt, chat, system, decoder_prefix)
    if len(requests) > 1:
        raise ValueError(f"prompt: expected one prompt, got {len(requests)}")
    limits = whole_each("max_new_tokens", max_new_tokens, 1)
    batch = _prepare("stream", model, drafter, verify, widths, logprobs, sampling, prompts=1, samples=1)
    batch.source_width = source_width(requests, model.source_length)
    batch.start(requests, limits, needed_capacity(model, requests, limits, capacity))
    return Stream(_stream_one(batch, requests[0], limits))


class Session:
    """A conversation: each turn reads only what is new, and answers as if it had read everything.

    A turn's answer is that of `generate` on the whole conversation (the same tokens at temperature 0, the
    same law above: a drafter may know more, and so draw otherwise). The template is rendered anew each time;
    where the tokens so far are how the rendering begins, the cache and the drafter go on from there.
    Where they are not (a stop string cut the last answer, the template rewrites it, it was not written in
    the tokenizer's own spelling, or the cache is full), the conversation is read again from its start.

    Attributes:
      messages: the conversation so far.
      reused: tokens of the last turn's conversation that were not read again.

    >>> from jspec import testing
    >>> session = Session(Model(*testing.table_lm([[0, 1, 0], [0, 0, 1], [1, 0, 0]])))
    >>> [session.say(turn, max_new_tokens=2).tokens[0] for turn in ([0, 1], [1])], session.reused
    ([[2, 0], [2, 0]], 4)
    """

    def __init__(
        self,
        model: Model,
        *,
        system: str | None = None,
        drafter: Drafter | Model | str | None = None,
        verify: Verifier | str | None = None,
        logprobs: bool = False,
        capacity: int | None = None,
        widths: tuple[int, ...] | None = None,
    ) -> None:
        instance(Model, "a model as jspec.load returns it", model=model)
        self.messages = system_messages(system)
        self.reused = 0
        self._chats = model.tokenizer is not None and model.tokenizer.has_chat_template
        if system is not None and not self._chats:
            raise ValueError(f"system: expected a model with a chat template, but {model.name} has none")
        if model.decoder_start:
            raise ValueError(f"model: a session needs a decoder-only model, {model.name} has an encoder")
        self._model, self._capacity = model, capacity
        self._fixed = (_as_drafter(drafter, model), verify, widths, logprobs)
        self._ids: list[int] = []  # the conversation of a model without chat template
        self._batch: Batch | None = None
        self._turns = 0

    def say(
        self, turn: str | Sequence[int], *, max_new_tokens: int = 128, **sampling: Unpack[SamplingOptions]
    ) -> Output:
        """The answer to the next turn: a message, or token ids where the model has no chat template.

        ``sampling`` as for `generate`; the seed's default is the number of the turn, from 0.
        """
        stream = self.stream(turn, max_new_tokens=max_new_tokens, **sampling)
        for _ in stream:
            pass
        assert stream.output is not None
        return stream.output

    def stream(
        self, turn: str | Sequence[int], *, max_new_tokens: int = 128, **sampling: Unpack[SamplingOptions]
    ) -> Stream:
        """`say`, piece by piece. A turn whose stream is not read to its end has not taken place."""
        limits = whole_each("max_new_tokens", max_new_tokens, 1)
        ids = self._conversation(turn)
        options = {"seed": self._turns, **sampling}
        batch = _prepare("say", self._model, *self._fixed, options, prompts=1, samples=1)
        request = Request(ids)
        slots = needed_capacity(self._model, [request], limits, self._capacity)
        held = self._held()
        reusable = 0 < len(held) < len(ids) and ids[: len(held)] == held
        if reusable and self._batch is not None and slots <= self._batch.capacity:
            batch.state, self.reused = self._batch.state, len(held)
            self._batch = batch
            batch.append(ids[len(held) :], int(limits[0]))
        else:
            if self._capacity is None:  # room for as much again, so that few turns begin anew
                slots = min(2 * slots, self._model.context_length)
            self.reused, self._batch = 0, batch
            batch.start([request], limits, slots)
        return Stream(self._remember(turn, ids, _stream_one(batch, request, limits)))

    def _conversation(self, turn: str | Sequence[int]) -> list[int]:
        """The ids of everything so far and ``turn``."""
        if self._chats != isinstance(turn, str):
            expected = "a message" if self._chats else "token ids, because the model has no chat template"
            raise ValueError(f"turn: expected {expected}, got {type(turn).__name__}")
        if not turn:
            raise ValueError("turn: expected at least one token, got an empty turn")
        if self._chats:
            assert self._model.tokenizer is not None
            return self._model.tokenizer.chat([*self.messages, {"role": "user", "content": str(turn)}])
        return [*self._ids, *check_tokens("turn", turn, self._model.vocab_size)]

    def _held(self) -> list[int]:
        """The tokens that the engine has read and written, [] where nothing can be gone on from."""
        if self._batch is None or self._batch.state is None:
            return []
        state = self._batch.state
        broken = engine.FINISH_REASONS[int(state.finish[0])] == "nan"
        return [] if broken else np.asarray(state.tokens)[0, : int(state.lengths[0])].tolist()

    def _remember(
        self, turn: str | Sequence[int], ids: list[int], pieces: Generator[str | list[int], None, Output]
    ) -> Generator[str | list[int], None, Output]:
        output = yield from pieces
        self._turns += 1
        if self._chats:
            assert output.texts is not None
            self.messages.append({"role": "user", "content": str(turn)})
            self.messages.append({"role": "assistant", "content": output.texts[0]})
        else:
            self._ids = [*ids, *output.tokens[0]]
        return output
