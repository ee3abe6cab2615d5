"""Files for a job that has not started: the user's alone, gone if it never starts."""

import stat
import zlib
from pathlib import Path

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.session import ServerSession
from orchestrator.node.transfer import receive
from orchestrator.protocol import manifest
from orchestrator.protocol.manifest import FILE, ManifestEntry
from orchestrator.protocol.requests.transfer import (
    HANDED,
    Contents,
    FilePart,
    Lacking,
    Offer,
    RemoteDir,
)


def keep(run: RunDir, name: str, content: bytes) -> None:
    listing = manifest.pack_entries([ManifestEntry(name.encode(), FILE, 0o600, len(content), b"")])
    session = ServerSession(0o022)
    session.piece += zlib.compress(listing)
    session.answer(Offer(into=RemoteDir(kind=HANDED, job=run.job, part=run.part)))
    data = FilePart(0, 0, len(content)).packed() + content
    session.piece += zlib.compress(data)
    assert session.answer(Contents(size=len(data))) == Lacking(failed={})


def test_hand_over_moves_file_into_run(home: Path) -> None:
    run = RunDir("job", 0)
    keep(run, "call.pkl", b"onetwo")
    keep(RunDir("job", 1), "call.pkl", b"another node of the same home")
    run.create()
    receive.move_files(run)
    (file,) = Path(run.payload).iterdir()
    assert file.read_bytes() == b"onetwo"
    for path, mode in ((file, 0o600), (file.parent, 0o700), (Path(run.home), 0o700)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    receive.discard_files(RunDir("job", 1))
    assert [path.name for path in (home / "runs/job").iterdir()] == ["0"]


def test_hand_over_accepts_run_without_file(home: Path) -> None:
    run = RunDir("job", 0)
    run.create()
    receive.move_files(run)
    receive.discard_files(run)
    assert not list(Path(run.path).iterdir())
