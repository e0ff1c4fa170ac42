"""What a node keeps of another one is read where it lies, and repaired from that one's root."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckpt_core.errors import NotCommitted
from ckpt_core.layout import RUN_NAME
from ckpt_core.levels import (
    Address,
    Away,
    PeerServer,
    Plan,
    Scrubbed,
    open_far,
    places_of,
    read_keys,
    scrub,
    write_plan,
)
from ckpt_core.levels.mailbox import Node, Serve
from ckpt_core.levels.parity.objects import root_key
from ckpt_core.levels.trainer import ring
from ckpt_core.options import Level
from ckpt_core.restore import verify
from ckpt_core.store import committed_steps, step_path
from tests.levels.making import make_store, save
from tests.levels.parity.clusters import contents
from tests.levels.sending import sent_to
from tests.levels.servers.faulty import in_environment
from tests.levels.servers.moto import needs_store
from tests.levels.servers.peer import TOKEN
from tests.levels.test_scrubbing import HARMS, Harm, bad_manifest, flipped, scrubbed
from tests.restore.harness import flip

pytestmark = needs_store

RUN = "ab" * 8
STEPS = (10, 20)


@dataclass
class Ring:
    """Two nodes; the second one keeps the first one's copies, and the other way round."""

    place: Path
    nodes: tuple[Node, ...] = ()
    servers: list[PeerServer] = field(default_factory=list)

    def root(self, number: int) -> Path:
        return self.place / f"root-{number}"

    @property
    def kept(self) -> Path:
        """The copy of the first node, where the second one has it."""
        return self.place / "dir-1" / RUN / "node-00000"

    def folder(self) -> Path:
        """Of its newest step."""
        (folder,) = [path for path in step_path(self.kept, 20).iterdir() if path.is_dir()]
        return folder


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Ring]:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    found = Ring(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(in_environment({"CKPT_PEER_TOKEN_FILE": str(token)}))
        for number in range(2):
            with closing(make_store(found.root(number))) as store:
                for step in STEPS:
                    # The two have a save in common: each holds its own rank of it.
                    attempt = f"{step:012d}-0123abcd"
                    save(store, step, mark=number, ranks=[number], world=2, attempt=attempt)
            address = Address("127.0.0.1", 0)
            server = PeerServer(tmp_path / f"dir-{number}", read_keys(token), address)
            found.servers.append(stack.enter_context(server))
            server.show(root_key(RUN, f"node-{number:05d}"), found.root(number))
        members = [ring.Member(n, str(one.address)) for n, one in enumerate(found.servers)]
        found.nodes = ring.nodes(members, RUN)
        for number, node in enumerate(found.nodes):
            serve = Serve(str(tmp_path / f"dir-{number}"), node.address, str(token))
            level = Level(node.copy)
            plan = Plan(RUN, 1, "t", (level,), serve=serve, nodes=found.nodes, part=node.part)
            write_plan(found.root(number), plan)
            with open_far(node.copy) as far:
                for step in STEPS:
                    assert sent_to(far, found.root(number), step, own=True)
        yield found


def test_what_is_sound_is_read_where_it_lies_and_the_other_node_is_not_asked(nodes: Ring) -> None:
    root, copy, kept = places_of(nodes.root(1))
    assert (root, copy, kept) == (
        str(nodes.root(1)),
        nodes.nodes[1].copy,
        f"kept://{nodes.root(1)}",
    )
    for server in nodes.servers:
        server.close()
    found = scrubbed(root, kept)
    assert [(one.url, one.copy.step, one.ok) for one in found] == [
        (str(place), step, True) for place in (nodes.root(1), nodes.kept) for step in STEPS
    ]
    assert all(one.checked_bytes > 5 * 4096 and not one.damage for one in found)


@pytest.mark.parametrize("harm", [harm for harm in HARMS if harm is not bad_manifest])
def test_what_is_damaged_is_put_again_from_the_root_of_its_owner(nodes: Ring, harm: Harm) -> None:
    places, before = places_of(nodes.root(1)), contents(nodes.folder())
    harm(nodes.folder())
    looked = scrubbed(*places, dry_run=True)
    assert [one.url for one in looked if not one.ok] == [str(nodes.kept)]
    (one,) = [one for one in scrubbed(*places) if one.damage]
    assert one.ok and one.source.startswith("node-00000 at 127.0.0.1:"), one
    assert contents(nodes.folder()) == before
    assert not any(one.damage for one in scrubbed(*places))


def test_an_own_step_is_not_repaired_from_what_is_kept_of_another_node(nodes: Ring) -> None:
    root = step_path(nodes.root(1), 20)
    flip(root / "shard-00001-0.safetensors", 9000)
    found = scrubbed(str(nodes.root(1)), f"kept://{nodes.root(1)}")
    assert [one.left for one in found if not one.ok] == [
        "no other place that was named holds this save"
    ]
    assert all(one.ok for one in scrubbed(*places_of(nodes.root(1))))
    assert not any(one.damage for one in scrubbed(str(nodes.root(1))))


def test_an_owner_that_does_not_answer_is_said_and_what_is_here_stays(nodes: Ring) -> None:
    flipped(nodes.folder())
    damaged = contents(nodes.folder())
    nodes.servers[0].close()
    (left,) = [one for one in as_far_as_it_goes(nodes.root(1)) if not one.ok]
    assert "node-00000 at 127.0.0.1:" in left.left and "does not answer" in left.left
    assert contents(nodes.folder()) == damaged


def test_without_the_agent_that_serves_it_what_is_damaged_is_said_and_stays(nodes: Ring) -> None:
    flipped(nodes.folder())
    damaged = contents(nodes.folder())
    nodes.servers[1].close()
    (left,) = [one for one in as_far_as_it_goes(nodes.root(1)) if not one.ok]
    assert "cannot be reached" in left.left and contents(nodes.folder()) == damaged


def as_far_as_it_goes(root: Path) -> list[Scrubbed]:
    """What is read though a node does not answer."""
    found: list[Scrubbed] = []
    with suppress(Away):
        found.extend(scrub(places_of(root), progress=lambda *_: None))
    return found


def test_what_its_owner_has_retired_is_said_and_stays(nodes: Ring) -> None:
    flipped(nodes.folder())
    shutil.rmtree(step_path(nodes.root(0), 20))
    (left,) = [one for one in scrubbed(*places_of(nodes.root(1))) if not one.ok]
    assert left.left == "no other place that was named holds this save"


def test_a_manifest_that_cannot_be_read_is_said_and_one_that_was_taken_away_is_no_damage(
    nodes: Ring,
) -> None:
    (step_path(nodes.kept, 20) / "manifest.json").write_text("{}")
    with open_far(nodes.nodes[0].copy) as far:
        far.retire(["step-000000000010"])
    (step_path(nodes.kept, 30) / "0123abcd").mkdir(parents=True)  # on its way
    found = [one for one in scrubbed(*places_of(nodes.root(1))) if one.url == str(nodes.kept)]
    assert [(one.copy.step, one.ok) for one in found] == [(20, False)]
    assert found[0].damage == ("the manifest of step 20 cannot be read",)


def test_read_as_a_root_it_has_the_steps_that_are_whole_there(nodes: Ring) -> None:
    with open_far(nodes.nodes[0].copy) as far:
        far.write_word(RUN_NAME, b"{}", over=None)
        far.retire(["step-000000000010"])
    (step_path(nodes.kept, 30) / "0123abcd").mkdir(parents=True)  # on its way
    assert committed_steps(nodes.kept) == (20,)
    report = verify(nodes.kept)
    assert [step.step for step in report.steps] == [20]
    assert report.checked_bytes == 5 * 4096 and not report.bad_chunks
    for step in (10, 30):
        with pytest.raises(NotCommitted, match=f"step {step} is not committed .* nearest: 20"):
            verify(step_path(nodes.kept, step))


@pytest.mark.parametrize(
    "harm", ["no manifest", "no JSON", "a mark that is cut", "a mark of nothing", "a directory"]
)
def test_read_as_a_root_it_has_damage_for_damage(nodes: Ring, harm: str) -> None:
    with open_far(nodes.nodes[0].copy) as far:
        far.write_word(RUN_NAME, b"{}", over=None)
    place = step_path(nodes.kept, 20)
    manifest = place / "manifest.json"
    manifest.unlink()
    if harm == "no manifest":
        (place / "rank-00000.json").write_text("{}")
    elif harm == "a directory":
        manifest.mkdir()
    else:
        texts = {"no JSON": "{", "a mark that is cut": '{"retired": ["012'}
        manifest.write_text(texts.get(harm, '{"retired": 5}'))
    assert committed_steps(nodes.kept) == STEPS
    unread = [step.step for step in verify(nodes.kept).steps if not step.checked_bytes]
    assert unread == [20]
