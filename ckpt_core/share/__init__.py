"""Who stores what: the part of each rank, its order in the file, and what ranks compare of one another.

sharing      which rank stores which bytes    arrangement    the order of parts in this rank's file
audit_plan   what is looked at, and when      audit          looks, and says what differs
reference    the plan as text that ranks compare    cuts    whether the parts of all make up the leaves
"""

from ckpt_core.share.arrangement import Arrangement, Placed, StillPart, Whole, arrange, items_of
from ckpt_core.share.audit import Audit, Auditor, Evidence
from ckpt_core.share.cuts import Cut, Cuts
from ckpt_core.share.reference import TextReference
from ckpt_core.share.sharing import Part, Scope, Share, Sharer, is_below

__all__ = [
    "Arrangement",
    "Audit",
    "Auditor",
    "Cut",
    "Cuts",
    "Evidence",
    "Part",
    "Placed",
    "Scope",
    "Share",
    "Sharer",
    "StillPart",
    "TextReference",
    "Whole",
    "arrange",
    "is_below",
    "items_of",
]
