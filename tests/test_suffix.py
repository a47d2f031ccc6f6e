import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.suffix import PRESETS, Lookup, match_lengths, suffix
from jspec.types import Context, Draft, Forward, Prompt, Verdict

S = 40
JB37 = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2]


def texts(count=150, alphabet=3, seed=0):
    """Random texts of ragged length, a third of them periodic, from one token to a full buffer."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        length = (1, 2, 3, S)[i] if i < 4 else int(rng.integers(1, S + 1))
        if i % 3 == 0:
            period = rng.integers(0, alphabet, int(rng.integers(1, 7)))
            out.append(np.resize(period, length).tolist())
        else:
            out.append(rng.integers(0, alphabet, length).tolist())
    return out


def padded(rows, width=S, seed=1):
    """Rows in a buffer whose unused slots hold tokens that would match."""
    buffer = np.random.default_rng(seed).integers(0, 3, (len(rows), width)).astype(np.int32)
    for row, tokens in zip(buffer, rows, strict=True):
        row[: len(tokens)] = tokens
    return jnp.array(buffer), jnp.array([len(row) for row in rows], jnp.int32)


def context_of(tokens, lengths):
    return Context(tokens, lengths, jnp.full_like(lengths, 99), (), *[None] * 4)


@functools.partial(jax.jit, static_argnames="method")
def _propose(params, state, tokens, lengths, method):
    return method.propose(params, state, context_of(tokens, lengths), None)


def propose(drafter, rows, prompts=None, width=S):
    tokens, lengths = padded(rows, width)
    prompts = lengths if prompts is None else jnp.array(prompts, jnp.int32)
    state = drafter.method.init(drafter.params, Prompt(tokens, prompts), width, None)
    draft, _ = _propose(drafter.params, state, tokens, lengths, drafter.method)
    return draft


def chains(draft):
    """The drafted tokens of each row, after the checks that make it a chain."""
    assert (draft.parents == jnp.arange(draft.tokens.shape[1])[None] - 1).all()
    assert (draft.valid[:, 1:] <= draft.valid[:, :-1]).all()
    assert draft.valid[:, 0].all()
    rows = zip(np.asarray(draft.tokens), np.asarray(draft.valid), strict=True)
    return [tokens[valid][1:].tolist() for tokens, valid in rows]


# --- the matcher against a textbook suffix automaton --------------------------------------------------


class Automaton:
    """Blumer's suffix automaton, one token at a time, with the first end position of every state."""

    def __init__(self):
        self.edges, self.link, self.size, self.first_end = [{}], [-1], [0], [-1]
        self.last = 0

    def append(self, token, position):
        new = self._state({}, 0, self.size[self.last] + 1, position)
        at = self.last
        while at >= 0 and token not in self.edges[at]:
            self.edges[at][token] = new
            at = self.link[at]
        if at >= 0:
            old = self.edges[at][token]
            if self.size[old] == self.size[at] + 1:
                self.link[new] = old
            else:
                clone = self._state(
                    dict(self.edges[old]), self.link[old], self.size[at] + 1, self.first_end[old]
                )
                while at >= 0 and self.edges[at].get(token) == old:
                    self.edges[at][token] = clone
                    at = self.link[at]
                self.link[old] = self.link[new] = clone
        self.last = new

    def _state(self, edges, link, size, end):
        self.edges.append(edges)
        self.link.append(link)
        self.size.append(size)
        self.first_end.append(end)
        return len(self.edges) - 1

    @staticmethod
    def longest(text):
        """Length of the longest suffix of the text that occurs earlier, and its first end."""
        automaton, at, length = Automaton(), 0, 0
        for position, token in enumerate(text):
            while at and token not in automaton.edges[at]:
                at = automaton.link[at]
                length = automaton.size[at]
            if token in automaton.edges[at]:
                at, length = automaton.edges[at][token], length + 1
            if position < len(text) - 1:
                automaton.append(token, position)
                # The state that the match is in may have been split by this very append.
                while at and automaton.size[automaton.link[at]] >= length:
                    at = automaton.link[at]
        return length, automaton.first_end[at]


def test_match_lengths_agree_with_a_suffix_automaton():
    rows = texts()
    tokens, lengths = padded(rows)
    match = np.asarray(jax.jit(match_lengths, static_argnums=2)(tokens, lengths, S))
    for row, text in zip(match, rows, strict=True):
        length, end = Automaton.longest(text)
        assert row.max() == length, text
        if length:
            assert row.argmax() == end, text


def test_the_cap_only_cuts():
    tokens, lengths = padded(texts())
    assert (match_lengths(tokens, lengths, 3) == jnp.minimum(match_lengths(tokens, lengths, S), 3)).all()


# --- every rule against a plain statement of it -------------------------------------------------------


def windows(text, n, stop):
    """Ends of the occurrences of the last n tokens, before position ``stop``."""
    return [i for i in range(n - 1, stop) if n <= len(text) and text[i - n + 1 : i + 1] == text[-n:]]


def reference(name, text, prompt):
    last = len(text) - 1
    if name == "pld":
        for n in (3, 2, 1):
            for i in windows(text, n, last):
                if i + 1 + 10 <= len(text) and i + 1 < len(text) - n:
                    return text[i + 1 : i + 11]
    if name == "transformers":
        for n in (2, 1):
            for i in windows(text, n, last):
                return text[i + 1 : i + 11]
    if name == "vllm_ngram":
        for i in windows(text, 5, last):
            return text[i + 1 : i + 6]
    if name == "llma":
        for n in range(min(5, len(text) - prompt), 0, -1):
            for i in windows(text, n, prompt):
                return text[i + 1 : min(i + 20, prompt)]
    if name == "sam":
        length, end = Automaton.longest(text)
        return text[end + 1 : last][: min(39, 4 * length)] if length else []
    if name == "jspec":
        for n in range(last, 0, -1):
            for i in reversed(windows(text, n, last)):
                grown = list(text)
                while len(grown) < len(text) + 5:  # copy token by token, from what has been copied, too
                    grown.append(grown[i + 1 + len(grown) - len(text)])
                return grown[len(text) :]
    return []


@pytest.mark.parametrize("name", [*PRESETS, "jspec"])
@pytest.mark.parametrize("alphabet", [2, 6])
def test_presets_equal_their_originals(name, alphabet):
    rows = texts(alphabet=alphabet, seed=alphabet)
    prompts = [1 + 2 * len(row) // 3 if len(row) > 2 else len(row) for row in rows]
    drafts = chains(propose(suffix(preset=None if name == "jspec" else name), rows, prompts))
    wanted = [reference(name, row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
    assert drafts == wanted
    assert any(wanted)


def test_three_occurrences_with_three_continuations():
    """: 1 2 occurs three times; the last time it is the text's own end."""
    assert chains(propose(suffix(3), [JB37])) == [[3, 8, 1]]
    assert chains(propose(suffix(3, Lookup(earliest=True)), [JB37])) == [[3, 9, 1]]
    assert chains(propose(suffix(2, "transformers"), [JB37])) == [[3, 9]]
    assert chains(propose(suffix(preset="vllm_ngram", min_match=2, max_match=2), [JB37])) == [[3, 9, 1, 2, 3]]


def test_short_texts_and_texts_without_a_match_draft_nothing():
    rows = [[7], [7, 8], [7, 8, 9], list(range(S))]
    for preset in (None, *PRESETS):
        draft = propose(suffix(preset=preset), rows)
        assert chains(draft) == [[]] * 4
        assert draft.tokens[:, 0].tolist() == [7, 8, 9, S - 1]
    assert chains(propose(suffix(min_match=5, max_match=5), [[1, 2, 1]])) == [[]]


def test_a_continuation_that_meets_the_end():
    text = [5, 1, 2, 3, 1]
    assert chains(propose(suffix(7), [text])) == [[2, 3, 1, 2, 3, 1, 2]]
    assert chains(propose(suffix(7, Lookup(periodic=False)), [text])) == [[2, 3, 1]]
    assert chains(propose(suffix(4), [[6] * 9])) == [[6] * 4]


def test_pld_wants_a_token_between_occurrence_and_suffix():
    text = [9, 2, 8, 1, 2, 1, 2]  # 1 2 came before, but ends where the suffix begins; 2 came long before
    assert chains(propose(suffix(1, "pld"), [text])) == [[8]]
    assert chains(propose(suffix(1, "pld"), [[9, 2, 8, 1, 2, 7, 1, 2]])) == [[7]]


def test_a_match_in_the_output_alone():
    text, prompt = [4, 5, 6, 1, 2, 1], 3
    assert chains(propose(suffix(2), [text], [prompt])) == [[2, 1]]
    assert chains(propose(suffix(2, "llma"), [text], [prompt])) == [[]]
    assert chains(propose(suffix(2, "llma"), [[*text, 5]], [prompt])) == [[6]]


def test_length_follows_the_match():
    rows = [[1, 9, 9, 9, 1], [1, 2, 9, 9, 9, 1, 2], [1, 2, 3, 9, 9, 9, 1, 2, 3]]
    assert [len(d) for d in chains(propose(suffix(5, factor=1.0), rows))] == [1, 2, 3]
    assert [len(d) for d in chains(propose(suffix(5, offset=2.0), rows))] == [2, 2, 2]
    assert [len(d) for d in chains(propose(suffix(5, factor=1.5, offset=1.0), rows))] == [2, 4, 5]
    assert [len(d) for d in chains(propose(suffix(5, min_match=2), rows))] == [0, 5, 5]


# --- the voted tree -----------------------------------------------------------------------------------


def reference_tree(text, num_tokens, num_nodes, occurrences=8):
    """Paths of the kept nodes in order."""
    match = [0] * len(text)
    for i in range(len(text) - 1):
        while match[i] <= i and text[i - match[i]] == text[len(text) - 1 - match[i]]:
            match[i] += 1
    best = sorted((i for i in range(len(text)) if match[i]), key=lambda i: (-min(match[i], 32), -i))
    votes = {}
    for i in best[:occurrences]:
        period = len(text) - 1 - i
        path = tuple(text[i + 1 + k % period] for k in range(num_tokens))
        for k in range(1, num_tokens + 1):
            votes[path[:k]] = votes.get(path[:k], 0) + 2 ** min(match[i], 16)
    # Dictionaries keep the order of insertion: among equals the better occurrence is first.
    return sorted(votes, key=lambda path: (-votes[path], len(path)))[: num_nodes - 1]


@pytest.mark.parametrize(("num_tokens", "num_nodes"), [(3, 6), (4, 16), (2, 17)])
def test_tree_equals_its_reference(num_tokens, num_nodes):
    rows = texts(alphabet=4, seed=3)
    draft = jax.tree.map(np.asarray, propose(suffix(num_tokens, num_nodes=num_nodes), rows))
    assert draft.tokens.shape == (len(rows), num_nodes)
    for tokens, parents, valid, row in zip(draft.tokens, draft.parents, draft.valid, rows, strict=True):
        assert parents[0] == -1
        assert tokens[0] == row[-1]
        paths = [()]
        for i in range(1, num_nodes):
            assert 0 <= parents[i] < i
            if valid[i]:
                assert valid[parents[i]]
                paths.append((*paths[parents[i]], tokens[i].item()))
        # Valid nodes come first, and each path once.
        assert paths[1:] == reference_tree(row, num_tokens, num_nodes)
        assert valid.sum() == len(paths)


def test_tree_votes():
    # After 1: 2 5 (twice), 3, 4; the longest match, 9 1, outvotes nothing here but is as strong as two.
    text = [9, 1, 3, 0, 1, 2, 5, 1, 2, 5, 8, 9, 1]
    draft = propose(suffix(1, num_nodes=4), [text])
    assert draft.tokens.tolist() == [[1, 3, 2, 0]]
    draft = propose(suffix(1, num_nodes=4, min_match=2, max_match=2), [text])
    assert draft.valid.tolist() == [[True, True, False, False]]


def test_tree_drops_unlikely_nodes():
    text = [
        1,
        2,
        0,
        1,
        2,
        0,
        1,
        2,
        0,
        1,
        3,
        0,
        1,
    ]  # after 1: 2 (with 0 1 before it: two votes of 4, one of 2)
    draft = propose(suffix(1, num_nodes=3), [text])
    assert draft.valid.tolist() == [[True, True, True]]
    few = suffix(1, num_nodes=3, min_probability=0.5)
    assert propose(few, [text]).valid.tolist() == [[True, True, False]]
    assert few.method == suffix(1, num_nodes=3).method


# --- rows, state, factory -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"preset": "llma"}, {"preset": "pld"}, {"num_nodes": 8}])
def test_a_row_does_not_see_its_neighbours_or_its_padding(options):
    rows = texts(count=12, seed=7)
    prompts = [max(1, len(row) // 2) for row in rows]
    together = propose(suffix(**options), rows, prompts)
    for i, row in enumerate(rows):
        alone = propose(suffix(**options), [row], prompts[i : i + 1], width=S + 9)
        for one, many in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(one[0], many[i])


def absorb(drafter, tokens, prompts, chunk):
    """What the engine does with a prompt: everything but its last token, in chunks, as a forced chain."""
    state = drafter.method.init(drafter.params, Prompt(tokens, prompts), tokens.shape[1], None)
    for base in range(0, int(prompts.max()), chunk):
        at = jnp.minimum(base, prompts - 1)
        count = jnp.clip(prompts - 1 - at, 0, chunk)
        path = jnp.broadcast_to(jnp.arange(chunk)[None], (len(prompts), chunk))
        index = jnp.clip(at[:, None] + path, 0, tokens.shape[1] - 2)
        draft = Draft(jnp.take_along_axis(tokens, index, 1), path - 1, path < 1)
        verdict = Verdict(path, count, jnp.take_along_axis(tokens, index + 1, 1), count)
        forward = Forward(jnp.zeros((len(prompts), chunk, 1)), {}, (), None)
        state = drafter.method.update(
            drafter.params, state, context_of(tokens, at + 1), draft, verdict, forward
        )
    return state


def test_the_prompt_of_llma_is_what_was_absorbed():
    tokens, lengths = padded(texts(count=8))
    drafter = suffix(preset="llma")
    for chunk in (1, 4, S):
        assert (absorb(drafter, tokens, lengths, chunk).prompt == lengths).all()
    # A next turn, of 4 tokens: the answer so far and the turn are prompt, too.
    state = drafter.method.init(drafter.params, Prompt(tokens, lengths * 0 + 3), S, None)
    path = jnp.broadcast_to(jnp.arange(4)[None], (8, 4))
    turn = Verdict(path, lengths * 0 + 3, path, lengths * 0 + 4)
    context = context_of(tokens, lengths * 0 + 9)
    forward = Forward(jnp.zeros((8, 4, 1)), {}, (), None)
    draft = Draft(path, path - 1, path >= 0)
    assert (
        drafter.method.update(drafter.params, state, context, draft, turn, forward).prompt.tolist()
        == [13] * 8
    )
    # A finished row and a round of generation change nothing.
    state = drafter.method.init(drafter.params, Prompt(tokens, lengths), S, None)
    none = jnp.zeros_like(lengths)
    path = jnp.zeros((8, 3), jnp.int32)
    for count, logits in ((none, None), (none + 2, jnp.zeros((8, 3, 5)))):
        forward = Forward(jnp.zeros((8, 3, 1)), {}, (), logits)
        args = (context_of(tokens, lengths), Draft(path, path, path < 0), Verdict(path, count, path, count))
        assert (drafter.method.update(drafter.params, state, *args, forward).prompt == lengths).all()


def test_other_rules_keep_no_state():
    state = suffix().method.init(suffix().params, Prompt(*padded([[1]])), S, None)
    assert jax.tree.leaves(state) == []


@pytest.mark.parametrize(
    "options", [{}, {"preset": "pld"}, {"preset": "sam"}, {"preset": "llma"}, {"num_nodes": 8}]
)
def test_an_encoders_source_is_text_before_the_decoders(options):
    """Source and output apart give the draft of the two as one text."""
    drafter = suffix(**options)
    rows = [row for row in texts(count=30, seed=11) if len(row) > 1]
    cuts = [1 + i % (len(row) - 1) for i, row in enumerate(rows)]
    whole = propose(drafter, rows, cuts)
    sources, outputs = (
        [row[:cut] for row, cut in zip(rows, cuts, strict=True)],
        [row[cut:] for row, cut in zip(rows, cuts, strict=True)],
    )
    tokens, lengths = padded(outputs)
    prompt = Prompt(tokens, jnp.zeros_like(lengths), *padded(sources, seed=2))
    state = drafter.method.init(drafter.params, prompt, S, None)
    apart, _ = _propose(drafter.params, state, tokens, lengths, drafter.method)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(np.where(whole.valid, one, 0), np.where(whole.valid, other, 0))


def test_equal_settings_are_one_method_and_thresholds_do_not_recompile():
    assert suffix().method is suffix(5, Lookup()).method
    assert suffix(4).method is not suffix(5).method
    assert suffix().method.draws == "chosen"
    assert (suffix(7).method.width, suffix(7).method.depth) == (8, 7)
    assert (suffix(7, num_nodes=12).method.width, suffix(7, num_nodes=12).method.depth) == (12, 7)
    rows = texts(count=5)
    propose(suffix(6), rows)
    before = _propose._cache_size()
    for settings in ({"factor": 1.0}, {"offset": 2.0}, {"min_match": 3}):
        propose(suffix(6, **settings), rows)
    assert _propose._cache_size() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "pdl"}, "preset: expected one of llma, pld, sam, transformers, vllm_ngram .* got 'pdl'"),
        ({"num_tokens": 0}, "num_tokens: expected a whole number >= 1, got 0"),
        ({"num_tokens": 2.5}, "num_tokens: expected a whole number >= 1, got 2.5"),
        ({"min_match": 0}, "min_match: expected a whole number >= 1, got 0"),
        ({"min_match": 4, "max_match": 3}, "min_match: expected at most max_match = 3, got 4"),
        ({"num_nodes": 1}, "num_nodes: expected a whole number >= 2, got 1"),
        ({"num_nodes": 42}, "num_nodes: expected at most 41, got 42"),
        ({"min_probability": 0.1}, "min_probability: .* 0 for a chain, got 0.1"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        suffix(**options)
