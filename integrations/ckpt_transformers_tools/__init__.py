"""What `ckpt-core` has of `ckpt_transformers`, found by entry points: what its `doctor` checks,
and what its `import` and `export` read and write.

A package beside the integration, since importing that imports transformers: none of this does.
"""
