from pathlib import Path

import pytest

from orchestrator.node.job.part import oom_evidence
from orchestrator.node.job.part.oom_evidence import Evidence, is_full, last_words
from orchestrator.node.machine import nvidia
from tests.node.job.kernel_log import refuse_to_alarm, say


def test_evidence_counts_oom_kills_of_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom_evidence, "CGROUPS", str(tmp_path))
    file = tmp_path / "memory.events"
    text = "low 0\nhigh 0\nmax 31\noom 3\noom_kill {}\noom_group_kill 0\n"
    file.write_text(text.format(3))
    before = Evidence()
    assert before.now()["oom_kills"] == 0
    file.write_text(text.format(5))
    assert before.now()["oom_kills"] == (2 if str(file) in before.before else 0)
    assert Evidence().now()["oom_kills"] == 0


XID = (
    "NVRM: Xid (PCI:0000:00:06): {}, pid={}, name=rank0, channel 0x0000000a, intr 00000000. MMU"
    " Fault: ENGINE GRAPHICS GPC1 GPCCLIENT_T1_4 faulted @ 0x1234_56789000."
)


def test_evidence_finds_driver_messages_of_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_alarm()
    # This path stands in for a driver's device.
    monkeypatch.setattr(oom_evidence, "NVIDIA", "/dev/null")
    # No machine assigns these PIDs.
    mine, other = 4_000_001, 4_000_002

    def reported(pid: int) -> set[int]:
        found = nvidia.find_xids("\n".join(evidence.of_driver(pid)))
        return {xid.xid for xid in found} & {13, 31, 43, 79}

    say(XID.format(43, mine))
    evidence = Evidence()
    # The report is older than the Evidence object.
    assert reported(mine) == set()
    say(XID.format(31, mine))
    say(XID.format(13, other))
    say("NVRM: Xid (PCI:0000:00:07): 79, pid='<unknown>', name=<unknown>, GPU has fallen off")
    assert reported(mine) == {31, 79}
    # Earlier messages of the log are kept.
    assert reported(other) == {13, 79}


def test_evidence_without_driver_reads_journal_or_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert Evidence().of_driver(1) == ()
    monkeypatch.setattr(oom_evidence, "NVIDIA", "/dev/null")
    monkeypatch.setattr(oom_evidence, "KERNEL_LOG", str(tmp_path / "kmsg"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Evidence().of_driver(1) == ()
    journal = tmp_path / "journalctl"
    line = XID.format(79, 1)
    journal.write_text(f'#!/bin/sh\ncase "$*" in *--since=@[0-9]*) echo "{line}";; esac')
    journal.chmod(0o755)
    evidence = Evidence()
    assert evidence.of_driver(1) == (line,)
    journal.unlink()
    # Eight ranks that fail together read the log once.
    assert evidence.of_driver(1) == (line,)


def test_is_full_of_directory(tmp_path: Path) -> None:
    assert not is_full(str(tmp_path))
    assert not is_full(str(tmp_path / "missing"))
    assert not is_full("/proc"), "of no size at all"


def test_last_words_keep_message_before_crash_dump() -> None:
    """The stacks of a hundred threads may not hide what the library said before it gave up."""
    dump = "Fatal Python error: Aborted\n" + "  File x\n" * 5000
    said = last_words(("noise\n" * 5000 + "what(): it broke\n" + dump).encode())
    assert "what(): it broke\nFatal Python error: Aborted\n  File x\n" in said
    assert len(said) == 8000
    assert last_words(b"\xff" + b"x" * 9000) == "x" * 4000
