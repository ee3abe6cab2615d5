"""The logs of supervisors and servers."""

import os
import stat
import time
from pathlib import Path

from orchestrator.node.job.run_directory import SystemLog, lines_between


def test_line_has_time_pid_and_no_secret(tmp_path: Path) -> None:
    path, before = str(tmp_path / "supervisor.log"), time.time()
    umask = os.umask(0)
    try:
        one, other = SystemLog(path, secrets=["t0ken-value"]), SystemLog(path)
    finally:
        os.umask(umask)
    one.line("event %s why=%s", "ending", "t0ken-value")
    other.line("%d processes", 2)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    text = Path(path).read_text(encoding="utf-8")
    assert [line.partition(" [")[2] for line in text.splitlines()] == [
        f"{os.getpid()}] event ending why=(redacted)",
        f"{os.getpid()}] 2 processes",
    ]
    assert lines_between([path], before, time.time()) == text
    assert lines_between([path, "/nowhere"], before - 100, before - 50) == ""
    assert lines_between([path], before + 50, before + 100) == ""
