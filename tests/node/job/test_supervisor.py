"""A real supervisor on a real run directory. Torchrun is real where it matters what it does."""

import os
import re
import resource
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.job.agent_environment import agent_environment
from orchestrator.node.job.part import oom_evidence
from orchestrator.node.job.part.part_end import HURRY_SECONDS
from orchestrator.node.job.ranks import fast_torchrun, no_torchrun
from orchestrator.node.job.supervisor import Supervisor
from orchestrator.protocol.events import RankEnded
from tests.free_ports import free_ports
from tests.node.job.kernel_log import refuse_to_alarm, say
from tests.node.running import PYTHON, Job, alive, bare_spec, run_dir, script, wait_until

pytestmark = pytest.mark.slow

NewJob = Callable[..., Job]
# On a busy machine an end may take so many seconds beyond its grace period.
PROMPT = 8.0

both = pytest.mark.parametrize("start", ["fork", "plain"])


def torchrun(start: str, port: int, nproc: int) -> list[str]:
    plain = ["-m", "torch.distributed.run"]
    fork = ["--run-path", "--start-method=fork"] if start == "fork" else []
    return [
        *(sys.executable, "-u", *([fast_torchrun.__file__] if fork else plain)),
        *("--nnodes=1", "--node-rank=0", f"--nproc-per-node={nproc}"),
        *("--master-addr=127.0.0.1", f"--master-port={port}", "--local-addr=127.0.0.1", *fork),
    ]


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


# -- a job that goes well ---------------------------------------------------------------------

TALKS = """
import os, shutil, sys
rank = os.environ["RANK"]
print("python", shutil.which("python3"))
print("argument", os.fsencode(sys.argv[1]).hex())
print("rank", rank, os.environ["NODE_RANK"], os.environ["OF_THE_SPEC"], "GONE" in os.environ)
print("cwd", os.getcwd(), file=sys.stderr)
print("no end", end="")
"""


@both
def test_job_runs_from_start_to_end(
    new_job: NewJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    monkeypatch.setenv("GONE", "1")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    job = new_job(node=3)
    target = {**script(tmp_path, TALKS), "args": ["\udcff \n"]}
    spec = job.spec(
        target, start=start, nproc=2, first=4, workdir=tmp_path,
        env={"OF_THE_SPEC": "é"}, unset=("GONE",),
    )  # fmt: skip
    ended = job.start(spec).wait()
    for rank in ("4", "5"):
        said = f"argument ff200a\nrank {rank} 3 é False\ncwd {tmp_path}\nno end"
        assert job.output[rank] == f"python {Path(PYTHON).parent / 'python3'}\n{said}"
    assert job.of_kind("started")[0]["supervisor"] == job.supervisor.pid
    assert job.ended() == {4: 0, 5: 0}
    assert [event["event"] for event in job.events].count("rank_finished") == 2
    assert (ended["event"], ended["agent"], ended["why"]) == ("ended", 0, "")
    assert (ended["killed"], ended["left"], ended["lost"]) == ({}, [], 0)
    assert ended["ranks"]["5"]["state"] == "ended"
    assert not job.of_kind("ending")


def test_ranks_have_umask_of_login(job: Job, tmp_path: Path) -> None:
    spec = job.spec(script(tmp_path, "import os; print(os.umask(0))"))
    job.start({**spec, "umask": 0o027}).wait()
    assert job.output["0"] == f"{0o027}\n"


@pytest.mark.parametrize(("node", "nnodes", "more"), [(0, 1, 0), (1, 300, 0), (0, 300, 1)])
def test_ranks_have_file_limit_of_login(
    new_job: NewJob, tmp_path: Path, node: int, nnodes: int, more: int
) -> None:
    """The supervisor raises its own: node 0's has a connection to each of the others.

    All others have one to torchrun's store there, which forked ranks inherit.
    """
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "import resource, time; print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)"
    job = new_job(node=node)
    resource.setrlimit(resource.RLIMIT_NOFILE, (700, kept[1]))
    try:
        spec = job.spec(script(tmp_path, f"{text}; time.sleep(1000)"))
        job.start({**spec, "nnodes": nnodes})
        raised = resource.prlimit(job.supervisor.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
    assert raised == (kept[1], kept[1])
    soft = kept[1] if more else 700
    wait_until(lambda: job.said(f"({soft}, {kept[1]})"))
    job.end("enough", 0.0).close()
    job.wait()


def test_run_files_are_private(job: Job, tmp_path: Path) -> None:
    job.start(job.spec(script(tmp_path, "print(1)"))).wait()
    directory = Path(job.run.path)
    for path in (directory, directory.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name in ("spec.json", "log", "ranks", "events.jsonl", "out_0", "reports", "socket"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600, name


MANY_LINES = """
import os, random
random.seed(int(os.environ["RANK"]))
for number in range(5_000):
    print(number, "x" * random.randrange(150))
"""


def test_pythonpath_entries_are_below_workdir() -> None:
    spec = bare_spec(agent=[sys.executable], workdir="/w", env={"PYTHONPATH": ".:/opt/a:src:"})
    path = agent_environment(spec, "/run", {})["PYTHONPATH"]
    assert path.split(":") == ["/w/.", "/opt/a", "/w/src", "/w"]
    assert "PYTHONPATH" not in agent_environment(bare_spec(agent=[sys.executable]), "/run", {})


@pytest.mark.parametrize("code", [0, 3])
def test_farewell_of_torchrun_has_own_stream(job: Job, tmp_path: Path, code: int) -> None:
    spec = job.spec(script(tmp_path, f"import os\nos._exit({code})"), nproc=2)
    job.start({**spec, "agent": [*spec["agent"], "--talks"]}).wait()
    begins, ends = "at the beginning\n", "at the end\n"
    if code:  # it is not left the time to speak, and may have taken it
        assert job.output in ({"-": begins}, {"-": begins + ends})
    else:
        assert job.output == {"-": begins, "~": ends}


@both
def test_no_byte_of_large_output_is_lost(job: Job, tmp_path: Path, start: str) -> None:
    job.start(job.spec(script(tmp_path, MANY_LINES), start=start, nproc=2)).wait()
    for rank in ("0", "1"):
        words = [PYTHON, str(tmp_path / "program.py")]
        alone = subprocess.check_output(words, env={**os.environ, "RANK": rank}, text=True)
        assert job.output[rank] == alone


# -- ranks that fail --------------------------------------------------------------------------

FAILS = """
import ctypes, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
how = sys.argv[1]
open(os.environ["RANK"], "w").close()
if os.environ["RANK"] == "1":
    while not os.path.exists("0"): time.sleep(0.01)
    if how == "exit": sys.exit(3)
    if how == "_exit": os._exit(5)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault": ctypes.string_at(0)
    if how == "raise":
        raise ValueError("of rank 1")
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("start", "how", "code"),
    [
        ("fork", "exit", 3),
        ("plain", "_exit", 5),
        ("fork", "kill", -9),
        ("plain", "segfault", -11),
        ("fork", "raise", 1),
        ("plain", "raise", 1),
    ],
)
def test_failed_rank_ends_all_ranks(
    job: Job, tmp_path: Path, start: str, how: str, code: int
) -> None:
    target = {**script(tmp_path, FAILS), "args": [how]}
    spec = job.spec(target, start=start, nproc=2, workdir=tmp_path)
    ended = job.start(spec).wait()
    assert job.ended() == {0: -9, 1: code}
    first, second = job.of_kind("rank_ended")
    assert (first["rank"], first["asked"], second["asked"]) == (1, "", "rank 1 failed")
    assert ended["time"] - first["time"] < HURRY_SECONDS + PROMPT
    assert (ended["why"], ended["left"]) == ("rank 1 failed", [])
    assert job.living() == []
    raised = {"raise": ("ValueError", "of rank 1", 13), "exit": ("SystemExit", "3", 8)}
    if how in raised:
        error = first["error"]
        assert (error["type"], error["message"], error["line"]) == raised[how]
        assert error["file"] == str(tmp_path / "program.py")
        assert job.output.get("1", "").endswith("ValueError: of rank 1\n" * (how == "raise"))
    else:
        assert "error" not in first


def test_secret_in_error_is_in_no_file(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries put a URL with its key into their exceptions; a key has many lines."""
    text = "import os\nprint(os.environ['THE_KEY'])\n"
    text += "raise OSError('401 ' + os.environ.pop('A') + ' ' + os.environ['B'])"
    # A variable whose name looks like a secret is also hidden.
    monkeypatch.setenv("THE_KEY", "l0gin-of-the-node")
    secrets = {"A": "t0ken-of-hub", "B": "-----BEGIN\nMIIEvQIBADANBgkqhkiG9w0\n-----END"}
    spec = job.spec(script(tmp_path, text), workdir=tmp_path, env=secrets)
    job.start({**spec, "secrets": ["A", "B"]}).wait()
    (ended,) = job.of_kind("rank_ended")
    assert ended["error"]["message"] == "401 (redacted) (redacted)"
    files = [path for path in Path(job.run.path).rglob("*") if path.is_file()]
    told = [path.name for path in files if re.search(rb"t0ken|MIIEvQ|l0gin", path.read_bytes())]
    assert told == ["spec.json"]


def test_last_output_precedes_end_event(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_dir()
    job = Supervisor(run)
    theirs, writing = os.pipe()
    os.set_blocking(theirs, False)
    job.outputs.watch(theirs, "0")
    os.write(writing, b"nearly there\n")
    told = []
    note = lambda _: told.append(Path(run.log).read_bytes())  # noqa: E731
    monkeypatch.setattr(job, "event", note)
    monkeypatch.setattr(job.ranks, "event", note)
    monkeypatch.setattr(job, "reap", lambda: None)  # children of this process: other tests' own
    job.reported(RankEnded(rank=0, local=0, time=time.time(), pid=2**22 + 1, code=-9))
    # These are the first output and the end.
    assert told[:2] == [b"", b"nearly there\n"]


def test_broken_gpu_is_reported_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_to_alarm()
    # This path stands in for a driver's device.
    monkeypatch.setattr(oom_evidence, "NVIDIA", "/dev/null")
    run = run_dir()
    job = Supervisor(run)
    told: list[Any] = []
    monkeypatch.setattr(job, "event", told.append)
    log = job.evidence.log
    assert log is not None
    for line in (
        "Xid (PCI:0000:4f:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus",
        "Xid (PCI:0000:4f:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus",
        "Xid (PCI:0000:4f:00): 31, pid='<unknown>', name=<unknown>, MMU Fault",  # a program's
        # This report is about another user's process.
        "Xid (PCI:0000:5f:00): 94, pid=4000003, name=other, Contained memory error",
    ):
        say(f"NVRM: {line}")
    assert select.select([log], [], [], 0)[0]  # the kernel's log wakes who waits for it
    job.read_kernel_log(log)
    lines = [event.line for event in told if "4f:00" in event.line or "5f:00" in event.line]
    assert len(lines) == 1 and "): 79, " in lines[0]
    assert not select.select([log], [], [], 0)[0]


def test_killed_keeper_ends_its_rank(job: Job, tmp_path: Path) -> None:
    job.start(job.spec(script(tmp_path, "import time; print('ready'); time.sleep(1000)")))
    wait_until(lambda: job.said("ready"))
    (started,) = wait_until(lambda: job.of_kind("rank_started"))
    os.kill(started["keeper"], signal.SIGKILL)
    job.wait()
    assert job.ended() == {0: -9}
    assert job.of_kind("rank_ended")[0]["asked"] == ""


TEARS_DOWN = """
import atexit, sys, time
atexit.register(time.sleep, 1000)
print("leaves")
sys.exit(2)
"""


@both
def test_rank_already_failing_counts_as_unasked(job: Job, tmp_path: Path, start: str) -> None:
    """Its connections are closed by then: others may have failed before, because of it."""
    job.start(job.spec(script(tmp_path, TEARS_DOWN), start=start))
    wait_until(lambda: job.of_kind("rank_exit"))
    job.end("rank 0 on node 1 failed", 20.0)
    job.wait()
    (event,) = job.of_kind("rank_ended")
    assert (event["code"], event["asked"]) == (2, "")


# -- ends that are asked for ------------------------------------------------------------------

SAVES = """
import os, signal, sys, time
def save(*_):
    print("asked")
    time.sleep(1)
    print("saved")
    sys.exit(0)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, save)
print("ready")
while True:
    time.sleep(0.01)
"""


@both
def test_rank_may_save_within_grace(job: Job, tmp_path: Path, start: str) -> None:
    job.start(job.spec(script(tmp_path, SAVES), start=start, nproc=2))
    wait_until(lambda: job.said("ready", "0") and job.said("ready", "1"))
    job.end("the user said so", 20.0)
    ended = job.wait()
    assert job.output["0"] == "ready\nasked\nsaved\n"
    assert job.ended() == {0: 0, 1: -15}
    (ending,) = job.of_kind("ending")
    assert (ending["why"], ending["grace"]) == ("the user said so", 20.0)
    assert (ended["why"], ended["left"]) == ("the user said so", [])
    assert ended["time"] - ending["time"] < 1 + PROMPT
    ends = [*job.of_kind("rank_finished"), *job.of_kind("rank_ended")]
    assert [event["asked"] for event in ends] == ["the user said so"] * 3


LEAVES_UNSEEN = """
import os, signal
keeper = os.getppid()
os.kill(keeper, signal.SIGSTOP)
while open(f"/proc/{keeper}/stat").read().rpartition(")")[2].split()[0] != "T": pass
os._exit(0)
"""


@both
def test_rank_already_gone_counts_as_unasked(job: Job, tmp_path: Path, start: str) -> None:
    """Its keeper, on a busy machine, says so only after others have failed by it."""
    job.start(job.spec(script(tmp_path, LEAVES_UNSEEN), start=start))
    (rank,) = wait_until(lambda: job.of_kind("rank_started"))
    wait_until(lambda: not alive(rank["pid"]))
    job.end("rank 0 on node 1 failed", 0.0)
    job.wait()
    (event,) = job.of_kind("rank_ended")
    assert (event["code"], event["asked"]) == (0, "")


def test_end_before_ranks_start_is_prompt(job: Job, tmp_path: Path) -> None:
    """Torchrun imports torch for a second or more; a stop must also work in that time."""
    slow = [PYTHON, "-c", "import time; print('importing', flush=True); time.sleep(1000)"]
    job.start(job.spec(script(tmp_path, "print('never')"), agent=slow))
    wait_until(lambda: job.said("importing", "-"))
    began = time.time()
    job.end("changed my mind", 60.0)
    ended = job.wait()
    assert ended["time"] - began < PROMPT
    assert (ended["agent"], ended["ranks"]) == (-15, {})


def test_rank_that_starts_after_end_is_asked_to_end(job: Job, tmp_path: Path) -> None:
    spec = job.spec(script(tmp_path, "import time; print('ready'); time.sleep(1000)"))
    deaf = "trap '' TERM; echo deaf; while [ ! -e go ]; do sleep 0.02; done; \"$@\"; exit 0"
    words = ["sh", "-c", f"cd {tmp_path}; {deaf}", "sh", *spec["agent"]]
    job.start({**spec, "agent": words})
    wait_until(lambda: job.said("deaf", "-"))
    job.end("over", 20.0)
    (tmp_path / "go").touch()
    job.wait()
    assert job.ended() == {0: -15}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_supervisor_ends_job(job: Job, tmp_path: Path, number: signal.Signals) -> None:
    job.start(job.spec(script(tmp_path, SAVES)))
    wait_until(lambda: job.said("ready"))
    job.supervisor.send_signal(number)
    ended = job.wait()
    assert job.said("saved")
    assert ended["why"] == "its supervisor was told to stop"


# -- what outlives its rank -------------------------------------------------------------------

LEAVES = """
import os, subprocess, sys, time
os.mkfifo("never")  # to wait for: it hears a signal there at once
polite = "trap 'echo > polite; exit' TERM; echo > ready_1; while :; do read x <> never; done"
stubborn = "trap '' TERM; echo > ready_2; while :; do sleep 0.01; done"
# Twice forked, its own session, no environment.
subprocess.call(["setsid", "sh", "-c", f"({polite}) & exit 0"])
subprocess.call(["env", "-i", "setsid", "/bin/sh", "-c", f"({stubborn}) & exit 0"])
while not (os.path.exists("ready_1") and os.path.exists("ready_2")):
    time.sleep(0.01)
"""


@both
def test_leftovers_of_finished_job_are_swept(job: Job, tmp_path: Path, start: str) -> None:
    ended = job.start(job.spec(script(tmp_path, LEAVES), start=start, workdir=tmp_path)).wait()
    assert job.ended() == {0: 0}
    assert (tmp_path / "polite").exists()
    assert "sh" in ended["killed"].values()
    assert not any(alive(int(pid)) for pid in ended["killed"])
    assert (ended["agent"], ended["why"], ended["left"]) == (0, "", [])
    assert job.living() == []


# -- torchrun itself --------------------------------------------------------------------------


def test_failing_torchrun_is_reported(job: Job, tmp_path: Path) -> None:
    words = ["sh", "-c", "echo these are its words >&2; exit 7"]
    ended = job.start(job.spec(script(tmp_path, ""), agent=words)).wait()
    assert (ended["agent"], ended["why"], ended["ranks"]) == (7, "", {})
    assert job.output == {"-": "these are its words\n"}


def test_killed_torchrun_is_cause(job: Job, tmp_path: Path) -> None:
    job.start(job.spec(script(tmp_path, "import time; print('ready'); time.sleep(1000)"), nproc=2))
    wait_until(lambda: job.said("ready", "0") and job.said("ready", "1"))
    os.kill(job.of_kind("started")[0]["agent"], signal.SIGKILL)
    ended = job.wait()
    assert (ended["agent"], ended["why"]) == (-9, "")
    assert set(job.ended()) == {0, 1}
    assert all(event["asked"] for event in job.of_kind("rank_ended"))


def test_killed_torchrun_does_not_interrupt_ranks(job: Job, tmp_path: Path) -> None:
    """They would fail before their supervisor has seen why; a handler might call that a Ctrl-C."""
    text = "import time; print('ready'); time.sleep(1000)"
    job.start(job.spec(script(tmp_path, text), start="fork"))
    wait_until(lambda: job.said("ready"))
    keeper = job.of_kind("rank_started")[0]["keeper"]
    os.kill(keeper, signal.SIGSTOP)  # signals wait for it
    agent = job.of_kind("started")[0]["agent"]
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not alive(agent))
    status = Path(f"/proc/{keeper}/status").read_text()
    os.kill(keeper, signal.SIGCONT)
    pending = re.findall("^(?:Sig|Shd)Pnd:\\s+(\\w+)$", status, re.MULTILINE)
    assert not any(int(each, 16) >> signal.SIGINT - 1 & 1 for each in pending)
    job.wait()
    assert job.ended() == {0: -15}


ONE_FAILS = """
import os, sys, time
print("ready", flush=True)
if os.environ["RANK"] == "0":
    open("go").read()
    sys.exit(3)
time.sleep(1000)
"""


def test_rank_ended_by_torchrun_did_not_fail_itself(job: Job, tmp_path: Path) -> None:
    """Torchrun may be quicker than the supervisor, on a machine that does other work."""
    os.mkfifo(tmp_path / "go")
    job.start(job.spec(script(tmp_path, ONE_FAILS), nproc=2, workdir=tmp_path))
    wait_until(lambda: job.said("ready", "0") and job.said("ready", "1"))
    other = next(event["pid"] for event in job.of_kind("rank_started") if event["rank"] == 1)
    job.supervisor.send_signal(signal.SIGSTOP)
    (tmp_path / "go").write_text("")
    wait_until(lambda: not alive(other))
    job.supervisor.send_signal(signal.SIGCONT)
    job.wait()
    assert job.ended() == {0: 3, 1: -15}
    assert {event["rank"]: event["asked"] for event in job.of_kind("rank_ended")} == {
        0: "",
        1: "rank 0 failed",
    }


def test_torchrun_is_not_awaited_after_all_ranks_ended(job: Job, tmp_path: Path) -> None:
    """It takes its time to say what is known already, and a restart waits for it."""
    # The shell waits without a limit.
    stays = ["sh", "-c", '"$@"; sleep 1000', "sh"]
    spec = job.spec(script(tmp_path, "import time; print('ready'); time.sleep(1000)"), nproc=2)
    job.start({**spec, "agent": [*stays, *spec["agent"]]})
    wait_until(lambda: job.said("ready", "0") and job.said("ready", "1"))
    job.end("enough", 1000.0)
    ended = job.wait()
    assert ended["agent"] == -9
    # It would be listed if its grace period had passed first.
    assert "sh" not in ended["killed"].values()
    assert job.ended() == {0: -15, 1: -15}
    assert not job.living()


def test_missing_torchrun_is_reported(job: Job, tmp_path: Path) -> None:
    spec = job.spec(script(tmp_path, ""), agent=["/no/such/python"])
    with pytest.raises(AssertionError, match="/no/such/python: No such file or directory"):
        job.start(spec)
    ended = job.wait()
    assert ended["agent"] is None
    assert ended["why"].startswith("not started")


SUMS = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("total", int(total))
dist.barrier()
os._exit(0)
"""


def test_real_torchrun_forks_ranks(job: Job, tmp_path: Path, port: int) -> None:
    spec = job.spec(script(tmp_path, SUMS), start="fork", nproc=2, agent=torchrun("fork", port, 2))
    ended = job.start(spec).wait(60)
    # Before it gloo of torch 2.8 and 2.9 says how many are connected.
    assert job.output["0"].splitlines()[-1] == "total 2"
    assert "total 2" in job.output["1"].splitlines()
    assert job.ended() == {0: 0, 1: 0}
    assert (ended["agent"], ended["killed"]) == (0, {})


def test_rank_fails_under_real_torchrun(job: Job, tmp_path: Path, port: int) -> None:
    target = {**script(tmp_path, FAILS), "args": ["raise"]}
    agent = torchrun("plain", port, 2)
    spec = job.spec(target, start="plain", nproc=2, workdir=tmp_path, agent=agent)
    ended = job.start(spec).wait(60)
    assert job.ended() == {0: -9, 1: 1}
    (failed,) = [event for event in job.of_kind("rank_ended") if event["rank"] == 1]
    assert failed["error"]["line"] == 13
    assert ended["why"] == "rank 1 failed"


def test_real_torchrun_lets_rank_save(job: Job, tmp_path: Path, port: int) -> None:
    spec = job.spec(script(tmp_path, SAVES), start="fork", nproc=2, agent=torchrun("fork", port, 2))
    job.start(spec)
    wait_until(lambda: job.said("ready", "0") and job.said("ready", "1"), patience=60)
    job.end("enough", 20.0)
    job.wait(60)
    assert job.output["0"] == "ready\nasked\nsaved\n"
    assert job.ended() == {0: 0, 1: -15}


OWN_RANKS = """
import os, signal, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
print([os.environ.get(name) for name in names], "torch" in sys.modules)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("asked") or 0))
if "fails" in sys.argv:
    os.kill(os.getpid(), signal.SIGSEGV)
print("ready")
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("ends", ["fails", "is asked", "its parent is asked"])
def test_single_process_runs_without_torchrun(new_job: NewJob, tmp_path: Path, ends: str) -> None:
    """It has its node's place and nothing of torchrun; how it ends is known as it is of a rank."""
    job = new_job(node=1)
    agent = [sys.executable, "-u", no_torchrun.__file__, "--local-addr=127.0.0.1"]
    agent += ["--nnodes=3", "--node-rank=1", "--master-addr=127.0.0.1", "--master-port=29500"]
    target = {**script(tmp_path, OWN_RANKS), "args": [ends]}
    spec = {**job.spec(target, first=1, agent=agent), "rank_env": ["own"]}
    job.start(spec)
    if ends != "fails":
        wait_until(lambda: job.said("ready", "1"))
    if ends == "is asked":
        job.end("the user said so", 20.0)
    elif ends == "its parent is asked":
        os.kill(job.of_kind("started")[0]["agent"], signal.SIGTERM)
    ended = job.wait()
    assert job.output["1"].startswith("['1', '3', None, '29500'] False\n")
    assert job.ended() == {1: -signal.SIGSEGV if ends == "fails" else 0}
    assert ("asked" in job.output["1"]) == (ends != "fails")
    assert (ended["left"], ended["killed"]) == ([], {})


# -- a disk without room ----------------------------------------------------------------------

CHATTY = """
import os
for _ in range(40):
    print("x" * 99_999)
open(os.environ["DONE"], "w").write("done")
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(options, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_full_disk_stops_neither_job_nor_end_event(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_job: NewJob
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(small_disk))
    job = new_job()
    spec = job.spec(script(tmp_path, CHATTY), env={"DONE": str(tmp_path / "done")})
    ended = job.start(spec).wait()
    assert os.statvfs(small_disk).f_bavail < 80
    assert (tmp_path / "done").read_text() == "done"
    assert (ended["event"], ended["agent"]) == ("ended", 0)
    assert job.ended() == {0: 0}
    assert 0 < ended["lost"] < 4_000_000
