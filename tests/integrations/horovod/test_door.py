"""What `ckpt_horovod` offers."""

from __future__ import annotations

import ckpt_horovod


def test_every_name_of_the_door_is_there_and_is_described() -> None:
    assert sorted(ckpt_horovod.__all__) == list(ckpt_horovod.__all__)
    for name in ckpt_horovod.__all__:
        assert getattr(ckpt_horovod, name).__doc__, name


def test_the_door_holds_what_users_need() -> None:
    assert {"DistributedOptimizer", "coordination"} <= set(ckpt_horovod.__all__)
