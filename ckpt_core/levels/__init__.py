"""Further roots of a run: where committed steps are taken to behind training, and brought back from.

    Level(url, every=, keep_last=, ...)      what a user says (`ckpt_core.options`)
    open_far(url)                            the door to one level: a directory, or an object store
    agent                                    takes committed steps on: copy, verify, publish, retire
    mailbox                                  what the Checkpointer and the agent tell one another
    can_lose(root, plan, seen)               what may be lost without losing a step
    Levels                                   what a process that trains has of it
    PeerServer(folder, keys, address)        this node, as a level of others
    errands                                  what needs a connection, done by a process of its own
    BringsBack(urls, store, info, ...)       what a restore asks: which steps there are, and to bring one

Idea: a level is a root, and every root has the same format. The engine commits to the first one and never
hears of the others; an agent, one for each root, takes what is committed on, and outlives the trainer. A
restore takes the newest step that is whole anywhere: it brings it to the first root, and reads it there.

Source: DeepFreeze and VeloC (levels, flushed behind the application), Gemini (SOSP '23, memory first).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckpt_core.levels.far.door import Away, Conflict, Copy, Far, Word
from ckpt_core.levels.far.opening import check_extra, is_shown_root, open_far
from ckpt_core.levels.mailbox import (
    LEVELS,
    LevelStatus,
    Plan,
    Status,
    read_plan,
    read_status,
    write_plan,
    write_status,
)
from ckpt_core.levels.tokens import TOKEN_VARIABLE, read_keys
from ckpt_core.levels.wants import meets, wanted

if TYPE_CHECKING:
    from ckpt_core.levels.agent.copying import Sent
    from ckpt_core.levels.bring.bringing import BringsBack
    from ckpt_core.levels.bring.named_bringing import bring_directory
    from ckpt_core.levels.by_hand.agent import due_steps, serve_agent, settle_plan
    from ckpt_core.levels.by_hand.pulling import Pulled, pull
    from ckpt_core.levels.by_hand.pushing import Pushed, push
    from ckpt_core.levels.by_hand.scrubbing import Scrubbed, places_of, scrub
    from ckpt_core.levels.far.reading import Look, look_at
    from ckpt_core.levels.far.trial import upload_speed
    from ckpt_core.levels.losses import CanLose, ask, can_lose, known
    from ckpt_core.levels.parity.holds import held_steps
    from ckpt_core.levels.parity.trial import parity_speed, silent_nodes
    from ckpt_core.levels.serving.binding import ALL, Address, parse_address
    from ckpt_core.levels.serving.server import PeerServer
    from ckpt_core.levels.trainer.first_root import keep_agents_off
    from ckpt_core.levels.trainer.levels import Levels

# Only whoever reads or sends a level needs these, and only who saves what sees torch.
_LAZY = {
    "ALL": "ckpt_core.levels.serving.binding",
    "Address": "ckpt_core.levels.serving.binding",
    "BringsBack": "ckpt_core.levels.bring.bringing",
    "CanLose": "ckpt_core.levels.losses",
    "Levels": "ckpt_core.levels.trainer.levels",
    "Look": "ckpt_core.levels.far.reading",
    "PeerServer": "ckpt_core.levels.serving.server",
    "Pulled": "ckpt_core.levels.by_hand.pulling",
    "Pushed": "ckpt_core.levels.by_hand.pushing",
    "Scrubbed": "ckpt_core.levels.by_hand.scrubbing",
    "Sent": "ckpt_core.levels.agent.copying",
    "ask": "ckpt_core.levels.losses",
    "bring_directory": "ckpt_core.levels.bring.named_bringing",
    "can_lose": "ckpt_core.levels.losses",
    "due_steps": "ckpt_core.levels.by_hand.agent",
    "held_steps": "ckpt_core.levels.parity.holds",
    "keep_agents_off": "ckpt_core.levels.trainer.first_root",
    "known": "ckpt_core.levels.losses",
    "look_at": "ckpt_core.levels.far.reading",
    "parity_speed": "ckpt_core.levels.parity.trial",
    "parse_address": "ckpt_core.levels.serving.binding",
    "pull": "ckpt_core.levels.by_hand.pulling",
    "push": "ckpt_core.levels.by_hand.pushing",
    "places_of": "ckpt_core.levels.by_hand.scrubbing",
    "scrub": "ckpt_core.levels.by_hand.scrubbing",
    "serve_agent": "ckpt_core.levels.by_hand.agent",
    "settle_plan": "ckpt_core.levels.by_hand.agent",
    "silent_nodes": "ckpt_core.levels.parity.trial",
    "upload_speed": "ckpt_core.levels.far.trial",
}

__all__ = [
    "ALL",
    "LEVELS",
    "TOKEN_VARIABLE",
    "Address",
    "Away",
    "BringsBack",
    "CanLose",
    "Conflict",
    "Copy",
    "Far",
    "LevelStatus",
    "Levels",
    "Look",
    "PeerServer",
    "Plan",
    "Pulled",
    "Pushed",
    "Scrubbed",
    "Sent",
    "Status",
    "Word",
    "ask",
    "bring_directory",
    "can_lose",
    "check_extra",
    "due_steps",
    "held_steps",
    "is_shown_root",
    "keep_agents_off",
    "known",
    "look_at",
    "meets",
    "open_far",
    "parity_speed",
    "parse_address",
    "places_of",
    "pull",
    "push",
    "read_keys",
    "read_plan",
    "read_status",
    "scrub",
    "serve_agent",
    "settle_plan",
    "silent_nodes",
    "upload_speed",
    "wanted",
    "write_plan",
    "write_status",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
