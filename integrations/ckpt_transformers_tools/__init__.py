"""What `ckpt-core` has of `ckpt_transformers`, found by an entry point: what its `doctor` checks.

A package beside the integration, since importing that imports transformers: none of this does.
"""
