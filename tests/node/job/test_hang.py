"""Ranks of a real job are asked where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from orchestrator.node.job import hang
from tests.node.running import Job, script, wait_until

WAITS = """
import os, sys
def waits():
    open("never").read()
print("ready")
if os.environ["RANK"] == "0":
    waits()
os.execlp("sh", "sh", "-c", "echo a shell; read line < never")
"""


def test_who_cannot_answer_is_not_harmed(new_job: Callable[..., Job], tmp_path: Path) -> None:
    """The signal that asks a Python for its stacks would kill any other program."""
    os.mkfifo(tmp_path / "never")
    job = new_job()
    job.start(job.spec(script(tmp_path, WAITS), nproc=2, workdir=tmp_path))
    wait_until(lambda: job.said("ready", "0") and job.said("a shell", "1"))
    answers = {}

    def asked() -> bool:
        answers.update(hang.collect(job.run))
        return "in waits" in answers[0].stacks

    wait_until(asked)
    assert answers[1].stacks == ""
    assert job.ended() == {}
    job.end("enough", 0.5)
    job.wait()
    assert job.ended() == {0: -15, 1: -15}
