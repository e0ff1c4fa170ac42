"""What `ckpt-core` has of `ckpt_horovod`, found by entry points: the suite `horovod` of its `bench`,
and what its `doctor` checks.

A package beside the integration, since importing that imports Horovod: none of this does but what runs in a
process of its own.
"""
