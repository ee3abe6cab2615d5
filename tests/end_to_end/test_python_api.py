"""Cluster and Job as a Python program uses them: this process is the program."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from orchestrator import Cluster, Job, JobFailed
from orchestrator.common.errors import CheckFailed, NodeError, UsageError
from orchestrator.records.experiment import Experiment
from tests.launching import PATIENCE, Head, interrupt_when
from tests.node.running import wait_until

SLEEPS = """
import os, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("begun", os.environ["RANK"], flush=True)
time.sleep(600)
"""


FAILS = """
import os, time
assert os.environ["RANK"] == "0", "no"
time.sleep(60)
"""


@pytest.fixture
def cluster(head: Head, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.chdir(head.directory)
    return Cluster(head.node_list, ssh_config=head.cluster.ssh_config, no_torchrun=True)


def begun(job: Job) -> None:
    """Both ranks have said their first word."""
    found = job.logs(follow=True)
    said: set[str] = set()
    while len(said) < 2:
        line = next(found)
        said |= {line.text} if line.text.startswith("begun") else set()


def waits() -> bool:
    """Is the main thread inside of Job.wait()?"""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not Job._until_over.__code__:
        frame = frame.f_back
    return frame is not None


def test_job_runs_from_start_to_end(
    cluster: Cluster, head: Head, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(number) for number in range(1, 32)]
    head.script(
        "say.py",
        "import os, sys\nprint(sys.argv[1:], os.environ['COLOUR'], os.environ['RANK'], end='!')",
    )
    with cluster.launch(
        "say.py", args=["--x", 1, Path("a b"), "$HOME"], env={"COLOUR": "red"}, name="said"
    ) as job:
        assert job.status in ("starting", "running") and job.exit_code is None
    assert job.wait() == 0
    assert (job.status, job.exit_code, job.verdict, job.stop()) == ("done", 0, None, ())
    words = "['--x', '1', 'a b', '$HOME'] red {}!"
    texts = sorted(line.text for line in job.logs() if line.rank is not None)
    assert texts == [words.format(rank) for rank in range(2)]
    (line,) = job.logs(rank=1)
    assert str(line) == f"node1 rank1 | {words.format(1)}"
    assert not list(job.logs(node=0, rank=1))
    assert repr(job) == f"<Job {job.name}: done>" and job.name.startswith("said_")
    with pytest.raises(UsageError, match="ran a program"):
        job.results()
    with pytest.raises(UsageError, match="ranks 0 to 1"):
        job.logs(rank=2)
    assert [one.name for one in cluster.jobs()] == [job.name]
    (shown,) = repr(cluster.jobs()).splitlines()[1:]
    assert shown.startswith(f"{job.name}  done")
    assert cluster.attach().name == cluster.attach(job.directory).name == job.name
    assert [signal.getsignal(number) for number in range(1, 32)] == handlers
    assert capfd.readouterr() == ("", "")


def test_failing_job_has_verdict(cluster: Cluster, head: Head) -> None:
    head.script("fail.py", FAILS)
    job = cluster.launch("fail.py")
    assert job.wait() == 1
    told = job.verdict
    assert told is not None
    assert (told.kind, told.rank, told.node) == ("exception", 1, 1)
    assert told.message == "AssertionError: no" and "fail.py:3" in told.where
    assert "Traceback" in str(told) and "the cause: rank 1 on node 1" in str(told)
    with pytest.raises(JobFailed, match="the cause: rank 1 on node 1") as raised:
        job.wait(check=True)
    assert raised.value.verdict == told and raised.value.exit_code == 1
    attached = head.command("orchestrator", "attach").ends(1)
    assert "the cause: rank 1 on node 1" in attached.text


def test_run_returns_results_by_rank(cluster: Cluster) -> None:
    import operator

    offset = 10  # a closure

    def work(factor: int, *, power: int) -> tuple[int, int, str]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        box = [None] * dist.get_world_size()
        dist.all_gather_object(box, dist.get_rank())
        dist.destroy_process_group()
        return operator.mul(box[-1] or 0, factor) + offset, int(os.environ["RANK"]) ** power, "é"

    four = cluster.with_options(no_torchrun=False, nnodes=1, nproc=4)
    assert four.run(work, 2, power=2) == [(16, rank**2, "é") for rank in range(4)]
    job = cluster.jobs()[-1]
    assert job.name.startswith("work_") and job.results() == four.attach(job.name).results()


def test_unpicklable_function_starts_nothing(cluster: Cluster) -> None:
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be sent to the nodes: .*lock"):
        cluster.run(lambda: lock)
    assert cluster.jobs() == []


def test_hanging_function_times_out_and_stops(cluster: Cluster, head: Head) -> None:
    def hangs() -> None:
        def save(*_: object) -> None:
            print("saved", flush=True)
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        print("begun", os.environ["RANK"], flush=True)
        time.sleep(600)

    job = cluster.with_options(no_torchrun=False, nnodes=1, nproc=2).submit(hangs)
    begun(job)
    with pytest.raises(TimeoutError, match=r"still runs after 0.1 s"):
        job.wait(timeout=0.1)
    with pytest.raises(TimeoutError):
        job.results(timeout=0.1)
    assert job.status == "running"
    with pytest.raises(KeyboardInterrupt):
        interrupt_when(waits)
        job.wait()
    assert (job.status, job.exit_code) == ("stopped", 130)
    assert [line.text for line in job.logs() if "saved" in line.text] == ["saved"] * 2
    with pytest.raises(JobFailed, match="stopped") as raised:
        job.results()
    assert raised.value.exit_code == 130
    assert head.nothing_left()


# -- interrupts and deaths ------------------------------------------------------------------------


def test_ctrl_c_during_start_leaves_nothing(cluster: Cluster, head: Head) -> None:
    """A hook that runs on the nodes ends by itself, and no rank starts after it."""
    head.script("sleeps.py", SLEEPS)
    asked = head.directory / "asked"
    hook = head.script("hook.sh", f"touch '{asked}'; sleep 8\n")
    with pytest.raises(KeyboardInterrupt):
        interrupt_when(asked.exists)
        cluster.launch("sleeps.py", hook=hook)
    assert asked.exists() and cluster.jobs() == []
    assert head.nothing_left()


def test_ctrl_c_after_start_stops_job(cluster: Cluster, head: Head) -> None:
    head.script("sleeps.py", SLEEPS)
    with pytest.raises(KeyboardInterrupt), cluster:
        interrupt_when(lambda: any(head.left(node) for node in (0, 1)))
        # The launch may have returned before the interrupt.
        cluster.launch("sleeps.py").wait()
    assert [job.status for job in cluster.jobs()] == ["stopped"]
    assert head.nothing_left()


KILLED = """
import os, sys
from orchestrator import Cluster
job = Cluster(sys.argv[1], ssh_config=sys.argv[2]).launch("sleeps.py", no_torchrun=True)
os.kill(os.getpid(), 9)
"""


def test_job_survives_killed_program_and_head(cluster: Cluster, head: Head) -> None:
    head.script("sleeps.py", SLEEPS)
    words = [str(head.node_list), str(head.cluster.ssh_config)]
    done = subprocess.run([sys.executable, "-c", KILLED, *words], cwd=head.directory, check=False)
    assert done.returncode == -signal.SIGKILL
    job = cluster.attach()
    # Its head lives on and fetches the logs.
    begun(job)
    assert job.status == "running"
    os.kill(head.record["head"]["pid"], signal.SIGKILL)
    wait_until(lambda: not Experiment(job.directory).followed, patience=PATIENCE)
    again = cluster.attach(job.name)
    begun(again)
    assert job.status == "running" and Experiment(job.directory).followed
    taker = head.command("orchestrator", "attach", job.name)  # without --steal
    wait_until(lambda: head.record["head"]["pid"] == taker.process.pid, "the head has changed")
    taker.interrupt(signal.SIGHUP)
    assert taker.finish() == 0
    assert job.status == "running"
    receipts = again.stop(now=True)
    assert len(receipts) == 2 and all(receipt.ended for receipt in receipts)
    assert job.status == "stopped" and job.wait() == 130
    assert head.nothing_left()


# -- what is wrong is said by type ----------------------------------------------------------------


def test_errors_have_documented_types(cluster: Cluster, head: Head) -> None:
    with pytest.raises(CheckFailed, match=r"script not found: .*nowhere\.py"):
        cluster.launch("nowhere.py")
    with pytest.raises(UsageError, match=r"launch\.nproc"):
        cluster.launch("x.py", nproc="two")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"did you mean 'max_steps'"):
        cluster.launch(set={"training.max_stepz": 5})
    unreachable = Cluster(
        head.script("refusing", "127.0.0.99:9\n"), ssh_config=head.cluster.ssh_config
    )
    with pytest.raises(NodeError, match="refuses connections"):
        unreachable.run(print)
    with pytest.raises(UsageError, match="no experiment 'x'"):
        Cluster("no list").attach("x")
    assert cluster.jobs() == []


# -- the page -------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "python_api.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
PROGRAMS = {
    "train.py": 'import os\nprint("epoch 3") if os.environ["RANK"] == "1" else None\n',
    "broken.py": "raise ValueError('bad luck')\n",
}


def test_documented_programs_run(head: Head) -> None:
    for name, text in PROGRAMS.items():
        head.script(name, text)
    known = f'"{head.node_list}", ssh_config="{head.cluster.ssh_config}"'
    code = "\n".join(SNIPPETS).replace('"node_ip_list.txt").run', f"{known}).run")
    # Its programs need no torch, whose import by each of them would take most of the time.
    code = code.replace('"node_ip_list.txt"', f"{known}, no_torchrun=True")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=head.directory, capture_output=True, text=True, check=True
    )
    said = re.sub(r"^[01] \S+/broken", "0 broken", done.stdout, flags=re.M).splitlines()
    assert said == [
        "0",
        "node1 rank1 | epoch 3",
        "0 broken.py:1 in <module> ValueError: bad luck",
        "done",
        "[(0, 10.0), (1, 10.0)]",
        *("0 Linux", "1 Linux"),
    ]
    assert done.stderr == ""


TYPED = """
import logging
from pathlib import Path
from orchestrator import Cluster, Job, JobFailed, Verdict

def double(x: int, *, times: int = 2) -> float:
    return x * times / 1

logging.getLogger("orchestrator")
with Cluster(Path("nodes"), ssh_config="c", nproc=2, env={"A": "b"}) as cluster:
    job: Job = cluster.launch("train.py", args=["--x", 3], set={"training.max_steps": 5})
code: int = job.wait(timeout=3.0, check=True)
told: Verdict | None = job.verdict
words: list[str] = [line.text for line in job.logs(rank=0, follow=True)]
results: list[float] = cluster.run(double, 2, times=3)
"""
WRONG = {
    'cluster.run(double, "two")': "arg-type",
    "job.verdict.rank": "union-attr",
    "words2: list[int] = cluster.run(double, 1)": "arg-type",
}


def test_public_api_is_typed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(TYPED + "\n".join(WRONG) + "\n")
    # It shares the cache of the repository's own mypy run.
    command = [sys.executable, "-m", "mypy", str(mine)]
    done = subprocess.run(command, cwd=PAGE.parents[1], capture_output=True, text=True, check=False)
    found = re.findall(r"mine\.py:(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.M)
    first = TYPED.count("\n") + 1
    assert found == [(str(first + at), kind) for at, kind in enumerate(WRONG.values())], done.stdout
