"""What `ckpt-core` has of `ckpt_lightning`, found by entry points: the suite `lightning` of its `bench`,
and what its `doctor` checks.

A package beside the integration, since importing that imports Lightning: none of this does but what runs in a
process of its own.
"""
