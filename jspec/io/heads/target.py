"""Whether a draft head fits a target: sizes, layers, rotary positions, copies of its tensors, and the reduced
vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.model import HasModel
from jspec.drafters.nets import Network, rope_base

SAMPLED = 512  # rows of a frozen copy that are compared with the target's
OFFSETS, MEMBERS = "d2t", "t2d"


def check_target(source: str, network: Network, model: HasModel) -> None:
    """Refuse a target that the network was not made for.

    Raises:
      ValueError: another width, vocabulary, or fewer layers than the network reads; both numbers are said.
    """
    ours, theirs = network.config, model.lm.config
    for field in ("width", "vocab_size"):
        expected, found = getattr(ours, field, None), getattr(theirs, field, None)
        if expected is not None and expected != found:
            raise ValueError(
                f"{source}: {field}: expected a target of {field} {expected}, for which it was made, got "
                f"{found}"
            )
    layers, deepest = getattr(theirs, "num_layers", None), max(network.taps, default=0)
    if layers is not None and deepest > layers:
        raise ValueError(
            f"{source}: taps: expected a target of at least {deepest} layers, for it reads what goes into "
            f"layer {deepest} (taps {network.taps}), got {layers} layers"
        )


def check_theta(source: str, theta: float, model: HasModel) -> None:
    """Refuse a rope base that is not the target's, where the target has one that can be told."""
    found = rope_base(model.lm.config)
    if found is not None and abs(theta / found - 1) > 1e-3:
        raise ValueError(
            f"{source}: rope_theta: expected a target of rope_theta {theta:g}, as the head's config says, "
            f"got {found:g} (rope_theta={theta:g} loads it all the same)"
        )


def of_target(model: HasModel, what: str) -> jax.Array:
    """The embedding [V, E], or the head as a checkpoint has it, [V, E]."""
    params = model.params
    if what == "head" and "unembedding" in params:
        return params["unembedding"]["kernel"].T
    return params["embedding"]


def check_copy(source: str, name: str, stored: np.ndarray, model: HasModel, what: str) -> None:
    """Refuse a frozen copy of the target's tensor that is another target's."""
    expected = of_target(model, what)
    if stored.shape != expected.shape:
        raise ValueError(
            f"{source}: {name}: expected the target's {what}, of shape {expected.shape}, got {stored.shape}"
        )
    rows = np.unique(np.linspace(0, len(stored) - 1, SAMPLED).astype(int))
    ours = np.asarray(expected[rows].astype(jnp.float32))
    gap = float(np.abs(stored[rows].astype(np.float32) - ours).max())
    if gap > 0.02 * float(np.abs(ours).max()):
        raise ValueError(
            f"{source}: {name}: expected the target's own {what}, got another one (they differ by up to "
            f"{gap:.3g}): it was made for another target, or trained its own, which is not supported"
        )


# --- the reduced vocabulary -------------------------------------------------------------------------


def read_ids(
    source: str, offsets: np.ndarray, members: np.ndarray | None, vocab_size: int, draft_vocab: int
) -> np.ndarray:
    """The target's ids of the head's columns: ``i + d2t[i]``.

    Raises:
      ValueError: not increasing ids below ``vocab_size``, of another number than the head's columns, or
        others than those that ``t2d`` marks.
    """
    offsets = offsets.astype(np.int64)
    if offsets.shape != (draft_vocab,):
        raise ValueError(
            f"{source}: {OFFSETS}: expected {draft_vocab} offsets, one a column of the head, got shape "
            f"{offsets.shape}"
        )
    ids = np.arange(draft_vocab) + offsets
    if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"{source}: {OFFSETS}: expected increasing ids below {vocab_size} once added up")
    if members is not None:
        members = members.astype(bool)
        if members.shape != (vocab_size,) or not np.array_equal(np.flatnonzero(members), ids):
            raise ValueError(
                f"{source}: {MEMBERS}: expected {vocab_size} marks, set for the {draft_vocab} ids of "
                f"{OFFSETS}, got {members.shape[0]}, of which {int(members.sum())} are set"
            )
    return ids


def write_ids(ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """``d2t`` and ``t2d``.

    >>> {name: x.tolist() for name, x in write_ids(np.array([1, 3]), 4).items()}
    {'d2t': [1, 2], 't2d': [False, True, False, True]}
    """
    members = np.zeros(vocab_size, bool)
    members[ids] = True
    return {OFFSETS: ids.astype(np.int64) - np.arange(len(ids)), MEMBERS: members}
