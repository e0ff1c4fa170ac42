"""How a Checkpointer behaves: every option, its default, presets, and what the environment sets."""

from ckpt_core.options.addresses import check_no_null
from ckpt_core.options.level import (
    PARITY,
    PEER,
    PEERS,
    SCHEMES,
    Level,
    parity_shape,
    parse_levels,
    read_shape,
    scheme_of,
)
from ckpt_core.options.options import ENV_PREFIX, Options, checked_options, checked_root

__all__ = [
    "ENV_PREFIX",
    "PARITY",
    "PEER",
    "PEERS",
    "SCHEMES",
    "Level",
    "Options",
    "check_no_null",
    "checked_options",
    "checked_root",
    "parity_shape",
    "parse_levels",
    "read_shape",
    "scheme_of",
]
