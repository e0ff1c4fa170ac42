"""`python -m ckpt_core` is the `ckpt-core` command."""

from ckpt_core.cli import main

if __name__ == "__main__":
    main()
