"""Ways in which the ranks of one job save a state that is equal on all of them.

One object for each way and rank. Call order, on every rank alike, from its main thread: construct ->
`save` and the handle's `barrier`, `wait_durable`, then `tidy`, any number of times -> `load_into` -> `close`.

Source: DeepFreeze V-B compares VELOC-Single, VELOC-Sharded and VELOC-Opt, which `single`,
`sharded_blocking` and `ckpt_core` stand for; `replicated` is the same without its idea, the slices.
"""
