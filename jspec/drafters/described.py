"""Drafters as a configuration file or a command line describes them: in plain values."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jspec import trees
from jspec.checks import instance
from jspec.drafters import files
from jspec.drafters.attend import Expansion
from jspec.drafters.autoregressive import confidence, entropy_bound
from jspec.drafters.beam import TreeSettings
from jspec.drafters.router import router as route
from jspec.drafters.suffix import suffix
from jspec.types import Drafter

Made = TypeVar("Made")

PROCEED = {"confidence": confidence, "entropy_bound": entropy_bound}  # by name


def called(name: str, factory: Callable[..., Made], arguments: Mapping[str, Any]) -> Made:
    """What a factory makes of these arguments.

    Raises:
      ValueError: one that it does not have; the message calls it ``name``.

    >>> called("tree", TreeSettings, {"top_k": 4, "dept": 3})
    Traceback (most recent call last):
    ValueError: tree: expected arguments among ['top_k', 'depth', 'num_nodes'], got 'dept'
    """
    known = list(inspect.signature(factory).parameters)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{name}: expected arguments among {known}, got {arguments!r}")
    for argument in arguments:
        if argument not in known:
            raise ValueError(f"{name}: expected arguments among {known}, got {argument!r}")
    return factory(**arguments)


def trained(
    model: Any, folder: str | None = None, *, router: dict[str, Any] | None = None, **settings: Any
) -> Drafter:
    """What `drafters.load` finds. In ``settings``, which go to it, a ``tree`` is given by its
    `drafters.TreeSettings`, a ``template`` by the rank paths of its nodes, an ``expansion`` by its
    `drafters.Expansion`, and ``proceed`` by its rule and threshold, ``{"confidence": 0.5}``.

    Args:
      model: the target.
      folder: see `drafters.load`; None: the name of the target, whose drafter comes with the package.
      router: settings of `drafters.suffix`, which rows take where it finds something.
    Raises:
      ValueError: no drafter comes with the package for this target; a rule that does not exist.
      ValueError, FileNotFoundError: see `drafters.load`.
    """
    if folder is None and not files.is_shipped(model.name):
        raise ValueError(
            f"folder: expected a draft network's, for none comes with jspec for {model.name!r}, got None"
        )
    if folder is not None:
        instance(str | os.PathLike, "a folder", folder=folder)
    if "tree" in settings:
        settings["tree"] = called("tree", TreeSettings, settings["tree"])
    if "template" in settings:
        settings["template"] = _template(settings["template"])
    if "expansion" in settings:
        settings["expansion"] = called("expansion", Expansion, settings["expansion"])
    if "proceed" in settings:
        settings["proceed"] = _proceed(settings["proceed"])
    found = files.load(files.SHIPPED / model.name if folder is None else folder, model, **settings)
    return found if router is None else route(called("router", suffix, router), found)


def _template(given: Any) -> trees.Template:
    """The tree of these rank paths."""
    if not isinstance(given, list | tuple) or not all(isinstance(path, list | tuple) for path in given):
        raise ValueError(f"template: expected rank paths of nodes, as in [[0], [1], [0, 0]], got {given!r}")
    return trees.template(tuple(tuple(path) for path in given))


def _proceed(given: Any) -> Any:
    """The stopping rule of that name."""
    if not isinstance(given, dict) or len(given) != 1:
        raise ValueError(f"proceed: expected a rule and its threshold, got {given}")
    ((name, threshold),) = given.items()
    if name not in PROCEED:
        raise ValueError(f"proceed: expected one of {', '.join(PROCEED)}, got {name}")
    return PROCEED[name](threshold)
