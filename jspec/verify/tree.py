"""Rules for token trees. A chain is a tree, so all of them judge chains too.

Three rules walk down from the root and at each node choose one child, or none (`descend`): they differ
only in how siblings are judged. The fourth, `target_only`, needs no coin at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
from jaxtyping import Array, Bool, Float, Int

from jspec import sampling
from jspec.types import Draft, Keys, PyTree, Sampler, Verdict, Verifier
from jspec.verify import base

# (p [B, V] at the node, node [B], rows that look [B]) -> (child [B], N for none; leftover law [B, V])
Siblings = Callable[
    [Float[Array, "B V"], Int[Array, " B"], Bool[Array, " B"]], tuple[Int[Array, " B"], Float[Array, "B V"]]
]


class _Walk(NamedTuple):
    node: Int[Array, " B"]
    num_accepted: Int[Array, " B"]
    looking: Bool[Array, " B"]
    law: Float[Array, "B V"]  # of the token after `node`, once the row looks no further
    history: PyTree


def descend(
    sampler: Sampler,
    history: PyTree,
    logits: Float[Array, "B N V"],
    draft: Draft,
    depth: int,
    keys: Keys,
    siblings: Siblings,
) -> Verdict:
    """Walk from the root, one level a step, to a node where ``siblings`` accepts no child; then draw from
    the law it left. Rows that look stand at the same depth, and one law a row and level is computed."""
    batch, width, vocab_size = logits.shape

    def body(w: _Walk) -> _Walk:
        child, leftover = siblings(sampler.law(w.history, base.at(logits, w.node)), w.node, w.looking)
        descended = w.looking & (child < width)
        return _Walk(
            jnp.where(descended, child, w.node),
            w.num_accepted + descended.astype(jnp.int32),
            descended,
            base.select(w.looking, leftover, w.law),
            base.select(descended, sampler.push(w.history, base.at(draft.tokens, child)), w.history),
        )

    zero = jnp.zeros(batch, jnp.int32)
    start = _Walk(zero, zero, jnp.ones(batch, bool), jnp.zeros((batch, vocab_size)), history)
    w = jax.lax.while_loop(lambda w: w.looking.any(), body, start)
    token = sampling.draw(sampling.fold(keys, base.DRAW), w.law)
    return base.verdict(draft, base.path_to(draft, w.node, depth), w.num_accepted, token)


class _Siblings(NamedTuple):
    child: Int[Array, " B"]  # the one to judge next, N when none is left
    accepted: Int[Array, " B"]  # N so far
    p: Float[Array, "B V"]  # given that all before `child` were rejected


def remaining(
    draft: Draft, node: Int[Array, " B"], child: Int[Array, " B"], vocab_size: int
) -> Float[Array, "B V"]:
    """The law ``child`` was drawn from, without the tokens of the siblings before it that share the law.

    That is its law for siblings drawn without replacement. For i.i.d. siblings it is the law of a child
    that repeats none of them; one that does has 0 here. All 0 where nothing remains.
    """
    q = base.drawn_from(draft, child, vocab_size)
    index = base.law_index(draft)
    law = base.at(index, child)[:, None]
    before = jnp.arange(draft.tokens.shape[1])[None] < child[:, None]
    before &= draft.valid & (draft.parents == node[:, None]) & (index == law) & (law >= 0)
    # Column V does not exist, so that a token sent there is dropped.
    columns = jnp.where(before, draft.tokens, vocab_size)
    q = jax.vmap(lambda q, columns: q.at[columns].set(0, mode="drop"))(q, columns)
    return sampling.normalize(q, q)


def in_turn(
    draft: Draft, keys: Keys, replacement: bool, lenience: Float[Array, ""] | float = 1.0
) -> Siblings:
    """Siblings judged one after the other, each against what the rejected ones left of p."""
    width = draft.tokens.shape[1]
    accept_keys = sampling.fold(keys, base.ACCEPT)

    def siblings(
        p: Float[Array, "B V"], node: Int[Array, " B"], looking: Bool[Array, " B"]
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
        def open_rows(s: _Siblings) -> Bool[Array, " B"]:
            return looking & (s.child < width) & (s.accepted == width)

        def body(s: _Siblings) -> _Siblings:
            child = jnp.minimum(s.child, width - 1)
            token = base.at(draft.tokens, child)
            if replacement:
                q = base.drawn_from(draft, child, p.shape[-1])
            else:
                q = remaining(draft, node, child, p.shape[-1])
            q_token = base.at(q, token)
            judged = open_rows(s) & (q_token > 0)
            accepted = judged & sampling.accept(
                sampling.fold(accept_keys, child),
                jnp.where(judged, base.at(s.p, token), 0),
                jnp.where(judged, q_token * lenience, 1),
            )
            rejected = judged & ~accepted

            def leave(p: Float[Array, "B V"]) -> Float[Array, "B V"]:
                return base.select(rejected, sampling.normalize(jnp.maximum(p - q, 0), p), p)

            return _Siblings(
                base.next_child(draft, node, child),
                jnp.where(accepted, child, s.accepted),
                jax.lax.cond(rejected.any(), leave, lambda p: p, s.p),
            )

        none = jnp.full(p.shape[:1], width)
        start = _Siblings(base.next_child(draft, node, node), none, p)
        s = jax.lax.while_loop(lambda s: open_rows(s).any(), body, start)
        return s.accepted, s.p

    return siblings


def _tree(
    sampler: Sampler, history: PyTree, logits: Float[Array, "B N V"], draft: Draft, depth: int, keys: Keys
) -> Verdict:
    return descend(sampler, history, logits, draft, depth, keys, in_turn(draft, keys, replacement=False))


def tree() -> Verifier:
    r"""One sequential rule over siblings, for every kind of draft. Lossless in law.

    At a node with law p, for its children x in order, drawn from q (one-hot for a chosen child)::

        skip x if q(x) = 0 (it repeats a rejected sibling of the same law)
        accept x with probability min(1, p(x) / q(x)) and descend; otherwise
            p <- norm((p - q)+),   q(x) <- 0, q <- norm(q)    for later siblings of that law

    and where no child is left, emit a token of the p that remains. Given that a sibling is judged, its
    token was drawn from the q of that moment, whether siblings were drawn i.i.d. or without replacement,
    and the p that a rejection leaves does not depend on the token rejected: so the law is p's by
    induction, and siblings of several laws, chosen ones and duplicates may be mixed. On a chain it is the
    token rule; without replacement it is the rule of Sequoia and of recursive rejection sampling; chosen
    children give the rule of EAGLE-2.

    Which children exist may depend on tokens drawn before them, never on their own.

    Returns:
        A `Verifier` that takes any draft.

    Example:
        Both children are chosen: the greedy token is among them.

        >>> import jax, jax.numpy as jnp
        >>> from jspec import sampling, types
        >>> draft = types.Draft(jnp.array([[0, 2, 1]]), jnp.array([[-1, 0, 0]]), jnp.ones((1, 3), bool))
        >>> logits = jnp.array([[[0.0, 5.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 7.0]]])
        >>> v = tree().rule(sampling.greedy(1), (), logits, draft, 1, sampling.row_keys(jnp.arange(1)))
        >>> v.path.tolist(), v.tokens.tolist()
        ([[0, 2]], [[1, 2]])

    Reference:
        Chen et al., Sequoia, arXiv 2402.12374 (sampling without replacement); Jeon et al., Recursive
        Speculative Decoding, arXiv 2402.14160; Li et al., EAGLE-2, arXiv 2406.16858. Skipping repeated
        i.i.d. siblings is ours.
    """
    return Verifier(Partial(_tree), base.ALL_DRAWS, True, "tree")


def _with_replacement(
    sampler: Sampler, history: PyTree, logits: Float[Array, "B N V"], draft: Draft, depth: int, keys: Keys
) -> Verdict:
    return descend(sampler, history, logits, draft, depth, keys, in_turn(draft, keys, replacement=True))


def with_replacement() -> Verifier:
    r"""Multi-step speculative sampling over i.i.d. (or chosen) siblings. Lossless in law.

    As `tree`, but q stays what it was after a rejection, and a repeated sibling is judged again. Accepts
    slightly more than `tree` of i.i.d. siblings on average (not always), less than `kseq`. Wrong for
    siblings drawn without replacement, whose laws do change. The paper picks siblings in random order; in
    the order drawn the law is the same.

    Returns:
        A `Verifier` for "iid" and "chosen" drafts.

    Example:
        >>> sorted(with_replacement().draws)
        ['chosen', 'iid']

    Reference:
        Miao et al., SpecInfer, arXiv 2305.09781 (VerifyStochastic).
    """
    return Verifier(Partial(_with_replacement), frozenset({"iid", "chosen"}), True, "with_replacement")


class _Match(NamedTuple):
    level: Int[Array, ""]  # depth at which the rows stand that still look
    spelled: Bool[Array, "B N"]  # the nodes whose path is the tokens emitted so far: copies of one node
    num_accepted: Int[Array, " B"]
    looking: Bool[Array, " B"]
    token: Int[Array, " B"]
    history: PyTree


def _target_only(
    sampler: Sampler, history: PyTree, logits: Float[Array, "B N V"], draft: Draft, depth: int, keys: Keys
) -> Verdict:
    batch, width, _ = logits.shape
    draw_keys = sampling.fold(keys, base.DRAW)
    child = draft.valid & (draft.parents >= 0)

    def node(m: _Match) -> Int[Array, " B"]:
        return jnp.argmax(m.spelled, axis=1).astype(jnp.int32)

    def body(m: _Match) -> _Match:
        p = sampler.law(m.history, base.at(logits, node(m)))
        token = sampling.draw(sampling.fold(draw_keys, m.level), p)
        below = jnp.take_along_axis(m.spelled, jnp.maximum(draft.parents, 0), axis=1)
        spelled = child & below & (draft.tokens == token[:, None])
        matched = m.looking & spelled.any(1)
        return _Match(
            m.level + 1,
            base.select(matched, spelled, m.spelled),
            m.num_accepted + matched.astype(jnp.int32),
            matched,
            jnp.where(m.looking, token, m.token),
            base.select(matched, sampler.push(m.history, token), m.history),
        )

    zero = jnp.zeros(batch, jnp.int32)
    root = jnp.broadcast_to((jnp.arange(width) == 0)[None], (batch, width))
    start = _Match(jnp.int32(0), root, zero, jnp.ones(batch, bool), zero, history)
    m = jax.lax.while_loop(lambda m: m.looking.any(), body, start)
    return base.verdict(draft, base.path_to(draft, node(m), depth), m.num_accepted, m.token)


def target_only() -> Verifier:
    r"""Draw from the target and follow. Lossless in law.

    At each node: draw x ~ p, emit it, and descend if x is a child's token. What is emitted never depends on
    the draft, so any draft will do. For chosen children no rule accepts more; for drawn ones `tree` and
    `block` do, except at temperature 0. Costs one law and one draw a level, however wide the tree is.

    Repeated children are followed together: after tokens a b the walk stands on every node whose path
    spells a b, so overlapping guesses need not be merged into a trie first.

    Returns:
        A `Verifier` that takes any draft.

    Example:
        The guesses 1 2 and 1 0 are two separate branches; the second is right.

        >>> import jax, jax.numpy as jnp
        >>> from jspec import sampling, types
        >>> draft = types.Draft(jnp.array([[0, 1, 1, 2, 0]]), jnp.array([[-1, 0, 0, 1, 2]]),
        ...                     jnp.ones((1, 5), bool))
        >>> logits = jax.nn.one_hot(jnp.array([[1, 0, 0, 1, 2]]), 3)
        >>> v = target_only().rule(sampling.greedy(1), (), logits, draft, 2, sampling.row_keys(jnp.arange(1)))
        >>> v.path.tolist(), v.tokens.tolist()
        ([[0, 2, 4]], [[1, 0, 2]])

    Reference:
        Li et al., EAGLE-2, arXiv 2406.16858 (its released verification, as one draw instead of coins).
    """
    return Verifier(Partial(_target_only), base.ALL_DRAWS, True, "target_only")


def _kseq(
    sampler: Sampler, history: PyTree, logits: Float[Array, "B N V"], draft: Draft, depth: int, keys: Keys
) -> Verdict:
    if draft.laws is None:
        raise ValueError("verify.kseq judges drawn children: expected a draft with laws, got laws = None")
    width, vocab_size = logits.shape[1:]
    accept_keys = sampling.fold(keys, base.ACCEPT)

    def siblings(
        p: Float[Array, "B V"], node: Int[Array, " B"], looking: Bool[Array, " B"]
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
        children = draft.valid & (draft.parents == node[:, None])
        count = children.sum(1).astype(jnp.float32)
        first = base.next_child(draft, node, node)
        q = base.drawn_from(draft, jnp.minimum(first, width - 1), vocab_size)

        def taken(rho: Float[Array, " B"]) -> tuple[Float[Array, "B V"], Float[Array, " B"]]:
            """min(p / rho, q) and gain = (1 - (1 - beta)^k) / beta, where beta is its sum."""
            both = jnp.minimum(p / rho[:, None], q)
            beta = jnp.minimum(both.sum(-1), 1)
            some = (beta > 0) & (count > 0)
            power = -jnp.expm1(jnp.where(some, count, 1) * jnp.log1p(-jnp.where(some, beta, 0.5)))
            return both, jnp.where(some, power / jnp.where(some, beta, 1), count)

        def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) / 2
            enough = taken(middle)[1] <= middle
            return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

        # The rule is exact for every rho >= gain(rho), so the upper end of the last interval is taken; the
        # smallest such rho accepts most, and 20 halvings bring it within (k - 1) / 2^20.
        one = jnp.ones_like(count)
        _, rho = jax.lax.fori_loop(0, 20, halve, (one, jnp.maximum(count, 1)))
        both, gain = taken(rho)
        leftover = sampling.normalize(jnp.maximum(p - both * gain[:, None], 0), p)

        def open_rows(s: tuple[Array, Array]) -> Array:
            child, accepted = s
            return looking & (child < width) & (accepted == width)

        def body(s: tuple[Array, Array]) -> tuple[Array, Array]:
            child = jnp.minimum(s[0], width - 1)
            token = base.at(draft.tokens, child)
            q_token = base.at(q, token)
            judged = open_rows(s) & (q_token > 0)
            accepted = judged & sampling.accept(
                sampling.fold(accept_keys, child),
                jnp.where(judged, base.at(p, token), 0),
                jnp.where(judged, rho * q_token, 1),
            )
            return base.next_child(draft, node, child), jnp.where(accepted, child, s[1])

        none = jnp.full_like(node, width)
        _, accepted = jax.lax.while_loop(lambda s: open_rows(s).any(), body, (first, none))
        return accepted, leftover

    return descend(sampler, history, logits, draft, depth, keys, siblings)


def kseq() -> Verifier:
    r"""K-SEQ over i.i.d. siblings. Lossless in law.

    At a node with law p and k children drawn from q::

        beta(rho) = sum_x min(p(x) / rho, q(x)),     gain(rho) = (1 - (1 - beta)^k) / beta
        rho = the smallest in [1, k] with gain(rho) <= rho           (by bisection, rounded up)
        accept each child in turn with probability min(1, p(x) / (rho q(x)))
        if none is, emit a token of norm(p - min(p / rho, q) gain)

    Accepts at least 1 - 1/e of what the best rule for i.i.d. children could, and in all cases tried more
    than the rules that judge siblings in turn. In exchange it asks for more: how many children a node has
    must be settled before the first of them is drawn, and all must share one law.

    Returns:
        A `Verifier` for "iid" drafts; its rule raises ValueError while tracing if the draft has no laws.

    Example:
        >>> sorted(kseq().draws)
        ['iid']

    Reference:
        Sun et al., SpecTr, arXiv 2310.15141 (K-SEQ).
    """
    return Verifier(Partial(_kseq), frozenset({"iid"}), True, "kseq")
