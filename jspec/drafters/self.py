"""The target as its own drafter: its first layers, its cache, its head."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.checks import at_least
from jspec.drafters.autoregressive import Continue, draft_chain, stopping
from jspec.drafters.common import no_update
from jspec.types import Block, Context, Draft, Drafter, Keys, LanguageModel, Method, Prompt, PyTree


class EarlyExitParams(NamedTuple):
    """The stopping rule."""

    proceed: Continue | None


@functools.cache
def _early_exit(num_layers: int | None, num_tokens: int, sample: bool) -> Method:
    def init(params: EarlyExitParams, prompt: Prompt, capacity: int, target: LanguageModel) -> tuple[()]:
        return ()

    def propose(
        params: EarlyExitParams, state: tuple[()], context: Context, keys: Keys
    ) -> tuple[Draft, tuple[()]]:
        layers = max(1, context.target.config.num_layers // 4) if num_layers is None else num_layers
        early = context.target.truncate(layers)

        def extend(token: Int[Array, " B"], t: Int[Array, ""], pending: PyTree, mask: Array | None) -> tuple:
            block = Block(token[:, None], (context.lengths - 1 + t)[:, None], mask)
            forward = early.extend(context.params, context.cache, block, pending=pending)
            return forward.rows, early.head(context.params, forward.hidden[:, 0])

        # Rows of the root and the drafts before the last one, filled from the left; at step t the first t
        # of them and the new row itself (the last column) are seen:   t = 1:  1 . . 1
        spare = max(num_tokens - 1, 1)  # an array to write to, even if one draft needs no earlier row
        one_row = jax.eval_shape(lambda: extend(context.lengths, jnp.int32(0), None, None)[0])
        pending = jax.tree.map(lambda r: jnp.zeros((r.shape[0], spare, *r.shape[2:]), r.dtype), one_row)

        def step(pending: PyTree, token: Array, t: Array, active: Array) -> tuple[PyTree, Array]:
            column = jnp.arange(spare + 1)
            mask = jnp.broadcast_to(
                ((column < t) | (column == spare))[None, None], (token.shape[0], 1, spare + 1)
            )
            rows, logits = extend(token, t, pending, mask)
            pending = jax.tree.map(lambda old, new: old.at[:, t].set(new[:, -1], mode="drop"), pending, rows)
            return pending, logits

        draft, _ = draft_chain(
            context, keys, step, pending, num_tokens=num_tokens, sample=sample, proceed=params.proceed
        )
        return draft, state

    draws = "iid" if sample else "chosen"
    return Method(init, propose, no_update, width=num_tokens + 1, depth=num_tokens, draws=draws)


def early_exit(
    num_layers: int | None = None,
    num_tokens: int = 3,
    *,
    sample: bool = True,
    proceed: Continue | None = None,
) -> Drafter:
    """Draft with the target's first layers, its final norm and its head, on its own cache.

    Lossless in law with any lossless rule. No weights, no state: drafted rows are pending rows of the
    target's forward and are never committed (self-speculation as in LayerSkip, arXiv 2404.16710, section 4.3;
    there the target is trained for early exits, and without that acceptance is low).

    Args:
      num_layers: None: a quarter of the target's.
      num_tokens: the longest draft.
      sample, proceed: as for `model`.
    Raises:
      ValueError: ``num_layers`` or ``num_tokens`` < 1; more layers than the target has (when first run).
    """
    at_least(1, num_layers=num_layers, num_tokens=num_tokens)
    return Drafter(EarlyExitParams(stopping(proceed)), _early_exit(num_layers, num_tokens, sample))
