"""What is said of places that ranks wrote to and that stay on their nodes."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.head.transfer.fetch.elsewhere import merged, sentences, staying
from orchestrator.protocol.requests.transfer import WrittenPlace
from orchestrator.records.outcome import Elsewhere


def place(path: str, **more: object) -> WrittenPlace:
    return WrittenPlace(path=path, files=2, size=1000).replace(**more)


def test_a_line_for_each_place() -> None:
    found = {
        "gpu1": [place("/scratch/run 1"), place("/p/data/x", through="data", more=True)],
        "gpu2": [place("/scratch/run 1")],
    }
    assert list(sentences(staying(found))) == [
        "ranks wrote to /p/data/x, where data leads, on gpu1 (at least 2 files, 1 kB), which stays"
        " there: orchestrator pull /p/data/x --node gpu1 fetches it",
        "ranks wrote to /scratch/run 1 on gpu1, gpu2 (4 files, 2 kB), which stays there:"
        " orchestrator pull '/scratch/run 1' fetches it",
    ]
    many = staying({"gpu1": [place(f"/x/{number:02d}") for number in range(20)]})
    *lines, last = sentences(many)
    assert len(lines) == 8 and last == "12 more places stay on nodes: `elsewhere` in job.json"
    both = {"gpu1": [place("/x"), place("/project/x", of_workdir=True)]}
    (line,) = sentences(staying(both), goes_on=True)
    assert line.endswith("or call orchestrator.distributed.copy_to_nodes('/x')")
    assert "which no other node has in the next attempt" in line


def test_what_is_no_loss(tmp_path: Path) -> None:
    """The same directory, seen here; what the user has given a place to stay."""
    status = os.lstat(tmp_path)
    here = place(str(tmp_path), inode=status.st_ino, changed=status.st_ctime_ns)
    other = here.replace(inode=status.st_ino + 1)
    kept = [place("/p/runs/x", through="runs"), place("/p/out", through="../out")]
    found = {"gpu1": [here, *kept], "gpu2": [other, place("/x")]}
    left = staying(found, ("runs/", "../out"))
    assert [(each.path, each.nodes) for each in left] == [
        *((str(tmp_path), ("gpu2",)), ("/x", ("gpu2",)))
    ]


def test_attempts_add_up() -> None:
    before = [Elsewhere("/a", ("gpu1",), 1, 10), Elsewhere("/b", ("gpu1",), 1, 10)]
    after = merged(before, [Elsewhere("/b", ("gpu2",), 2, 20), Elsewhere("/c", ("gpu2",), 3, 30)])
    assert after == [
        *(before[0], Elsewhere("/b", ("gpu1", "gpu2"), 2, 20), Elsewhere("/c", ("gpu2",), 3, 30))
    ]
