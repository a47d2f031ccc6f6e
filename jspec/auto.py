"""``drafter="auto"``: which drafter is the fastest on this device with this model, measured once.

Nothing here touches what is generated: every candidate is lossless, so a wrong choice costs time only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress

from jspec import drafters, options, parallel, verify
from jspec.batch import Request, source_width
from jspec.checkpoint import Model
from jspec.measure import REPEATS as CURVE_REPEATS
from jspec.measure import CostCurve, Trial, decode, measure_curve, replay
from jspec.types import Drafter, PyTree

VERSION = 2  # of the candidates and of how they are judged: a choice made otherwise is made again
NEW_TOKENS = 32
REPEATS = 3
MARGIN = 1.03  # a drafter must be that much faster than plain decoding on the calibration prompts
LENGTHS = (1, 2, 3, 4, 5, 6, 8)  # of suffix drafts
MIN_MATCHES = (1, 2, 3)  # shortest occurrences that they copy
TREES = (8, 24, 48)  # nodes of Token Recycling's trees
TREE_COST = 1.5  # t(n) / t(1) up to which a tree of n nodes is worth a try
CURVE = (1, 3, 5, 9)  # widths n at which t(n) is measured; TREES too where the widest of these is cheap


@dataclasses.dataclass(frozen=True)
class Choice:
    """What calibration found; ``drafter`` is the name of a factory in `jspec.drafters`, ``plain`` for none.

    ``speedup`` is the measured one over plain decoding on the calibration prompts (1 for plain), and
    ``candidates`` lists every (name, arguments, speed-up) that was timed.
    """

    drafter: str
    arguments: dict[str, Any]
    speedup: float
    candidates: tuple[tuple[str, dict[str, Any], float], ...]
    curve: CostCurve

    @property
    def title(self) -> str:
        """The drafter as one would write it."""
        return _title(self.drafter, self.arguments)

    def build(self, model: Model) -> Drafter | None:
        """The drafter itself; None for plain decoding."""
        return None if self.drafter == "plain" else drafters.NAMED[self.drafter](**self.arguments)


def cache_folder() -> Path:
    """The user's cache folder of this package: below $XDG_CACHE_HOME where set, else the platform's own."""
    if root := os.environ.get("XDG_CACHE_HOME"):
        return Path(root) / "jspec"
    if sys.platform == "win32" and (root := os.environ.get("LOCALAPPDATA")):
        return Path(root) / "jspec" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "jspec"
    return Path.home() / ".cache" / "jspec"


def choose(model: Model) -> Drafter | None:
    """The drafter that ``drafter="auto"`` stands for; None: plain decoding is the fastest. See `choice`."""
    return choice(model).build(model)


def choice(model: Model) -> Choice:
    """The stored `Choice` for this device, model and dtype, or a new one that is stored.

    The first call calibrates and says so on stderr; later ones, in other processes too, read a file in
    `cache_folder`.

    Raises:
      ValueError: the model has no tokenizer, and no choice for it is stored; or several processes decode
        together, each of which would choose by its own clock and its own file.
    """
    if (processes := jax.process_count()) > 1:
        raise ValueError(
            f"drafter: 'auto' is for one process, and {processes} must run the same program; name a drafter"
        )
    path = cache_folder() / "auto" / f"{_fingerprint(model)}.json"
    found = _read(path, model)
    if found is None:
        found = calibrate(model)
        _write(path, found)
    return found


def calibrate(model: Model, *, quiet: bool = False) -> Choice:
    """Measure the candidates on the project's calibration prompts; stores nothing.

    1. The cost curve t(n) of the target's forward.
    2. Plain decoding. On its output suffix drafts are replayed, which needs no forward: with the curve, that
       gives the best length and shortest match. Of Token Recycling's trees, the widest of those that cost
       at most `TREE_COST`.
    3. Plain decoding and these candidates in turn, `REPEATS` times. The greatest median of the speed-ups
       wins, if it is at least `MARGIN`.
    """
    prompts = _prompts(model)
    console = rich.console.Console(stderr=True, quiet=quiet)
    with rich.progress.Progress(console=console, transient=True) as progress:
        steps = len({*CURVE, *TREES}) * (CURVE_REPEATS + 1) + len(prompts) * (1 + 3 * REPEATS)
        task = progress.add_task(f"calibrating {model.name} (once for this device)", total=steps)
        found = _calibrate(model, prompts, lambda: progress.advance(task))
    timed = [f"{_title(name, arguments)} {gain:.2f}x" for name, arguments, gain in found.candidates]
    console.print(
        f"auto: {found.title} for {model.name} on this device "
        f"({', '.join(timed) or 'no drafter is worth a try'}, plain decoding 1x)",
        highlight=False,
        soft_wrap=True,
    )
    return found


def _calibrate(model: Model, prompts: list[Request], advance: Callable[[], object]) -> Choice:
    capacity = max(len(prompt.tokens) for prompt in prompts) + NEW_TOKENS
    source = source_width(prompts, model.source_length)
    run = _runner(model, capacity, source, advance)

    def measured(widths: tuple[int, ...]) -> CostCurve:
        most = max(widths) + capacity // 2
        return measure_curve(
            model.lm,
            model.params,
            widths,
            fill=capacity // 2,
            capacity=most,
            source=source,
            advance=advance,
        )

    curve = measured(CURVE)
    if curve.relative(TREES[0]) <= TREE_COST:
        curve = measured((*CURVE, *TREES))

    plain = drafters.plain()
    texts = [(prompt, run(plain, prompt).tokens) for prompt in prompts]
    candidates: list[tuple[str, dict[str, Any]]] = []
    if (arguments := _best_suffix(texts, curve, capacity)) is not None:
        candidates.append(("suffix", arguments))
    if trees := [nodes for nodes in TREES if curve.relative(nodes) <= TREE_COST]:
        candidates.append(("token_recycling", {"num_nodes": trees[-1]}))

    built = [plain, *(drafters.NAMED[name](**arguments) for name, arguments in candidates)]
    for drafter in built[1:]:
        run(drafter, prompts[0])  # compiles
    rates = np.zeros((REPEATS, len(built)))
    for repeat in range(REPEATS):
        tokens, seconds = np.zeros(len(built)), np.zeros(len(built))
        for prompt in prompts:
            for column, drafter in enumerate(built):
                trial = run(drafter, prompt)
                tokens[column] += len(trial.tokens)
                seconds[column] += trial.decode_seconds
        rates[repeat] = tokens / seconds
    gains = np.median(rates / rates[:, :1], axis=0)[1:].tolist()
    timed = tuple((name, arguments, gain) for (name, arguments), gain in zip(candidates, gains, strict=True))
    best = max(timed, key=lambda entry: entry[2], default=("plain", {}, 1.0))
    return Choice(*(best if best[2] >= MARGIN else ("plain", {}, 1.0)), candidates=timed, curve=curve)


def _best_suffix(
    texts: list[tuple[Request, np.ndarray]], curve: CostCurve, capacity: int
) -> dict[str, Any] | None:
    """The arguments of the suffix drafter that would have been the fastest; None: plain decoding is."""
    best, arguments = 1.0, None
    for min_match in MIN_MATCHES:
        drafter = drafters.suffix(num_tokens=max(LENGTHS), min_match=min_match)
        replays = [replay(drafter, prompt, new, capacity=capacity, rows=NEW_TOKENS) for prompt, new in texts]
        for length in LENGTHS:
            cost = sum(one.cost(length, curve) for one in replays)
            gain = sum(len(new) for _, new in texts) / cost
            if gain > best:
                best, arguments = gain, {"num_tokens": length, "min_match": min_match}
    return arguments


def _runner(
    model: Model, capacity: int, source: int, advance: Callable[[], object]
) -> Callable[[Drafter, Request], Trial]:
    """Decodes a prompt. ``capacity`` and ``source`` (width of the encoder's input) are those of the longest:
    after a drafter's first prompt nothing compiles, which would be timed."""
    settings = options.resolve(
        {},
        prompts=1,
        samples=1,
        width=model.lm.config.vocab_size,
        vocab=model.vocab_size,
        ends=model.eos,
        special_id=None,
        banned=model.banned,
    )
    sampler, key, stops = settings.sampler([0]), settings.keys([0]), settings.stops()

    def run(drafter: Drafter, prompt: Request) -> Trial:
        trial = decode(
            model.params,
            prompt,
            key,
            target=model.lm,
            drafter=drafter,
            verify=verify.target_only(),  # every candidate chooses its tokens
            sampler=sampler,
            stops=stops,
            max_new_tokens=NEW_TOKENS,
            capacity=capacity,
            source=source,
        )
        advance()
        return trial

    return run


def _prompts(model: Model) -> list[Request]:
    if model.tokenizer is None:
        raise ValueError(f"drafter: 'auto' calibrates on text, but {model.name} has no tokenizer")
    text = resources.files("jspec").joinpath("data/calibration.jsonl").read_text(encoding="utf-8")
    prompts = [json.loads(line)["prompt"] for line in text.splitlines()]
    if model.tokenizer.has_chat_template:
        return [Request(model.tokenizer.chat([{"role": "user", "content": prompt}])) for prompt in prompts]
    ids = [model.tokenizer.encode(prompt) for prompt in prompts]
    return [Request(model.decoder_start, i) if model.decoder_start else Request(i) for i in ids]


def _title(name: str, arguments: dict[str, Any]) -> str:
    return name + (
        f"({', '.join(f'{key}={value}' for key, value in arguments.items())})" if arguments else ""
    )


# --- the stored choice ------------------------------------------------------------------------------


@jax.jit
def _samples(params: PyTree) -> jax.Array:
    """Some numbers of every leaf, along its diagonal: they tell models of one shape apart."""

    def diagonal(leaf: jax.Array) -> jax.Array:
        points = [np.linspace(0, size - 1, 8).astype(np.int32) for size in leaf.shape]
        return jnp.atleast_1d(leaf[tuple(points)]).astype(jnp.float32)

    return jnp.concatenate([diagonal(leaf) for leaf in jax.tree.leaves(params)])


def _fingerprint(model: Model) -> str:
    """Names the devices and their mesh, the model's shape, some of its weights, and their dtypes."""
    device = jax.devices()[0]
    leaves = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(model.params)]
    mesh = parallel.mesh_of(model.params)
    layout = None if mesh is None else tuple(mesh.shape.items())
    machine = (device.platform, device.device_kind, jax.device_count(), os.cpu_count(), layout)
    described = repr((VERSION, machine, leaves)).encode() + np.asarray(_samples(model.params)).tobytes()
    return hashlib.sha256(described).hexdigest()[:24]


def _read(path: Path, model: Model) -> Choice | None:
    """The stored choice; None where there is none, or nothing that can be used."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        widths, seconds = content.pop("curve")
        candidates = tuple((name, arguments, gain) for name, arguments, gain in content.pop("candidates"))
        choice = Choice(**content, candidates=candidates, curve=CostCurve(tuple(widths), tuple(seconds)))
        choice.build(model)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return choice


def _write(path: Path, choice: Choice) -> None:
    """Store the choice in one step, so that two processes may calibrate at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            json.dump(dataclasses.asdict(choice), file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(f"drafter='auto': the choice was not stored: {error}", stacklevel=3)
