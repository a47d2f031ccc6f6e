"""The conformance table: every drafter, with the verifiers it goes with, on a tiny random target.

A new method is one entry here, and every test that takes a `case` runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec import drafters, testing, trees, verify
from jspec.drafters.nets import Network, Weights
from jspec.types import Drafter, LanguageModel, Prompt, PyTree, Verifier


class Tiny(NamedTuple):
    """A model as `jspec.load` returns it, as far as drafters look; an encoder-decoder with what it reads."""

    lm: LanguageModel
    params: PyTree
    source: tuple[int, ...] = ()

    def prompt(self, prompts: list[list[int]]) -> Prompt:
        """A ragged batch; row i's source lacks its first i tokens."""
        width = max(map(len, prompts))
        tokens = np.array([[*p, *[0] * (width - len(p))] for p in prompts], np.int32)
        lengths = jnp.asarray([len(p) for p in prompts], jnp.int32)
        if not self.source:
            return Prompt(jnp.asarray(tokens), lengths)
        size = len(self.source)
        sources = [[*self.source[i % size :], *[0] * (i % size)] for i in range(len(prompts))]
        counts = [size - i % size for i in range(len(prompts))]
        return Prompt(
            jnp.asarray(tokens), lengths, jnp.asarray(sources, jnp.int32), jnp.asarray(counts, jnp.int32)
        )


class Case(NamedTuple):
    """A drafter for (target, draft model), and its acceptance rule."""

    drafter: Callable[[Tiny, Tiny], Drafter]
    verify: Callable[[], Verifier]


@functools.cache
def target(vocab_size: int) -> Tiny:
    """Two layers of width 32."""
    return Tiny(*testing.tiny_decoder(seed=1, vocab_size=vocab_size))


@functools.cache
def encoder_decoder(vocab_size: int) -> Tiny:
    """A T5 of two and two layers."""
    return Tiny(*testing.tiny_seq2seq(seed=2, vocab_size=vocab_size), source=(3, 1, 2, 0, 1))


@functools.cache
def draft(vocab_size: int) -> Tiny:
    """The target's first layer and its head: a draft model that often agrees with it."""
    return first_layer(target(vocab_size))


def first_layer(model: Tiny) -> Tiny:
    return model._replace(lm=model.lm.truncate(1))


@functools.cache
def stranger(vocab_size: int) -> Tiny:
    """Other random weights."""
    return Tiny(*testing.tiny_decoder(seed=7, vocab_size=vocab_size, num_layers=1, width=16))


def law(vocab_size: int) -> np.ndarray:
    """A drafter's law of the next token, by the last one."""
    return np.random.default_rng(3).dirichlet(np.ones(vocab_size), vocab_size).astype(np.float32)


BINARY = trees.template(((0,), (1,), (0, 0), (0, 1), (1, 0)))
BUSHY = trees.template(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 2), (0, 1, 0), (2, 0, 0), (2, 0, 1)))


def sampled(*, distinct: bool) -> Callable[[Tiny, Tiny], Drafter]:
    return lambda t, d: testing.sampled_tree(law(t.lm.config.vocab_size), BINARY, distinct=distinct)


def bigram(vocab_size: int) -> drafters.NgramTable:
    """Two successors a token, and of some tokens one or none."""
    rng = np.random.default_rng(4)
    unigram = rng.dirichlet(np.ones(vocab_size))
    laws = rng.dirichlet(np.ones(3), vocab_size)
    laws[::3] = [1, 0, 0]
    laws[1::3, 1] += laws[1::3, 2]
    laws[1::3, 2] = 0
    successors = np.stack([rng.permutation(vocab_size)[:2] for _ in range(vocab_size)])
    arrays = (jnp.asarray(array, jnp.float32) for array in (unigram, laws[:, 0], laws[:, 1:]))
    unigram, backoff, excess = arrays
    return drafters.NgramTable(unigram, backoff, jnp.asarray(successors, jnp.int32), excess)


def head_network(kind: str, num_heads: int = 3, **options) -> Callable[[Tiny], Network]:
    """Heads for a target; rows are three quarters of its tokens."""

    def make(model: Tiny) -> Network:
        c = model.lm.config
        columns = c.vocab_size * 3 // 4 if options.get("head") == "rows" else None
        return drafters.heads_network(
            drafters.HeadsConfig(
                kind=kind,
                width=c.width,
                vocab_size=c.vocab_size,
                num_heads=num_heads,
                draft_vocab=columns,
                **options,
            )
        )

    return make


def heads(kind: str, **options) -> Callable[[Tiny, Tiny], Drafter]:
    """Random heads, of which Hydra's have two layers."""

    def make(t: Tiny, d: Tiny) -> Drafter:
        from networks import shaken

        network = head_network(kind, layers=2 if kind == "hydra" else 1)(t)
        return drafters.heads(network, shaken(Weights(network.init(jax.random.key(5)))), **options)

    return make


def trained(name: str, **options) -> Callable[[Tiny, Tiny], Drafter]:
    """The drafter of a network in `networks.NETWORKS`, with random weights."""

    def make(t: Tiny, d: Tiny) -> Drafter:
        import networks

        return networks.NETWORKS[name].drafter(*networks.of(name, t), **options)

    return make


#: Every kind of node: kept, not kept, expanded or not.
DYNAMIC = drafters.TreeSettings(top_k=2, depth=3, num_nodes=6)

CASES: dict[str, Case] = {
    "plain": Case(lambda t, d: drafters.plain(), verify.target_only),
    "scripted": Case(lambda t, d: testing.scripted([1, 2, 3, 0, 1, 2, 3, 0] * 8, 3), verify.target_only),
    "scripted/token": Case(lambda t, d: testing.scripted([1, 2, 3, 0, 1, 2, 3, 0] * 8, 3), verify.token),
    "model/block": Case(lambda t, d: drafters.model(d, 4), verify.block),
    "model/token": Case(lambda t, d: drafters.model(d, 4), verify.token),
    "model greedy": Case(lambda t, d: drafters.model(d, 3, sample=False), verify.target_only),
    "model confidence": Case(
        lambda t, d: drafters.model(d, 4, proceed=drafters.confidence(0.3)), verify.block
    ),
    "model entropy": Case(
        lambda t, d: drafters.model(d, 4, proceed=drafters.entropy_bound(0.5)), verify.token
    ),
    "heuristic(model)": Case(lambda t, d: drafters.heuristic(drafters.model(d, 5), 2), verify.block),
    "early_exit": Case(lambda t, d: drafters.early_exit(1, 3), verify.block),
    "early_exit greedy": Case(lambda t, d: drafters.early_exit(1, 1, sample=False), verify.target_only),
    "suffix": Case(lambda t, d: drafters.suffix(4), verify.target_only),
    "suffix/token": Case(lambda t, d: drafters.suffix(4), verify.token),
    "suffix/block": Case(lambda t, d: drafters.suffix(4), verify.block),
    "suffix pld": Case(lambda t, d: drafters.suffix(4, preset="pld"), verify.target_only),
    "suffix vllm_ngram": Case(lambda t, d: drafters.suffix(4, preset="vllm_ngram"), verify.target_only),
    "suffix tree": Case(lambda t, d: drafters.suffix(4, num_nodes=8), verify.target_only),
    "suffix tree/tree": Case(lambda t, d: drafters.suffix(4, num_nodes=8), verify.tree),
    "heuristic(suffix)": Case(lambda t, d: drafters.heuristic(drafters.suffix(4), 2), verify.target_only),
    "token_recycling": Case(lambda t, d: drafters.token_recycling(10, k=3), verify.target_only),
    "iid tree/tree": Case(sampled(distinct=False), verify.tree),
    "iid tree/with_replacement": Case(sampled(distinct=False), verify.with_replacement),
    "iid tree/kseq": Case(sampled(distinct=False), verify.kseq),
    "distinct tree/tree": Case(sampled(distinct=True), verify.tree),
    "lookahead": Case(lambda t, d: drafters.lookahead(window=3, ngram=3, guesses=2), verify.target_only),
    "jacobi": Case(lambda t, d: drafters.jacobi(3), verify.target_only),
    "ngram": Case(lambda t, d: drafters.ngram(bigram(t.lm.config.vocab_size), 3), verify.block),
    "medusa": Case(heads("medusa"), verify.block),
    "medusa tree": Case(heads("medusa", template=BUSHY), verify.target_only),
    "hydra": Case(heads("hydra"), verify.token),
    "hydra greedy": Case(heads("hydra", num_tokens=2, sample=False), verify.target_only),
    "hydra tree": Case(heads("hydra", template=BUSHY), verify.tree),
    "blockwise": Case(heads("blockwise", proceed=drafters.confidence(0.3)), verify.block),
    "blockwise tree": Case(heads("blockwise", template=BUSHY), verify.target_only),
}


def netted(
    network: Callable[[Any], Callable[[Tiny], Network]],
    factory: Callable[..., Drafter],
    *args: Any,
    **options: Any,
) -> Callable[[Tiny, Tiny], Drafter]:
    """A drafter with random weights of ``network(module networks)``, which itself imports this one."""

    def drafter(t: Tiny, d: Tiny) -> Drafter:
        import networks

        made = network(networks)(t)
        weights = networks.shaken(Weights(made.init(jax.random.key(6))))
        return factory(made, weights, *args, **options)

    return drafter


def dflash(n: Any) -> Callable[[Tiny], Network]:
    return n.a_block("dflash")


def dspark(n: Any) -> Callable[[Tiny], Network]:
    return n.a_block("dspark", markov_rank=4)


def causal(n: Any) -> Callable[[Tiny], Network]:
    return n.a_block("causal")


def masked(n: Any) -> Callable[[Tiny], Network]:
    return n.a_masked(num_tokens=4)


def masked_block(n: Any) -> Callable[[Tiny], Network]:
    return n.a_masked(num_tokens=4, causal=False, shared_mask=False)


BLOCK, TREE = drafters.block, drafters.block_tree
CASES |= {
    "dflash": Case(netted(dflash, BLOCK, 4), verify.block),
    "dflash greedy": Case(netted(dflash, BLOCK, 3, sample=False), verify.target_only),
    "dflash steps": Case(netted(dflash, BLOCK, 4, sample=False, steps=3), verify.target_only),
    "dspark": Case(netted(dspark, BLOCK, 4, survival=1e-3), verify.block),
    "dspark tree": Case(netted(dspark, TREE, 3, 8, branching=3, beam=3), verify.target_only),
    "causal block": Case(netted(causal, BLOCK, 3, proceed=drafters.confidence(0.2)), verify.token),
    "causal tree": Case(netted(causal, TREE, 3, 10, branching=3), verify.tree),
    "masked": Case(netted(masked, drafters.masked), verify.block),
    "masked block": Case(netted(masked_block, drafters.masked, 3), verify.token),
    "masked greedy": Case(netted(masked, drafters.masked, sample=False), verify.target_only),
}

CASES |= {
    "eagle/block": Case(trained("eagle"), verify.block),
    "eagle greedy": Case(trained("eagle", sample=False), verify.target_only),
    "eagle confidence": Case(trained("eagle", proceed=drafters.confidence(0.3)), verify.token),
    "eagle tree/tree": Case(trained("eagle rows", tree=DYNAMIC), verify.tree),
    "eagle3/token": Case(trained("eagle3"), verify.token),
    "eagle3 own tree": Case(trained("eagle3 own", tree=DYNAMIC), verify.target_only),
    "mtp/block": Case(trained("mtp rows"), verify.block),
    "mtp tree": Case(trained("mtp", tree=DYNAMIC), verify.target_only),
    "mtp heads/block": Case(trained("mtp heads"), verify.block),
    "mtp heads tree": Case(trained("mtp heads tap", tree=DYNAMIC), verify.tree),
}

CAPE = drafters.Expansion(bins=(3, 2, 1), num_nodes=9)
CASES |= {
    "glide/block": Case(trained("glide"), verify.block),
    "glide confidence": Case(trained("glide rows", proceed=drafters.confidence(0.3)), verify.token),
    "glide cape": Case(trained("glide", expansion=CAPE), verify.target_only),
    "assistant/token": Case(trained("assistant own"), verify.token),
    "assistant cape": Case(trained("assistant", expansion=CAPE), verify.tree),
    "pass/block": Case(trained("pass"), verify.block),
    "pass greedy": Case(trained("pass", num_tokens=2, sample=False), verify.target_only),
    "bita/token": Case(trained("bita own"), verify.token),
}
CASES |= {
    "router(suffix, model)": Case(
        lambda t, d: drafters.router(drafters.suffix(4), drafters.model(d, 3), 2), verify.block
    ),
    "router(suffix, tree)": Case(
        lambda t, d: drafters.router(drafters.suffix(5), trained("eagle rows", tree=DYNAMIC)(t, d)),
        verify.target_only,
    ),
    "router(tree, dflash)": Case(
        lambda t, d: drafters.router(drafters.suffix(4, num_nodes=8), netted(dflash, BLOCK, 3)(t, d), 3),
        verify.tree,
    ),
}


def reference(
    model: Tiny, prompt: list[int], max_new_tokens: int, eos: tuple[int, ...] = (), row: int = 0
) -> list[int]:
    """Greedy decoding without cache, engine or sampler: one full forward a token. ``row`` is that of a batch
    which the prompt stands in."""
    model, tokens = model._replace(source=model.source[row:]), list(prompt)
    for _ in range(max_new_tokens):
        tokens.append(int(np.argmax(full_logits(model, np.array([tokens]))[0, -1])))
        if tokens[-1] in eos:
            break
    return tokens


WIDTH = 32


@functools.cache
def _forward(lm: LanguageModel) -> Callable:
    from jspec.types import Block

    @jax.jit
    def forward(params: PyTree, tokens: jnp.ndarray, source: jnp.ndarray) -> jnp.ndarray:
        rows = tokens.shape[0]
        prompt = Prompt(tokens, jnp.ones(rows, jnp.int32))
        if source.size:
            source = jnp.broadcast_to(source[None], (rows, len(source)))
            prompt = prompt._replace(source=source, source_lengths=jnp.full(rows, source.shape[1]))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        out = lm.extend(params, lm.start(params, prompt, 8), Block(tokens, positions))
        return lm.head(params, out.hidden)

    return forward


def full_logits(model: Tiny, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of whole sequences, padded to one width so that they compile once."""
    width = tokens.shape[1]
    padded = np.pad(tokens, ((0, 0), (0, WIDTH - width)))
    source = jnp.asarray(model.source, jnp.int32)
    return np.asarray(_forward(model.lm)(model.params, jnp.asarray(padded, jnp.int32), source))[:, :width]
