"""What `ckpt-core` has of `ckpt_deepspeed`, found by entry points: the suite `deepspeed` of its `bench`,
what its `doctor` checks, and what its `import` reads.

A package beside the integration, since importing that imports DeepSpeed: none of this does but what runs in a
process of its own.
"""
