"""What `ckpt-core` has of `ckpt_lightning`, found by entry points: the suite `lightning` of its `bench`,
what its `doctor` checks, and what its `import` and `export` read and write.

A package beside the integration, since importing that imports Lightning: none of this does but what runs in a
process of its own.
"""
