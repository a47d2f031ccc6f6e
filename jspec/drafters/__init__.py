"""Drafting methods: one factory a method, all returning `jspec.types.Drafter`."""

from jspec.drafters.attend import (
    AssistantConfig,
    Expansion,
    GlideConfig,
    attend,
    attend_config,
    attend_network,
)
from jspec.drafters.autoregressive import confidence, entropy_bound
from jspec.drafters.beam import TreeSettings
from jspec.drafters.block import BlockConfig, block, block_config, block_network, block_tree
from jspec.drafters.eagle import Eagle3Config, EagleConfig, eagle, eagle3_taps, eagle_network
from jspec.drafters.files import load, save
from jspec.drafters.head_nets import HeadsConfig, heads_network
from jspec.drafters.heads import heads
from jspec.drafters.jacobi import jacobi, lookahead
from jspec.drafters.length import heuristic
from jspec.drafters.lookahead_tokens import LookaheadConfig, lookahead_network, lookahead_tokens
from jspec.drafters.masked import MaskedConfig, masked, masked_network
from jspec.drafters.model import model
from jspec.drafters.mtp import MtpConfig, MtpHeadsConfig, mtp, mtp_network
from jspec.drafters.ngram import NgramTable, load_ngram, ngram, save_ngram
from jspec.drafters.plain import plain
from jspec.drafters.recycling import token_recycling
from jspec.drafters.router import router
from jspec.drafters.self import early_exit
from jspec.drafters.suffix import suffix

#: Methods that need no weights of their own, hence work with any target by name alone.
NAMED = {
    factory.__name__: factory for factory in (suffix, token_recycling, lookahead, jacobi, early_exit, plain)
}

__all__ = [
    "NAMED",
    "AssistantConfig",
    "BlockConfig",
    "Eagle3Config",
    "EagleConfig",
    "Expansion",
    "GlideConfig",
    "HeadsConfig",
    "LookaheadConfig",
    "MaskedConfig",
    "MtpConfig",
    "MtpHeadsConfig",
    "NgramTable",
    "TreeSettings",
    "attend",
    "attend_config",
    "attend_network",
    "block",
    "block_config",
    "block_network",
    "block_tree",
    "confidence",
    "eagle",
    "eagle3_taps",
    "eagle_network",
    "early_exit",
    "entropy_bound",
    "heads",
    "heads_network",
    "heuristic",
    "jacobi",
    "load",
    "load_ngram",
    "lookahead",
    "lookahead_network",
    "lookahead_tokens",
    "masked",
    "masked_network",
    "model",
    "mtp",
    "mtp_network",
    "ngram",
    "plain",
    "router",
    "save",
    "save_ngram",
    "suffix",
    "token_recycling",
]
