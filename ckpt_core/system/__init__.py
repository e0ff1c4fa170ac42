"""Doors to the operating system and to devices; a test can stand in for each.

    interrupts Ctrl-C, held back       machine       what it is, for those who read figures
    files      storage                 devices       tensors, streams and events of accelerators
    threads    threads, and waits      sigterm       the end that is asked for
    pages      memory for direct I/O   memory_limit  what the control groups leave
    plugins    what is installed with entry points for `ckpt-core`
    bell       a wait that a name in a directory ends
    collector  the garbage collector   streaming     copies past the caches
    kept_mappings                      files in memory that stay mapped
    calls      calls of Linux without a name in Python

Nothing is imported here: only `devices` needs torch.
"""
