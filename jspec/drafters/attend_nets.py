"""Networks that look at the target's keys and values as they lie in its cache: GLIDE, Gemma 4's assistant.

Towards the target, a layer has queries and an output map and no more. With the root at a, the target's cache
holds the tokens 0 to a - 1, and so it stays while a draft grows: however far behind the root a row stands, it
sees these slots and no others. Training shows the same::

    target's slots   0 1 ... a-1            seen by every row of the draft
    net's own rows   0 1 ... a-1 a a+1 ...  GLIDE: causal; a row t < a has seen the slots before t
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters import nets
from jspec.drafters.attend_config import AssistantConfig, AttendConfig, GlideConfig, decoder_of
from jspec.drafters.common import take
from jspec.drafters.nets import Text
from jspec.models import cache as kv
from jspec.models import cache_dtype
from jspec.models.attention import attend, see_cache, see_rows
from jspec.models.decoder import DecoderConfig
from jspec.models.layers import MLP, Attention, Linear, Norm, Relative, Seen
from jspec.models.rotary import rotate
from jspec.types import Context, Draft, Forward, LanguageModel, PyTree, Verdict

# --- attention to the target ------------------------------------------------------------------------


class Memory(NamedTuple):
    """The target's keys and values. All committed slots are seen, within a layer's window."""

    cache: Any  # its keys, values and lengths
    rows: dict[int, tuple[Float[Array, "B M K h"], Float[Array, "B M K h"]]]  # uncommitted ones, by layer
    positions: Int[Array, "B M"]
    seen: Bool[Array, "B N M"]  # which of these each row of the net sees


def committed(cache: Any, width: int) -> Memory:
    """The cache alone, for ``width`` rows."""
    keys, values = ([x[:, :, :0].swapaxes(1, 2) for x in side] for side in (cache.keys, cache.values))
    batch = cache.lengths.shape[0]
    return Memory(
        cache,
        dict(enumerate(zip(keys, values, strict=True))),
        jnp.zeros((batch, 0), jnp.int32),
        jnp.zeros((batch, width, 0), bool),
    )


def remembered(
    target: LanguageModel, target_params: PyTree, text: Text, seen: Bool[Array, "B N T"]
) -> Memory:
    """All of a text, nothing of it committed."""
    if target.rows is None:
        raise ValueError("target: expected a model that shows its keys and values (rows), got None")
    batch, width = text.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
    rows, c = target.rows(target_params, text.taps, positions), decoder_of(target.config)
    dtype = jax.tree.leaves(rows)[0].dtype
    cache = kv.empty(batch, 0, c.num_layers, c.num_kv_heads, c.head_dim, dtype)
    return Memory(cache, rows, positions, seen)


class Look(nnx.Module):
    """Attention whose keys and values are the target's: ``query`` [I, H*h], ``out`` [H*h, I] and, where the
    config has them, ``query_norm`` and ``relative`` [buckets, H]."""

    def __init__(self, config: AttendConfig, rngs: nnx.Rngs):
        c, shape = config, config.decoder
        self.size = c.target_head_dim
        self.query = Linear(shape.width, c.target_heads * self.size, bias=False, rngs=rngs)
        self.out = Linear(c.target_heads * self.size, shape.width, bias=False, rngs=rngs)
        self.query_norm = Norm(self.size, shape) if c.query_norm else None
        buckets = c.relative_buckets
        self.distances = Relative(buckets, c.relative_distance) if buckets else None
        self.relative = nnx.Param(jnp.zeros((buckets, c.target_heads))) if buckets else None

    def __call__(
        self,
        x: Float[Array, "B N I"],
        positions: Int[Array, "B N"],
        memory: Memory,
        layer: int,
        target: DecoderConfig,
    ) -> Float[Array, "B N I"]:
        """Look at the target's layer ``layer``; 0 where nothing is to be seen (a root at 0)."""
        window = target.window(layer)
        cached = memory.cache.keys[layer], memory.cache.values[layer]
        capacity = cached[0].shape[2]
        in_cache = see_cache(capacity, memory.cache.lengths, positions, window)
        in_rows = see_rows(memory.seen, positions, memory.positions, window)
        q = self.query(x).reshape(*x.shape[:2], -1, self.size)
        q = q if self.query_norm is None else self.query_norm(q)
        turn = target.rotary if window is None or target.local_rotary is None else target.local_rotary
        if turn is not None:  # the keys were turned by their places
            q = rotate(q, turn.angles(positions))
        biases = (None, None)
        if self.distances is not None and self.relative is not None:
            slots = jnp.arange(capacity, dtype=jnp.int32)[None]
            bias = functools.partial(self.distances.bias, self.relative[...], positions)
            biases = bias(slots), bias(memory.positions)
        found = attend(q, cached, memory.rows[layer], in_cache, in_rows, self.size**-0.5, None, biases)
        some = in_cache.any(-1) | in_rows.any(-1)
        return self.out(jnp.where(some[..., None], found.astype(x.dtype), 0))


class Layer(nnx.Module):
    """Self-attention (where ``own``), a look at the target, and a perceptron, each behind a norm."""

    def __init__(self, config: AttendConfig, rngs: nnx.Rngs, *, own: bool):
        shape = config.decoder
        self.attention_norm = Norm(shape.width, shape) if own else None
        self.attention = Attention(shape, rngs) if own else None
        self.look_norm, self.mlp_norm = Norm(shape.width, shape), Norm(shape.width, shape)
        self.look = Look(config, rngs)
        self.mlp = MLP(shape, rngs)

    def after(
        self, x: Float[Array, "B N I"], positions: Int[Array, "B N"], memory: Memory, layer: int, target: Any
    ) -> Float[Array, "B N I"]:
        """What follows self-attention."""
        x = x + self.look(self.look_norm(x), positions, memory, layer, target)
        return x + self.mlp(self.mlp_norm(x))


class Reader(nnx.Module):
    """A net that looks at the target, as drafting and training use it. Hidden states are what the head reads.

    ``start(batch, capacity) -> state`` before the first token; ``begin(state, num_tokens) -> carry`` before a
    draft; ``step(state, carry, context, token, t) -> (carry, hidden [B, F])`` reads token t of a draft, the
    root first; ``absorb`` is `Method.update`; ``teach(target, target_params, text, num_tokens) -> hidden
    [B, A, K, F]`` says what ``step`` would.
    """

    def __init__(self, config: AttendConfig, rngs: nnx.Rngs, *, own: bool):
        self.config, shape = config, config.decoder
        self.layers = nnx.List([Layer(config, rngs, own=own) for _ in config.layers])
        self.norm = Norm(shape.width, shape)
        kernel = jax.random.normal(rngs.params(), config.own_head) * shape.width**-0.5
        self.head = nnx.Param(kernel) if config.head == "own" else None

    @property
    def dtype(self) -> DTypeLike:
        """That of the weights (norms apart, which are float32)."""
        return self.layers[0].look.out.kernel[...].dtype

    def embed(
        self, target: LanguageModel, target_params: PyTree, tokens: Int[Array, "B N"]
    ) -> Float[Array, "B N E"]:
        """The target's embeddings, in the dtype of the net."""
        return target.embed(target_params, tokens).astype(self.dtype)


# --- GLIDE ------------------------------------------------------------------------------------------


class Glide(Reader):
    """``layers``, ``norm`` and, with ``head="own"``, ``head`` [E, Vd].

    The state is a cache of the net's own rows, one for each token before the root: row t has seen the
    target's slots 0 to t - 1, as if t had been a root. So nothing depends on where the rounds began, and the
    tokens of a draft, whose rows saw less, are read again in `absorb`.
    """

    def __init__(self, config: GlideConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, own=True)
        self.shape = config.decoder

    def run(
        self,
        x: Float[Array, "B N E"],
        positions: Int[Array, "B N"],
        own: kv.Cache,
        mask: Bool[Array, "B N P+N"],
        pending: kv.Rows | None,
        memory: Memory,
        target: LanguageModel,
    ) -> tuple[Float[Array, "B N E"], kv.Rows]:
        """What the head reads, and keys and values of pending and new rows."""
        assert self.shape.rotary is not None
        angles, decoder = self.shape.rotary.angles(positions), decoder_of(target.config)
        seen = Seen(see_cache(own.keys[0].shape[2], own.lengths, positions, None), mask)
        keys, values = [], []
        for i, (layer, at) in enumerate(zip(self.layers, self.config.layers, strict=True)):
            before = None if pending is None else (pending.keys[i], pending.values[i])
            assert layer.attention is not None
            assert layer.attention_norm is not None
            cached = (own.keys[i], own.values[i])
            y, (k, v) = layer.attention(layer.attention_norm(x), cached, before, seen, angles)
            x = layer.after(x + y, positions, memory, at, decoder)
            keys.append(k)
            values.append(v)
        hidden = self.norm(x)
        every = positions if pending is None else jnp.concatenate([pending.positions, positions], axis=1)
        # Never true; see `Stack.run`: writes to the cache must depend on everything that read it.
        every = jnp.where(hidden[:, -1:, 0] > jnp.inf, -1, every)
        return hidden, kv.Rows(tuple(keys), tuple(values), every)

    def start(self, batch: int, capacity: int) -> kv.Cache:
        """See `Reader`."""
        c = self.shape
        dtype = cache_dtype(self.dtype) or self.dtype
        return kv.empty(batch, capacity, c.num_layers, c.num_kv_heads, c.head_dim, dtype)

    def begin(self, state: kv.Cache, num_tokens: int) -> kv.Rows:
        """Pending rows to be filled, one for each token that is read."""
        c, batch = self.shape, state.lengths.shape[0]
        shape = (batch, num_tokens, c.num_kv_heads, c.head_dim)
        keys, values = (tuple(jnp.zeros(shape, self.dtype) for _ in range(c.num_layers)) for _ in range(2))
        return kv.Rows(keys, values, jnp.zeros((batch, num_tokens), jnp.int32))

    def step(
        self, state: kv.Cache, carry: kv.Rows, context: Context, token: Int[Array, " B"], t: Int[Array, ""]
    ) -> tuple[kv.Rows, Float[Array, "B E"]]:
        """See `Reader`. Row t sees the rows before it and itself (the last column)."""
        batch, spare = carry.positions.shape
        column = jnp.arange(spare + 1)
        mask = jnp.broadcast_to(((column < t) | (column == spare))[None, None], (batch, 1, spare + 1))
        x = self.embed(context.target, context.params, token[:, None])
        position = (state.lengths + t)[:, None]
        memory = committed(context.cache, 1)
        hidden, rows = self.run(x, position, state, mask, carry, memory, context.target)
        return jax.tree.map(lambda old, new: old.at[:, t].set(new[:, -1]), carry, rows), hidden[:, 0]

    def absorb(
        self, state: kv.Cache, context: Context, draft: Draft, verdict: Verdict, forward: Forward
    ) -> kv.Cache:
        """Read the tokens of the round, whose keys and values the target has only just computed."""
        batch, depth = verdict.path.shape
        tokens, rows = jax.tree.map(lambda x: nets.along(x, verdict.path), (draft.tokens, forward.rows))
        index = jnp.arange(depth, dtype=jnp.int32)[None]
        causal = jnp.broadcast_to(jnp.tril(jnp.ones((depth, depth), bool))[None], (batch, depth, depth))
        strict = causal & (index[..., None] != index[:, None])
        x = self.embed(context.target, context.params, tokens)
        positions = state.lengths[:, None] + index
        shown = dict(enumerate(zip(rows.keys, rows.values, strict=True)))
        memory = Memory(context.cache, shown, rows.positions, strict)
        _, rows = self.run(x, positions, state, causal, None, memory, context.target)
        return kv.commit(state, rows, jnp.broadcast_to(index, verdict.path.shape), verdict.num_emitted)

    def teach(
        self, target: LanguageModel, target_params: PyTree, text: Text, num_tokens: int
    ) -> Float[Array, "B A K E"]:
        """All tokens as roots at once; then, for the anchors alone, one more token a step: its row sees the
        rows up to the anchor, those of its own earlier steps, and the target's before the anchor."""
        (batch, width), anchors, count = text.tokens.shape, text.anchors, text.anchors.shape[1]
        position = jnp.arange(width, dtype=jnp.int32)[None]
        own, positions = self.start(batch, 0), jnp.broadcast_to(position, (batch, width))
        causal, strict = (
            jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool), k)[None], (batch, width, width))
            for k in (0, -1)
        )
        x = self.embed(target, target_params, text.tokens)
        memory = remembered(target, target_params, text, strict)
        hidden, rows = self.run(x, positions, own, causal, None, memory, target)
        outputs = [nets.along(hidden, jnp.clip(anchors, 0, width - 1))]
        #   columns of the mask:  rows of the text | step 1 of every anchor | step 2 ...
        mask = position[:, None] <= anchors[:, :, None]
        memory = memory._replace(seen=position[:, None] < anchors[:, :, None])
        itself = jnp.broadcast_to(jnp.eye(count, dtype=bool)[None], (batch, count, count))
        for step in range(1, num_tokens):
            mask = jnp.concatenate([mask, itself], axis=2)
            x = self.embed(target, target_params, take(text.tokens, anchors + step))
            hidden, rows = self.run(x, anchors + step, own, mask, rows, memory, target)
            outputs.append(hidden)
        return jnp.stack(outputs, axis=2)


# --- Gemma 4's assistant ----------------------------------------------------------------------------


class Assistant(Reader):
    """``pre_projection`` [2 E, I], ``layers``, ``norm``, ``post_projection`` [I, E] and, with ``head="own"``,
    ``head`` [I, Vd]. The state is the target's hidden state of the last token before the root (0 if there is
    none)."""

    def __init__(self, config: AssistantConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs, own=False)
        self.pre_projection = Linear(2 * config.width, config.inner, bias=False, rngs=rngs)
        self.post_projection = Linear(config.inner, config.width, bias=False, rngs=rngs)

    def run(
        self,
        embedded: Float[Array, "B N E"],
        h: Float[Array, "B N E"],
        positions: Int[Array, "B N"],
        memory: Memory,
        target: LanguageModel,
    ) -> tuple[Float[Array, "B N E"], Float[Array, "B N F"]]:
        """The next h, and what the head reads."""
        decoder = decoder_of(target.config)
        x = self.pre_projection(jnp.concatenate([embedded, h], axis=-1))
        for layer, at in zip(self.layers, self.config.layers, strict=True):
            x = layer.after(x, positions, memory, at, decoder)
        y = self.norm(x)
        h = self.post_projection(y)
        return h, h if self.head is None else y

    def start(self, batch: int, capacity: int) -> Float[Array, "B E"]:
        """See `Reader`."""
        return jnp.zeros((batch, self.config.width), self.dtype)

    def begin(self, state: Float[Array, "B E"], num_tokens: int) -> Float[Array, "B E"]:
        """See `Reader`."""
        return state

    def step(
        self,
        state: Float[Array, "B E"],
        carry: Float[Array, "B E"],
        context: Context,
        token: Int[Array, " B"],
        t: Int[Array, ""],
    ) -> tuple[Float[Array, "B E"], Float[Array, "B F"]]:
        """See `Reader`. The position is the root's, whatever t is."""
        embedded = self.embed(context.target, context.params, token[:, None])
        position, memory = context.lengths[:, None] - 1, committed(context.cache, 1)
        h, hidden = self.run(embedded, carry[:, None], position, memory, context.target)
        return h[:, 0], hidden[:, 0]

    def absorb(
        self, state: Float[Array, "B E"], context: Context, draft: Draft, verdict: Verdict, forward: Forward
    ) -> Float[Array, "B E"]:
        """Keep the newest hidden state."""
        new = nets.last(forward.hidden, verdict).astype(self.dtype)
        return nets.keep_finished(new, state, verdict)

    def teach(
        self, target: LanguageModel, target_params: PyTree, text: Text, num_tokens: int
    ) -> Float[Array, "B A K F"]:
        """Anchors know nothing of one another."""
        width, anchors = text.tokens.shape[1], text.anchors
        position = jnp.arange(width, dtype=jnp.int32)[None]
        memory = remembered(target, target_params, text, position[:, None] < anchors[:, :, None])
        h = nets.along(text.hidden, jnp.clip(anchors - 1, 0, width - 1)).astype(self.dtype)
        h = jnp.where((anchors > 0)[..., None], h, 0)
        outputs = []
        for step in range(num_tokens):
            embedded = self.embed(target, target_params, take(text.tokens, anchors + step))
            h, hidden = self.run(embedded, h, anchors, memory, target)
            outputs.append(hidden)
        return jnp.stack(outputs, axis=2)
