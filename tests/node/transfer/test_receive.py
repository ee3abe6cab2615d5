"""Files arrive at a node whole or not at all, with any input from another machine."""

import zlib
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.folder import Folder, PartialFile
from orchestrator.node.server.session import Refusal, ServerSession
from orchestrator.node.transfer.receive import TargetDirectory
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import FILE, ManifestEntry
from orchestrator.protocol.requests.transfer import Contents, FilePart, Offer, RemoteDir

CONTENTS = {b"a": b"one", b"b/c": b"", b"d\xff": b"three"}
SECOND = 1_000_000_000


def entries() -> tuple[ManifestEntry, ...]:
    return tuple(
        ManifestEntry(path, FILE, 0o644, len(text), b"", 7 * SECOND)
        for path, text in sorted(CONTENTS.items())
    )


def incoming(root: Path, *, private: bool = False) -> TargetDirectory:
    return TargetDirectory(Folder(root, private=private, umask=0o022), entries())


def put(place: TargetDirectory, number: int, offset: int, data: bytes) -> None:
    place.put(FilePart(number, offset, len(data)), memoryview(data))


def test_file_appears_once_all_pieces_came(tmp_path: Path) -> None:
    place = incoming(tmp_path / "there")
    assert place.compare().numbers == (0, 1, 2)
    put(place, 0, 0, b"on")
    assert not (tmp_path / "there/a").exists()
    put(place, 0, 2, b"e")
    assert (tmp_path / "there/a").read_bytes() == b"one"
    put(place, 2, 0, b"three")
    put(place, 1, 0, b"")
    assert place.missing == set()
    assert incoming(tmp_path / "there").compare().numbers == ()
    assert not list((tmp_path / "there").glob(".orchestrator-*"))


@pytest.mark.parametrize(
    ("number", "offset", "data"),
    [(7, 0, b"x"), (0, 1, b"n"), (0, 0, b"more than it has"), (-1, 0, b"x")],
    ids=["no such file", "from the middle", "too much", "no number"],
)
def test_pieces_in_disorder_are_refused(
    tmp_path: Path, number: int, offset: int, data: bytes
) -> None:
    place = incoming(tmp_path)
    place.compare()
    with pytest.raises(ValueError, match=r"was not lacking|disorder"):
        put(place, number, offset, data)
    place.abandon()
    assert not [path for path in tmp_path.rglob("[a-z]") if path.is_file()]


@pytest.mark.parametrize("private", [True, False])
def test_modes_follow_private_flag(tmp_path: Path, private: bool) -> None:
    place = incoming(tmp_path / "there", private=private)
    place.compare()
    put(place, 1, 0, b"")
    there = tmp_path / "there"
    modes = [(path.stat().st_mode & 0o777) for path in (there, there / "b", there / "b/c")]
    assert modes == ([0o700, 0o700, 0o600] if private else [0o755, 0o755, 0o644])


def test_write_error_names_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: PartialFile, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PartialFile, "put", full)
    session = ServerSession(0o022)

    def asked(request: Any, data: bytes) -> Any:
        session.piece += data
        return session.answer(request)

    packed = zlib.compress(manifest.pack_entries(entries()))
    asked(Offer(into=RemoteDir(directory=str(tmp_path))), packed)
    data = FilePart(0, 0, 3).packed() + b"one"
    written = asked(Contents(size=len(data)), zlib.compress(data))
    assert written.failed == {0: "No space left on device"}
    with pytest.raises(Refusal, match="not an absolute path"):
        asked(Offer(into=RemoteDir(directory="relative")), packed)
    with pytest.raises(Refusal, match="damaged"):
        asked(Contents(size=3), b"xxx")


def test_dry_run_compares_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "b.py").write_text("b")
    changed = (tmp_path / "a.py").stat().st_mtime_ns
    offered = (
        ManifestEntry(b"a.py", FILE, 0o600, 1, b"", changed),
        ManifestEntry(b"b.py", FILE, 0o600, 1, b"", 7),
        ManifestEntry(b"c/c.py", FILE, 0o600, 1, b"", 7),
    )
    lacking = TargetDirectory(Folder(tmp_path, private=False), offered).compare(dry_run=True)
    assert lacking.numbers == (1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.py", "b.py"]
    assert (tmp_path / "b.py").stat().st_mtime_ns != 7
