"""What another node's ranks saved comes whole, where it may, and over nothing that is our own."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.transfer import take
from orchestrator.node.transfer.directory import Directory
from orchestrator.node.transfer.give import Giver
from orchestrator.node.transfer.receive import Incoming
from orchestrator.node.transfer.saved import place
from orchestrator.node.transfer.saved.copies import Copies
from orchestrator.node.transfer.saved.listing import Written
from orchestrator.node.transfer.saved.place import CopiesTarget
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import DIRECTORY, FILE, LINK, Entry
from orchestrator.protocol.requests.transfer import (
    SAVED,
    GivingNode,
    Overwritten,
    Place,
    SavedPlace,
    Take,
)
from tests.node.start.test_next_spec import FIRST

TOKEN = secrets.token_hex(32)
TIME = 1_700_000_000_123_456_789  # before any file that a test writes
CONTENTS = {"runs/s-1/model.pt": b"one" * 1000, "runs/s-1/empty.json": b"", "ckpt.pt": b"last"}
Ask = Any


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    run = RunDir("e-abc", 1)
    run.create()
    (tmp_path / "work").mkdir()
    run.write_spec(FIRST.replace(env={}, workdir=str(tmp_path / "work")))
    os.utime(run.spec, ns=(TIME, TIME))
    return tmp_path / "work"


@pytest.fixture
def ask(tmp_path: Path, work: Path) -> Iterator[Ask]:
    """Return what takes the named contents and more, and returns why that failed."""
    there = tmp_path / "there"
    for path, content in CONTENTS.items():
        (there / path).parent.mkdir(parents=True, exist_ok=True)
        (there / path).write_bytes(content)
    givers: list[Giver] = []

    def go(*paths: str, changed: int = TIME, content: bytes | None = None, **more: Any) -> str:
        for path in paths:
            (there / path).write_bytes(content or CONTENTS[path])
        wanted = [file(path, changed, content) for path in paths]
        entries = tuple(sorted([*wanted, *others(more.pop("links", {}), more.pop("times", {}))]))
        listing = manifest.packed(entries)
        source = Incoming(Directory(there, entries, 0o022), listing, all_here=True)
        givers.append(Giver(TOKEN, source, 60))
        node = GivingNode(addresses=("127.0.0.1",), port=givers[-1].port, token=TOKEN)
        into, digest = where(**more), manifest.digest_of(listing)
        request = Take(manifest=digest, size=len(listing), into=into, giver=node, seconds=60)

        def begin(listing: bytes) -> Incoming:
            return Incoming(CopiesTarget(into, manifest.unpacked(listing), 0o022), listing)

        taking = take.take(request, begin)
        assert taking.over.wait(10)
        return taking.problem

    yield go
    for giver in givers:
        giver.close()


def file(path: str, changed: int = TIME, content: bytes | None = None) -> Entry:
    content = CONTENTS.get(path, b"") if content is None else content
    total = hashlib.sha256(content).hexdigest().encode()
    return Entry(os.fsencode(path), FILE, 0o640, len(content), total, changed)


def others(links: Mapping[str, str], times: Mapping[str, int]) -> Iterator[Entry]:
    for path, target in links.items():
        yield Entry(os.fsencode(path), LINK, 0, 0, os.fsencode(target))
    for path, time in times.items():
        yield Entry(os.fsencode(path), DIRECTORY, 0, 0, b"", time)


def where(**more: Any) -> Place:
    saved = SavedPlace(**{"root": "work", "by": "node a", **more})
    return Place(kind=SAVED, job="e-abc", node=1, saved=saved)


def drop(*paths: str) -> None:
    CopiesTarget(where(), (), 0o022).drop(paths)


def test_what_comes_is_as_it_was_there_and_known_as_a_copy(work: Path, ask: Ask) -> None:
    times = {"runs": TIME - 7, "runs/s-1": TIME - 5}
    assert not ask(*CONTENTS, links={"runs/last": "s-1"}, times=times)
    for path, content in CONTENTS.items():
        status = (work / path).stat()
        assert (work / path).read_bytes() == content
        assert (status.st_mtime_ns, status.st_mode & 0o777) == (TIME, 0o640)
    assert {name: (work / name).stat().st_mtime_ns for name in times} == times
    assert str((work / "runs/last").readlink()) == "s-1"
    known = Copies(str(work)).known
    assert set(known) == {*CONTENTS, "runs/last"} and {copy.by for copy in known.values()} == {
        "node a"
    }
    drop("runs/s-1/model.pt", "runs/s-1/empty.json", "runs/last", "absent")
    assert [path.name for path in sorted(work.iterdir()) if path.name[0] != "."] == ["ckpt.pt"]


@pytest.mark.parametrize(
    "entries",
    [
        [file("../out.pt")],
        [file("/out.pt")],
        [file("a/../../out.pt")],
        [*others({"../out": "x"}, {})],
        [*others({"last": "/etc"}, {})],
        [*others({"last": "../../etc"}, {})],
        [*others({"runs/last": "../.."}, {})],
        [*others({}, {"..": 1})],
    ],
)
def test_nothing_outside_is_touched(work: Path, entries: list[Entry]) -> None:
    with pytest.raises(ValueError, match="leads out"):
        CopiesTarget(where(), manifest.unpacked(manifest.packed(entries)), 0o022)


@pytest.mark.parametrize(
    "more", [{"root": "elsewhere"}, {"outputs": ("../x",), "root": "given/../x"}]
)
def test_there_is_no_other_directory(work: Path, more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"leads out|no directory"):
        CopiesTarget(where(**more), (), 0o022)


def test_nothing_is_written_through_a_link(tmp_path: Path, work: Path, ask: Ask) -> None:
    (tmp_path / "away/s-1").mkdir(parents=True)
    (work / "runs").symlink_to(tmp_path / "away")
    assert ask("ckpt.pt", "runs/s-1/model.pt") == "runs/s-1/model.pt: not a directory"
    assert ask(links={"runs/last": "s-1"}) and not (work / "ckpt.pt").exists()
    assert [path.name for path in (tmp_path / "away").rglob("*")] == ["s-1"]
    drop("runs/s-1")
    assert not ask(times={"runs": 1})
    assert (tmp_path / "away").stat().st_mtime_ns > 1


def test_our_own_stays_with_all_that_would_come_with_it(work: Path, ask: Ask) -> None:
    (work / "ckpt.pt").write_bytes(b"mine")
    assert ask(*CONTENTS) == "ckpt.pt is there, written by this node's own ranks"
    assert ask(links={"ckpt.pt": "runs"})
    drop("ckpt.pt")
    assert [path.name for path in work.iterdir() if path.name[0] != "."] == ["ckpt.pt"]
    assert (work / "ckpt.pt").read_bytes() == b"mine"
    (work / "ckpt.pt").write_bytes(CONTENTS["ckpt.pt"])
    assert not ask("ckpt.pt"), "it is what would come"
    assert not Copies(str(work)).known, "and stays ours"


def test_a_copy_that_was_changed_is_our_own(work: Path, ask: Ask) -> None:
    assert not ask("ckpt.pt")
    (work / "ckpt.pt").write_bytes(b"MORE")
    drop("ckpt.pt")
    assert ask("ckpt.pt", changed=TIME + 5) and (work / "ckpt.pt").read_bytes() == b"MORE"


@pytest.mark.parametrize("older", [True, False])
def test_what_makes_room_is_kept(work: Path, ask: Ask, *, older: bool) -> None:
    for number, content in enumerate((b"first", b"second"), 1):
        (work / "ckpt.pt").write_bytes(content)
        if not older:  # but from before the job
            os.utime(work / "ckpt.pt", (1, 1))
        assert not ask("ckpt.pt", older=("ckpt.pt",) if older else ())
        assert (work / f".ckpt.pt.{number}.before").read_bytes() == content
    assert (work / "ckpt.pt").read_bytes() == b"last"


def test_what_is_the_same_already_is_a_copy_from_then_on(work: Path, ask: Ask) -> None:
    """Else what this node writes over it later would not be known as what comes after it."""
    (work / "ckpt.pt").write_bytes(CONTENTS["ckpt.pt"])
    before = (work / "ckpt.pt").stat()
    assert not ask("ckpt.pt", older=("ckpt.pt",))
    assert (work / "ckpt.pt").stat().st_mtime_ns == before.st_mtime_ns
    assert not [*work.glob(".*.before")]
    written = Written(str(work), 0.0, "e-abc", ())
    assert [file.by for file in written.described("ckpt.pt")] == ["node a"]
    (work / "ckpt.pt").write_bytes(b"the next")
    (file,) = written.described("ckpt.pt")
    assert (file.by, file.over) == ("", Overwritten(by="node a", changed=TIME))


def test_an_end_in_the_middle_leaves_no_copy_that_is_taken_for_our_own(
    work: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ask("ckpt.pt", changed=TIME + 10**12)
    with monkeypatch.context() as patch:
        patch.setattr(CopiesTarget, "room_for", None)
        assert ask("ckpt.pt", changed=TIME + 10**13, content=b"more"), "it ended in the middle"
    assert not (work / place.WAITING).exists() and (work / "ckpt.pt").read_bytes() == b"last"
    assert not ask("ckpt.pt", changed=TIME + 10**13, content=b"more")
    assert (work / "ckpt.pt").read_bytes() == b"more"
    assert sorted(path.name[:6] for path in work.iterdir()) == [".orche", "ckpt.p"]


def test_older_copies_make_room_on_a_full_disk(
    work: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ask("ckpt.pt")

    def disk(_: CopiesTarget) -> SimpleNamespace:
        free = place.MARGIN_BYTES + 4 * (not (work / "ckpt.pt").exists())
        return SimpleNamespace(f_bavail=free, f_frsize=1, f_files=100, f_favail=names)

    names = 100
    monkeypatch.setattr(CopiesTarget, "disk", disk)
    assert not ask("ckpt.pt", changed=TIME + 5, content=b"more")
    assert (work / "ckpt.pt").read_bytes() == b"more"
    reason = "No space left on device: 1.05 MB free, for 3 kB and a list"
    assert reason in ask("runs/s-1/model.pt")
    assert (work / "ckpt.pt").exists() and not (work / "runs").exists()
    names = 2
    assert "2 inodes free" in ask("ckpt.pt", changed=TIME + 9, content=b"most")
