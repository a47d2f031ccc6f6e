"""Acceptance rules: from the target's logits and a draft to the tokens of a round.

================== ========= ============================== =============================
rule               draft     exactness                      coins
================== ========= ============================== =============================
`token`            chain     lossless in law                one a drafted token
`block`            chain     lossless in law                one a drafted token
`tree`             any       lossless in law                one a visited sibling
`with_replacement` chosen, iid lossless in law              one a visited sibling
`kseq`             iid       lossless in law                one a visited sibling
`target_only`      any       lossless in law                none; one draw a level
`lenience`         any       lossy                          one a visited sibling
`typical`          any       lossy (exact at temperature 0) none
`top_beta`         any       lossy (exact at temperature 0) none
`blockwise`        any       lossy (exact at temperature 0) none
`rollback`         any       lossy (exact at temperature 0) none
`synthetic`        any       lossy                          one a level
================== ========= ============================== =============================

A factory returns a `jspec.types.Verifier`. Greedy decoding is temperature 0 of every rule: the law is
one-hot, so a token is accepted if and only if it is the target's argmax. Only `lenience` looks behind it.
"""

from jspec.types import Method, Verifier
from jspec.verify.block import block
from jspec.verify.lossy import blockwise, lenience, rollback, synthetic, top_beta, typical
from jspec.verify.token import token
from jspec.verify.tree import kseq, target_only, tree, with_replacement

__all__ = [
    "RULES",
    "block",
    "blockwise",
    "default",
    "kseq",
    "lenience",
    "named",
    "resolve",
    "rollback",
    "synthetic",
    "target_only",
    "token",
    "top_beta",
    "tree",
    "typical",
    "with_replacement",
]

#: Rules by name, for configs: those that need no argument.
RULES = {
    factory.__name__: factory
    for factory in (
        token,
        block,
        tree,
        with_replacement,
        kseq,
        target_only,
        typical,
        top_beta,
        blockwise,
        rollback,
    )
}


def default(method: Method) -> Verifier:
    """The lossless rule for how ``method`` drafts: `target_only` for chosen children, else `block` for
    chains, which accepts most, and `tree` for trees, which is right for every kind of drawn ones.

    Example:
        >>> from jspec.types import Method
        >>> model = Method(None, None, None, width=6, depth=5, draws="iid")
        >>> default(model).name, default(model._replace(width=24)).name
        ('block', 'tree')
    """
    if method.draws == "chosen":
        return target_only()
    return block() if method.width == method.depth + 1 else tree()


def named(name: str) -> Verifier:
    """The rule of that name with its default settings.

    >>> named("block").lossless
    True
    """
    if name not in RULES:
        raise ValueError(f"verify: expected one of {', '.join(RULES)}, got {name!r}")
    return RULES[name]()


def resolve(method: Method, rule: Verifier | None = None) -> Verifier:
    """``rule``, or the `default` for ``method``.

    Raises:
        ValueError: the rule is not right for how ``method`` draws its children.
    """
    if rule is None:
        return default(method)
    if not isinstance(rule, Verifier):
        raise ValueError(f"verify: expected a rule of jspec.verify, got {rule!r}")
    if method.draws not in rule.draws:
        raise ValueError(
            f"verify: {rule.name} is right for {sorted(rule.draws)} drafts, "
            f"but the drafter's are {method.draws}"
        )
    return rule
