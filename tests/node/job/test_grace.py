"""One end has one grace, the user's: after a failure as well, on this host and on others."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.node.running import Job, script, wait_until

pytestmark = pytest.mark.slow

NewJob = Callable[..., Job]
SAVES = 3.0  # seconds
SHORT = 1.0
PROGRAM = f"""
import os, signal, sys, time
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one would end it
    print("saving", flush=True)
    time.sleep({SAVES})
    print("saved", flush=True)
    sys.exit(0)
rank = os.environ["RANK"]
if sys.argv[1] == "trainer":
    open(os.path.join(os.environ["ORCHESTRATOR_RUN"], "step_" + os.environ["LOCAL_RANK"]), "w")
if sys.argv[1] in ("handler", "trainer") and rank == "0":
    signal.signal(signal.SIGTERM, save)
if sys.argv[1] == "deaf" and rank == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
while rank == "0" or not os.path.exists("go"): time.sleep(0.01)
raise ValueError("of rank 1")
"""


def seconds(job: Job, ended: dict[str, Any]) -> float:
    return float(ended["time"] - job.of_kind("ending")[0]["time"])


@pytest.mark.parametrize(
    ("start", "kind", "grace", "code", "least", "most"),
    [
        ("fork", "handler", 30.0, 0, SAVES, 20.0),
        ("plain", "handler", 30.0, 0, SAVES, 20.0),
        ("fork", "handler", SHORT, -9, SHORT, SAVES),
        ("plain", "no handler", 30.0, -15, 0.0, SAVES),
        ("fork", "deaf", 30.0, -9, 0.9, SAVES + 3.0),
        ("plain", "trainer", 30.0, -9, 0.9, SAVES + 3.0),  # it saves with all ranks together
    ],
)
def test_rank_saves_after_other_rank_failed(
    job: Job,
    tmp_path: Path,
    start: str,
    kind: str,
    grace: float,
    code: int,
    least: float,
    most: float,
) -> None:
    target = {**script(tmp_path, PROGRAM), "args": [kind]}
    spec = job.spec(target, start=start, nproc=2, workdir=tmp_path)
    job.start({**spec, "grace": grace})
    wait_until(lambda: job.said("ready", "0") and job.said("ready", "1"))
    (tmp_path / "go").touch()
    ended = job.wait()
    assert job.ended() == {0: code, 1: 1}
    assert ("saved" in job.output["0"]) == (code == 0)
    assert ended["why"] == "rank 1 failed" and ended["left"] == [] and not job.living()
    assert least <= seconds(job, ended) < most
    asked = {event["rank"]: event["asked"] for event in job.of_kind("rank_ended")}
    assert asked == {0: "rank 1 failed", 1: ""}


STOPPED = f"""
import os, signal, sys, time
def save(*_):
    if os.environ["RANK"] == "1":
        raise ValueError("not saved")
    time.sleep({SAVES})
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(1000)
"""


def test_rank_that_fails_while_saving_hurries_no_other(job: Job, tmp_path: Path) -> None:
    """`stop --grace` may give more than the launch did."""
    job.start({**job.spec(script(tmp_path, STOPPED), nproc=2), "grace": SHORT})
    wait_until(lambda: job.said("ready", "0") and job.said("ready", "1"))
    job.end("the user said so", 20.0)
    job.wait()
    assert job.said("saved") and job.ended() == {0: 0, 1: 1}


@pytest.mark.parametrize(("grace", "code"), [(30.0, 0), (SHORT, -9)])
def test_rank_saves_after_failure_on_other_node(
    new_job: NewJob, tmp_path: Path, grace: float, code: int
) -> None:
    first = new_job()
    jobs = [first, new_job(first.run.job, node=1)]
    target = {**script(tmp_path, PROGRAM), "args": ["handler"]}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        terms = {"supervisors": "127.0.0.1", "supervisors_port": port, "token": "00" * 16}
        for node, job in enumerate(jobs):
            fds = () if node else (server.fileno(),)
            spec = job.spec(target, first=node, workdir=tmp_path)
            own = {"grace": grace, **terms, "listener": fds[0] if fds else None}
            job.start({**spec, "nnodes": 2, **own}, fds)
    wait_until(lambda: jobs[0].said("ready", "0") and jobs[1].said("ready", "1"))
    wait_until(lambda: jobs[1].of_kind("lease"))
    (tmp_path / "go").touch()
    jobs[1].wait()
    ended = jobs[0].wait()
    assert jobs[0].ended() == {0: code} and jobs[1].ended() == {1: 1}
    assert ("saved" in jobs[0].output["0"]) == (code == 0)
    assert ended["why"] == "rank 1 on node 1 failed"
    assert seconds(jobs[0], ended) >= (SAVES if code == 0 else SHORT)
