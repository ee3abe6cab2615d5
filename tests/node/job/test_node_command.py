"""The prolog and the epilog of a node, around a real torchrun's stand-in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.node.running import Job, alive, script, wait_until

NewJob = Callable[..., Job]
RANK = "print('a rank')"
WAITS = "import time; print('a rank', flush=True); time.sleep(1000)"
# What it starts has neither its session nor its output.
DAEMON = "setsid sleep 1000 >/dev/null 2>&1 & echo daemon $!"


def around(job: Job, tmp_path: Path, program: str, **more: Any) -> dict[str, Any]:
    return {**job.spec(script(tmp_path, program), workdir=tmp_path), **more}


def daemon(job: Job) -> int:
    return int(job.output["-"].partition("daemon ")[2].split()[0])


def test_they_come_before_the_first_rank_and_after_the_last(
    new_job: NewJob, tmp_path: Path
) -> None:
    """With the environment of the ranks, in their directory, without input."""
    job = new_job()
    prolog = "cat; echo before $NODE_RANK in $PWD; echo ready > state"
    spec = around(job, tmp_path, "print(open('state').read())", prolog=prolog)
    ended = job.start({**spec, "epilog": "cat state; rm state; echo after"}).wait()
    assert (ended["agent"], ended["why"]) == (0, "")
    log = Path(job.run.log).read_text()
    assert log == f"before 0 in {tmp_path}\nready\n\nready\nafter\n"
    assert job.output["-"] == f"before 0 in {tmp_path}\nready\nafter\n"
    assert not (tmp_path / "state").exists()
    assert [event["event"] for event in job.events].count("started") == 1


@pytest.mark.parametrize(
    ("prolog", "how", "said"),
    [
        ("echo no disk; exit 3", "ended with exit code 3", "no disk\n"),
        ("kill -TERM $$", "was killed by signal 15", ""),
        ("echo slow; sleep 1000 & sleep 1000", "did not end within 0.5 s", "slow\n"),
        ("head -c 10000000 /dev/urandom; echo; echo last; false", "ended with exit code 1", None),
    ],
    ids=["fails", "killed", "hangs", "prints much"],
)
def test_a_prolog_that_fails(
    new_job: NewJob, tmp_path: Path, prolog: str, how: str, said: str | None
) -> None:
    """No rank starts, the epilog cleans up, and nothing is left."""
    job = new_job()
    limit = 0.5 if said == "slow\n" else 60.0
    spec = around(job, tmp_path, RANK, prolog=prolog, epilog="echo after", prolog_timeout=limit)
    ended = job.start(spec).wait()
    (failure,) = job.of_kind("command_failed")
    assert (failure["name"], failure["how"]) == ("prolog", how)
    assert failure["said"].endswith("last\n" if said is None else said)
    assert Path(job.run.log).read_bytes().endswith(b"after\n")
    assert ended["agent"] is None and ended["why"] == f"the prolog on node 0 {how}"
    assert not job.of_kind("rank_started") and not job.living()


def test_what_a_prolog_leaves_running_ends_with_the_job(new_job: NewJob, tmp_path: Path) -> None:
    job = new_job()
    job.start(around(job, tmp_path, WAITS, prolog=DAEMON))
    wait_until(lambda: job.said("a rank"))
    assert alive(daemon(job))
    job.end("enough", 5.0)
    assert job.wait()["why"] == "enough"
    assert not alive(daemon(job))


def test_what_an_epilog_leaves_running_is_killed(new_job: NewJob, tmp_path: Path) -> None:
    job = new_job()
    ended = job.start(around(job, tmp_path, RANK, epilog=DAEMON)).wait()
    assert ended["agent"] == 0 and not alive(daemon(job))


def test_a_stop_during_the_prolog(new_job: NewJob, tmp_path: Path) -> None:
    """It is no failure: the prolog gets SIGTERM with all that it started, and the epilog runs."""
    job = new_job()
    prolog = "trap 'echo asked; exit 1' TERM; echo begun; sleep 1000 & wait"
    job.start(around(job, tmp_path, RANK, prolog=prolog, epilog="echo after"))
    wait_until(lambda: job.said("begun", "-"))
    job.end("enough", 20.0)
    ended = job.wait()
    assert (ended["agent"], ended["why"]) == (None, "enough")
    assert job.output == {"-": "begun\nasked\nafter\n"}
    assert not job.of_kind("command_failed") and not job.of_kind("rank_started")


def test_an_epilog_that_fails_after_a_good_job(new_job: NewJob, tmp_path: Path) -> None:
    job = new_job()
    ended = job.start(around(job, tmp_path, RANK, epilog="echo in vain; exit 4")).wait()
    assert (ended["agent"], ended["why"]) == (0, "")
    (failure,) = job.of_kind("command_failed")
    assert (failure["name"], failure["how"]) == ("epilog", "ended with exit code 4")
    assert failure["said"] == "in vain\n"


def test_an_epilog_is_hurried_by_an_order_to_kill_alone(new_job: NewJob, tmp_path: Path) -> None:
    """A failure elsewhere, or a stop that leaves time to save, lets it clean up."""
    job = new_job()
    job.start(around(job, tmp_path, RANK, epilog="echo begun; sleep 0.6; echo on; sleep 1000"))
    wait_until(lambda: job.said("begun", "-"))
    job.end("rank 7 failed elsewhere", 0.1)
    wait_until(lambda: job.said("on", "-"))
    job.end("killed by the user", 0.0)
    assert job.wait()["why"] == "rank 7 failed elsewhere"
    assert not job.living()


def test_what_torchrun_said_last_is_not_the_epilogs(new_job: NewJob, tmp_path: Path) -> None:
    job = new_job()
    spec = around(job, tmp_path, RANK, epilog="echo after")
    spec["agent"] = ["sh", "-c", "echo torchrun broke; exit 5", "sh"]
    ended = job.start(spec).wait()
    assert (ended["agent"], ended["said"]) == (5, "torchrun broke\n")
