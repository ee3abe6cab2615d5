from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.node.job import oom_evidence
from orchestrator.node.job.oom_evidence import Evidence, is_full, last_words


def test_kills_of_a_control_group_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kernel's own format, of both versions; only what came since the job began counts."""
    monkeypatch.setattr(oom_evidence, "CGROUPS", str(tmp_path))
    new, old = tmp_path / "memory.events", tmp_path / "memory/memory.oom_control"
    old.parent.mkdir()
    for file, text in (
        (new, "low 0\nhigh 0\nmax 31\noom 3\noom_kill {}\noom_group_kill 0\n"),
        (old, "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    ):
        file.write_text(text.format(3))
        before = Evidence()
        assert before.now()["oom_kills"] == 0
        file.write_text(text.format(5))
        assert before.now()["oom_kills"] == (2 if str(file) in before.before else 0)
        assert Evidence().now()["oom_kills"] == 0
    assert {str(new), str(old)} & set(Evidence().before), "neither version is known here"


def test_a_full_place(tmp_path: Path) -> None:
    assert not is_full(str(tmp_path))
    assert not is_full(str(tmp_path / "missing"))
    assert not is_full("/proc"), "of no size at all"


def test_of_a_crash_the_words_before_and_the_first_frames() -> None:
    """The stacks of a hundred threads may not hide what the library said before it gave up."""
    dump = "Fatal Python error: Aborted\n" + "  File x\n" * 5000
    said = last_words(("noise\n" * 5000 + "what(): it broke\n" + dump).encode())
    assert "what(): it broke\nFatal Python error: Aborted\n  File x\n" in said
    assert len(said) == 8000
    assert last_words(b"\xff" + b"x" * 9000) == "x" * 4000
