"""Jobs that start from what an earlier one left warm, and what waits when it must not any more."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.follow import stop_job
from orchestrator.node.job import job_processes, processes
from orchestrator.node.server.session import Refusal
from orchestrator.node.warm import standbys
from orchestrator.node.warm.standbys import Standby
from orchestrator.protocol.events import Ended
from orchestrator.protocol.requests.follow import Stop
from orchestrator.protocol.requests.request import STOPPED
from orchestrator.protocol.spec import Spec
from tests.node.running import PATIENCE, Job, alive, bare_spec, wait_until
from tests.node.warm.conftest import RUN, WarmNode

pytestmark = pytest.mark.slow

HELLO = "print('hello')"
STANDBY, SUPERVISE = "orchestrator/node/warm/standby.py", "orchestrator/node/warm/supervise.py"
WAITS = "import time; print('waits', flush=True); time.sleep(1000)"


def test_standby_is_used_once_and_ended(node: WarmNode) -> None:
    job, cold = node.run(HELLO)
    assert not cold.warm and cold.why_cold == "cold start: nothing waited there"
    standby = node.keep_warm(job)
    job, warm = node.run(HELLO)
    assert warm.warm, warm.why_cold
    assert warm.supervisor == standby.pid
    assert job.output == {"0": "hello\n"}
    assert (job.events[-1]["agent"], job.events[-1]["left"]) == (0, [])
    assert not standbys.find_standbys() and not alive(standby.pid)
    standby = node.keep_warm(job)
    assert standbys.end_standby(standby)
    assert not alive(standby.pid) and not Path(standby.directory).exists()
    assert not list(Path(standbys.standbys_root()).iterdir())


def test_warm_job_owns_its_processes(node: WarmNode) -> None:
    node.keep_warm(node.run(HELLO)[0])
    job, warm = node.start(WAITS, env={"SECRET_OF_MINE": "x" * 2000})
    assert warm.warm, warm.why_cold
    wait_until(lambda: "waits\n" in job.output.get("0", ""), "the rank")
    started = job.of_kind("started")[0]
    variables = processes.environment_of(started["agent"])
    assert f"ORCHESTRATOR_RUN={job.run.path}".encode() in variables
    assert job_processes.supervised_run(warm.supervisor) == (job.run.job, 0, 1)
    assert b"SECRET_OF_MINE=" + b"x" * 2000 in variables
    assert not any(name.startswith(b"ORCHESTRATOR_ROOM=") for name in variables)
    stop = Stop(job=job.run.job, part=0, attempt=1, why="enough", grace=0.0, wait=PATIENCE)
    receipt = stop_job.stop_part(job.run, stop)
    assert not receipt.left and len(receipt.ended) >= 2
    assert not alive(warm.supervisor) and not alive(started["agent"])


def test_job_waits_for_standby_that_imports(node: WarmNode) -> None:
    """The next launch comes at once: the directory in which torch is imported has to stay."""
    job, _ = node.run(HELLO)
    go_on = node.directory / "go_on"
    waits = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    node.package("torch.distributed.run", waits + "os.getcwd()\n" + RUN)
    node.leave_standby(job)
    assert not standbys.find_standbys()[0].ready
    threading.Timer(0.3, go_on.touch).start()
    job, warm = node.run(HELLO)
    assert warm.warm, warm.why_cold
    assert job.output == {"0": "hello\n"}


SHOW = """
import gc, json, locale, os, random, resource, signal, sys, time, warnings
names = ("__name__", "__file__", "__package__")
# Each program has its own.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
print(json.dumps({
    "environ": {n: v for n, v in os.environ.items() if n not in ("NOISE", *CACHES)},
    "argv": [sys.argv, getattr(sys, "orig_argv", 0), sys.path, sys.flags, sys.executable],
    "main": {n: repr(globals().get(n)) for n in names},
    "ours": sorted(n for n in sys.modules if "orchestrator" in n or n in ("agent", "standby")),
    "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "limits": [resource.getrlimit(n) for n in range(16)],
    "umask": os.umask(0),
    "cwd": os.getcwd(),
    "files": {n: os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
              if os.path.exists(f"/proc/self/fd/{n}") and int(n) < 3},
    "count": len(os.listdir("/proc/self/fd")),
    "threads": len(os.listdir("/proc/self/task")),
    "time": [time.tzname, locale.setlocale(locale.LC_ALL)],
    "gc": [gc.isenabled(), gc.get_threshold(), gc.get_debug()],
    "warnings": [str(f) for f in warnings.filters],
    "nice": [os.nice(0), sorted(os.sched_getaffinity(0))],
    "streams": [(s.encoding, s.errors, s.write_through) for s in (sys.stdout, sys.stderr)],
    "cmdline": open("/proc/self/cmdline").read().rstrip(chr(0)),
    "parents": [open(f"/proc/{os.getppid()}/stat").read().split()[1]],
}))
print(random.random())
"""


def shown(node: WarmNode, job: Any) -> tuple[dict[str, Any], float]:
    text, number = job.output["0"].replace(job.run.job, "JOB").splitlines()
    return json.loads(text), float(number)


def test_warm_rank_sees_same_as_cold(node: WarmNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "LINES"):  # readline sets them past os.environ, as in a --pdb
        monkeypatch.setenv(name, "80")
    monkeypatch.setenv("SSH_CLIENT", "10.0.0.1 5 22")
    cold, _ = node.run(SHOW, env={"LR": "1"})
    monkeypatch.delenv("SSH_CLIENT")  # it waits with another login's environment
    node.keep_warm(cold)
    monkeypatch.setenv("SSH_CLIENT", "10.0.0.1 5 22")
    warm, answer = node.run(SHOW, env={"LR": "1"})
    assert answer.warm, answer.why_cold
    (before, number), (after, other) = shown(node, cold), shown(node, warm)
    assert after == before
    assert number != other


# -- not any more -----------------------------------------------------------------------------


def test_other_environment_starts_cold(node: WarmNode) -> None:
    standby = node.keep_warm(node.run(HELLO)[0])
    _, plain = node.run(HELLO, env={"LANG": "C"}, warm=0.0)
    assert not plain.warm and not plain.why_cold and alive(standby.pid)
    job, other = node.run(HELLO, env={"LANG": "C"})
    assert other.why_cold == "cold start: what waited there was started otherwise"
    assert not alive(standby.pid)
    assert node.keep_warm(job).directory != standby.directory


def test_launch_without_warm_ignores_standby(node: WarmNode) -> None:
    """A launch without --warm ignores a standby, and so does a job's first attempt."""
    standby = node.keep_warm(node.run(HELLO)[0])
    for fields in ({}, {"start": "plain"}, {"restarts": 3}):
        job, answer = node.run(HELLO, warm=0.0, **fields)
        assert not answer.warm and not answer.why_cold and job.output == {"0": "hello\n"}
    _, other = node.run(HELLO, warm=0.0, restarts=3, attempt=2)
    assert other.why_cold == "cold start: nothing waited there" and alive(standby.pid)


def test_standby_of_next_attempt_serves_that_job_alone(node: WarmNode) -> None:
    job, _ = node.run(HELLO, warm=0.0, restarts=3)
    standbys.start_standby(job.run.read_spec(), os.environ, 0o022, 600.0)
    standby = node.ready()
    _, asked = node.run(HELLO)
    assert asked.why_cold == "cold start: nothing waited there" and alive(standby.pid)
    _, another = node.run(HELLO, warm=0.0, restarts=3, attempt=2)
    assert another.why_cold == "cold start: nothing waited there" and alive(standby.pid)
    _, its = node.run(HELLO, warm=0.0, restarts=3, attempt=2, of=job.run.job)
    assert its.warm and its.supervisor == standby.pid


def test_changed_package_starts_cold(node: WarmNode) -> None:
    standby = node.keep_warm(node.run(HELLO)[0])
    node.package("torch.__init__", "version = 2\n")
    job, cold = node.run("import torch; print(torch.version)")
    assert not cold.warm and "torch/__init__.py has changed" in cold.why_cold
    assert job.output == {"0": "2\n"} and not alive(standby.pid)


@pytest.mark.parametrize("changed", ["src/edited.py", "site-packages/editable.pth"])
def test_changed_import_or_path_file_starts_cold(node: WarmNode, changed: str) -> None:
    """An editable install is outside of the package directories; a .pth file names its path."""
    source = node.directory / "src"
    source.mkdir()
    (source / "edited.py").write_text("version = 1\n")
    (node.packages / "editable.pth").write_text(f"{source}\n")
    node.package("torch.__init__", "import edited")
    env = {"PYTHONPATH": f"{node.packages}{os.pathsep}{source}"}
    standby = node.keep_warm(node.run(HELLO, env=env)[0])
    (node.directory / changed).write_text("version = 22\n")
    _, cold = node.run(HELLO, env=env)
    assert not cold.warm and f"{changed} has changed" in cold.why_cold
    assert not alive(standby.pid)


def rewrite(job: Job, spec: Spec) -> None:
    Path(job.run.spec).unlink()
    job.run.write_spec(spec)


def test_standby_leaves_after_its_time(node: WarmNode) -> None:
    job, _ = node.run(HELLO, warm=0.001)
    standbys.start_standby(job.run.read_spec(), os.environ, 0o022)
    wait_until(lambda: not standbys.find_standbys(), "its end")
    _, cold = node.run(HELLO)
    assert cold.why_cold == "cold start: nothing waited there"
    assert not list(Path(standbys.standbys_root()).iterdir())


def test_last_job_sets_time_of_standby(node: WarmNode) -> None:
    """One that was made for the next attempt of a job is kept afterwards, but not for its hour."""
    job, _ = node.run(HELLO)
    for seconds in (3600.0, 60.0, 3600.0):
        rewrite(job, job.run.read_spec().replace(warm=seconds))
        standbys.start_standby(job.run.read_spec(), os.environ, 0o022)
        (standby,) = standbys.find_standbys()
        assert seconds - 60 < standby.until - time.time() <= seconds


def new_package(node: WarmNode) -> None:
    node.package("another", "")


def no_library(node: WarmNode) -> None:
    shutil.rmtree(node.library)


@pytest.mark.parametrize("happens", [new_package, no_library])
def test_standby_leaves_if_something_changes(
    node: WarmNode, happens: Callable[[WarmNode], None]
) -> None:
    """It checks on each request and every 15 s; it stays until something changes."""
    node.edit(STANDBY, "TICK_SECONDS = 15.0", "TICK_SECONDS = 0.1")
    standby = node.keep_warm(node.run(HELLO)[0])
    time.sleep(0.5)
    assert alive(standby.pid)
    happens(node)
    wait_until(lambda: not alive(standby.pid), "its end")
    assert not standbys.find_standbys() and not Path(standby.directory).exists()


def test_at_most_two_standbys_wait(node: WarmNode) -> None:
    job, _ = node.run(HELLO)
    spec = job.run.read_spec()
    began: list[Standby] = []
    for language in ("C", "POSIX", "C.UTF-8"):
        rewrite(job, spec.replace(env={**spec.env, "LANG": language}))
        standbys.start_standby(job.run.read_spec(), os.environ, 0o022)
        before = {each.directory for each in began}
        began.append(
            next(each for each in standbys.find_standbys() if each.directory not in before)
        )
    assert [each.pid for each in standbys.find_standbys()] == [each.pid for each in began[1:]]
    assert not alive(began[0].pid)


def test_killed_standby_means_cold_start(node: WarmNode) -> None:
    standby = node.keep_warm(node.run(HELLO)[0])
    os.kill(standby.pid, signal.SIGKILL)
    wait_until(lambda: not alive(standby.pid), "its end")
    job, cold = node.run(HELLO)
    assert not cold.warm and job.output == {"0": "hello\n"}
    assert cold.why_cold == "cold start: nothing waited there"


def test_silent_standby_is_killed(node: WarmNode, monkeypatch: pytest.MonkeyPatch) -> None:
    standby = node.keep_warm(node.run(HELLO)[0])
    monkeypatch.setattr(standbys, "STANDBY_SECONDS", 0.2)
    os.kill(standby.pid, signal.SIGSTOP)
    job, cold = node.run(HELLO)
    assert cold.why_cold == "cold start: the warm process did not answer"
    assert job.output == {"0": "hello\n"} and not alive(standby.pid)


def test_standby_has_one_claimant(node: WarmNode) -> None:
    standby = node.keep_warm(node.run(HELLO)[0])
    claimed = standbys.claim_standby(standby)
    assert claimed is not None and standbys.claim_standby(standby) is None
    assert standbys.end_standby(standby) and alive(standby.pid), "another caller has it"
    assert standbys.end_claimed(claimed) and not alive(standby.pid)


# -- a stop during a start --------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "after"])
def test_stop_during_hand_over_ends_job(
    node: WarmNode, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    standby = node.keep_warm(node.run(HELLO)[0])
    receipts, send = [], standbys.send_message

    def send_and_stop(connection: Any, message: dict[str, Any], files: Any = ()) -> None:
        if moment == "after":
            send(connection, message, files)
        run = node.jobs[-1].run
        stop = Stop(job=run.job, part=0, attempt=1, why="enough", grace=0.0, wait=PATIENCE)
        receipts.append(stop_job.stop_part(run, stop))
        if moment == "before":
            send(connection, message, files)

    monkeypatch.setattr(standbys, "send_message", send_and_stop)
    try:
        node.start(WAITS)
    except Refusal as refusal:
        assert refusal.kind == STOPPED or "did not start" in str(refusal)
    assert receipts and not any(receipt.left for receipt in receipts)
    run = node.jobs[-1].run
    wait_until(lambda: run.last(Ended), "the end")
    wait_until(lambda: not alive(standby.pid), "its end")
    assert not job_processes.processes_of_job(run)


HOLD = """\
def hold():  # until no process holds the other end
    with open({fifo!r}) as end:
        end.read()


"""


# -- what runs when Python starts -------------------------------------------------------------

HOOK = "import builtins, os\nbuiltins.HOOKED = os.environ.get('HOOK', 'off')\n"
HOOKED = "import builtins; print(builtins.HOOKED)"


def test_standby_keeps_no_secret(node: WarmNode) -> None:
    env = {"HF_TOKEN": "s3cret" * 9, "HF_HOME": "/hf", "HF_USER": "told secretly"}
    env |= {"HF_ENDPOINT": "https://u:p@h/", "HF_MIRROR": "http://h/?user=told%20secretly"}
    env |= {"HF_OTHER": "hf_abcdefghijklmnopqrstuvwxyz", "TORCH_OTHER": "a l0gin-in-a-word"}
    env |= {"THE_KEY": "l0gin-in-a-word"}
    standby = node.keep_warm(node.run(HELLO, env=env, secrets=["HF_USER"])[0])
    names = {name.partition(b"=")[0] for name in processes.environment_of(standby.pid)}
    assert b"HF_HOME" in names and b"PATH" in names
    assert not {name.encode() for name in env} & names - {b"HF_HOME"}
    assert not any(name.startswith(b"ORCHESTRATOR_") for name in names - {b"ORCHESTRATOR_ROOM"})
    kept = Path(standby.directory, "standby.json").read_text()
    assert not any(value in kept for value in env.values())
    env["HF_TOKEN"] = "n" * 20
    program = "import os; print(os.environ['HF_USER'] == 'told ' + 'secretly')"
    job, warm = node.run(program, env=env, secrets=["HF_USER"])
    assert warm.warm and job.output == {"0": "True\n"}


@pytest.mark.parametrize(
    ("fields", "environ", "why"),
    [
        ({}, {}, ""),
        ({"start": "plain"}, {}, "start: plain"),
        ({}, {"SLURM_STEP_ID": "0"}, "Slurm"),
    ],
)
def test_unsuitable_job_says_why(
    fields: dict[str, object], environ: dict[str, str], why: str
) -> None:
    agent = ["python", "-u", "/lib/orchestrator/node/job/ranks/fast_torchrun.py", "--nnodes=1"]
    said = standbys.why_unsuitable(
        bare_spec(**{"agent": agent, "start": "fork", **fields}), environ
    )
    assert why in said and bool(said) is bool(why)
