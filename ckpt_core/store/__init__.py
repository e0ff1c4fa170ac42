"""The directory of committed steps: who may write, what exists, what goes.

    store.open()                       lock the root, finish what a crash left            (once)
    attempt = store.begin(step)        an empty directory under .inflight                 (per save)
    store.check_space(*sizes); store.take_slot(attempt, name, nbytes)
        ... persist/ writes and syncs the shard files and both manifests there ...
    store.publish(attempt)             one rename makes the step exist      (or: abandon)
    store.retire()                     retention; shard files of retired steps become slots
    store.close()

The other ranks of a job that share the root use `GuestStore`: they write their own files into attempts, and
leave every change of names to the rank that leads.

Readers need none of it: `committed_steps`, `step_path`, `resolve` and `writer_of` neither lock nor write.
A further level that is a directory has its steps changed by `place`, `take_away`, `bring_back` and
`give_up_replaced` alone, each time under the lock for a moment.

Idea: a directory named `step-*` exists if and only if it is complete, so names are the only index
and there is no `latest` file. Every change of names is ordered: bytes are durable before their name
is, and a step has lost its name durably before any of its bytes is overwritten or deleted.

Source: PCcheck (ASPLOS '25) sections 4.1 and 4.2 (slots; the newest checkpoint is never overwritten
and never goes back); LightCheck (two mappings).
"""

from ckpt_core.store.by_hand import opened_by_hand, store_by_hand
from ckpt_core.store.directories import file_path, newest_unix_s
from ckpt_core.store.guest import GuestStore
from ckpt_core.store.kept import KeptSteps
from ckpt_core.store.leaving import take_away
from ckpt_core.store.lock import RootLock, writer_of
from ckpt_core.store.names import (
    CORRUPT,
    INFLIGHT,
    LEVEL_WORD,
    SLOTS,
    UNPINNED,
    check_layout,
    committed_steps,
    entries,
    home_of,
    is_committed,
    is_real_dir,
    listing,
    resolve,
    step_path,
)
from ckpt_core.store.pins import (
    check_pins,
    forget_marks,
    pinned_steps,
    pins_told,
    unpinned_marks,
)
from ckpt_core.store.publish import Attempt, place, sync_names
from ckpt_core.store.repair import bring_back, give_up_replaced
from ckpt_core.store.retention import choose_retired
from ckpt_core.store.roots import is_misspelt, roots_in
from ckpt_core.store.store import StepStore
from ckpt_core.store.trees import (
    device_of,
    ensure_dir,
    ensure_root,
    find_root,
    mount_of,
    remove_tree,
)

__all__ = [
    "CORRUPT",
    "INFLIGHT",
    "LEVEL_WORD",
    "SLOTS",
    "UNPINNED",
    "Attempt",
    "GuestStore",
    "KeptSteps",
    "RootLock",
    "StepStore",
    "bring_back",
    "check_layout",
    "check_pins",
    "choose_retired",
    "committed_steps",
    "device_of",
    "ensure_dir",
    "ensure_root",
    "entries",
    "file_path",
    "find_root",
    "forget_marks",
    "give_up_replaced",
    "home_of",
    "is_committed",
    "is_misspelt",
    "is_real_dir",
    "listing",
    "mount_of",
    "newest_unix_s",
    "opened_by_hand",
    "pinned_steps",
    "pins_told",
    "place",
    "remove_tree",
    "resolve",
    "roots_in",
    "step_path",
    "store_by_hand",
    "sync_names",
    "take_away",
    "unpinned_marks",
    "writer_of",
]
