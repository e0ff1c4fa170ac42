"""How a Checkpointer behaves: every option, its default, presets, and what the environment sets."""

from ckpt_core.options.options import ENV_PREFIX, Options, checked_options, checked_root

__all__ = ["ENV_PREFIX", "Options", "checked_options", "checked_root"]
