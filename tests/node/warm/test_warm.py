"""Jobs that start from what an earlier one left warm, and what waits when it must not any more."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import pytest

from orchestrator.node.follow import stop_job
from orchestrator.node.job import job_processes, processes
from orchestrator.node.server.visit import Refusal, Visit
from orchestrator.node.warm import frames, handover, pairs, setting
from orchestrator.node.warm.visit import WarmVisit
from orchestrator.protocol.events import Ended
from orchestrator.protocol.requests.follow import Stop
from orchestrator.protocol.requests.request import STOPPED
from orchestrator.protocol.requests.start import Start
from tests.node.running import PATIENCE, PYTHON, Job, alive, wait_until
from tests.node.warm.conftest import RUN, WarmNode

HELLO = "print('hello')"
WAITS = "import time; print('waits', flush=True); time.sleep(1000)"


def living(token: str) -> list[int]:
    """The processes that carry a pair's mark."""
    mark = f"{pairs.TOKEN_VARIABLE}={token}".encode()
    return [pid for pid in processes.everyone() if mark in processes.environment(pid)]


def test_it_is_used_once_and_ended_with_proof(node: WarmNode) -> None:
    job, cold = node.run(HELLO)
    assert not cold.warm.warm and cold.warm.why == "cold start: nothing waited there"
    pair = node.keep_warm(job)
    agent = pairs.ask(pair)["agent"]
    job, warm = node.run(HELLO)
    assert warm.warm.warm, warm.warm.why
    assert (warm.supervisor, job.of_kind("started")[0]["agent"]) == (pair.pid, agent)
    assert job.output == {"0": "hello\n"}
    assert (job.events[-1]["agent"], job.events[-1]["left"]) == (0, [])
    assert not pairs.all_pairs() and not alive(pair.pid) and not alive(agent)
    pair = node.keep_warm(job)
    end = pairs.end(pair)
    assert len(end.ended) == 2 and not end.left
    assert not living(pair.token) and not alive(pair.pid) and not Path(pair.directory).exists()


def test_its_processes_are_the_jobs_as_after_a_cold_start(node: WarmNode) -> None:
    node.keep_warm(node.run(HELLO)[0])
    job, warm = node.start(WAITS, env={"SECRET_OF_MINE": "x" * 2000})
    assert warm.warm.warm, warm.warm.why
    wait_until(lambda: "waits\n" in job.output.get("0", ""), "the rank")
    started = job.of_kind("started")[0]
    variables = processes.environment(started["agent"])
    assert job_processes.tag(variables) == (job.run.job, "0", job.run.path)
    assert job_processes.supervised(warm.supervisor) == (job.run.job, "0")
    assert b"SECRET_OF_MINE=" + b"x" * 2000 in variables
    assert not any(name.startswith(b"ORCHESTRATOR_WARM=") for name in variables)
    stop = Stop(job=job.run.job, node=0, why="enough", grace=0.0, wait=PATIENCE)
    receipt = stop_job.stop(job.run, stop)
    assert not receipt.left and len(receipt.ended) >= 2
    assert not alive(warm.supervisor) and not alive(started["agent"])


def test_a_job_waits_for_what_is_still_importing(node: WarmNode) -> None:
    """The next launch comes at once: the directory in which torch is imported has to stay."""
    job, _ = node.run(HELLO)
    go_on = node.directory / "go_on"
    waits = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    node.package("torch.distributed.run", waits + "os.getcwd()\n" + RUN)
    visit = Visit(umask=0o022).of(WarmVisit)
    visit.followed = job.run
    visit.job_over()
    wait_until(pairs.all_pairs, "the pair")
    threading.Timer(0.3, go_on.touch).start()
    job, warm = node.run(HELLO)
    assert warm.warm.warm, warm.warm.why
    assert job.output == {"0": "hello\n"}


def imports(job: Job, *names: str) -> Job:
    """Let it be noted that a rank of this job had imported these packages."""
    Path(job.run.path, "modules.json").write_text(json.dumps(names))
    return job


def test_what_was_imported_later_is_imported_too(node: WarmNode) -> None:
    """It begins while the job runs, whose program may not have imported all yet."""
    node.package("early", "")
    node.package("late", "import os; seen = os.environ.get('ODD')")
    job, _ = node.run(HELLO)
    pair = node.keep_warm(imports(job, "early"))
    assert node.keep_warm(imports(job, "early", "late")) == pair
    program = "import sys; print('early' in sys.modules, 'late' in sys.modules)"
    job, warm = node.run(program)
    assert warm.warm.warm and job.output == {"0": "True True\n"}
    node.keep_warm(imports(job, "early"))
    node.keep_warm(imports(job, "late"))
    _, cold = node.run(program, env={"ODD": "7"})
    assert "ODD, which a package reads" in cold.warm.why


def test_what_changes_between_two_imports_is_seen(node: WarmNode) -> None:
    node.package("early", "")
    node.package("late", "")
    job, _ = node.run(HELLO)
    node.keep_warm(imports(job, "early"))
    node.package("early", "version = 2")
    node.keep_warm(imports(job, "early", "late"))
    _, cold = node.run(HELLO)
    assert not cold.warm.warm and "early.py has changed" in cold.warm.why


def test_a_package_that_is_not_quiet_later_is_left_to_the_ranks(node: WarmNode) -> None:
    node.package("early", "")
    node.package("loud", "import socket; kept = socket.socket()")
    job, _ = node.run(HELLO)
    node.keep_warm(imports(job, "early"))
    pair = node.keep_warm(imports(job, "early", "loud"))
    assert pairs.ask(pair)["skipped"] == ["loud"]
    job, warm = node.run("import sys; print('early' in sys.modules, 'loud' in sys.modules)")
    assert warm.warm.warm and job.output == {"0": "True False\n"}


SHOW = """
import gc, json, locale, os, random, resource, signal, sys, time, warnings
names = ("__name__", "__file__", "__package__")
print(json.dumps({
    "environ": {n: v for n, v in os.environ.items() if n not in ("NOISE",)},
    "argv": [sys.argv, getattr(sys, "orig_argv", 0), sys.path, sys.flags, sys.executable],
    "main": {n: repr(globals().get(n)) for n in names},
    "ours": sorted(n for n in sys.modules if "orchestrator" in n or n in ("agent", "frames")),
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


def test_a_rank_finds_the_same_as_after_a_cold_start(
    node: WarmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COLUMNS", "LINES"):  # readline sets them past os.environ, as in a --pdb
        monkeypatch.setenv(name, "80")
    monkeypatch.setenv("OF_THE_LOGIN", "1")
    cold, _ = node.run(SHOW, env={"LR": "1"})
    monkeypatch.delenv("OF_THE_LOGIN")  # it waits with another login's environment
    node.keep_warm(cold)
    monkeypatch.setenv("OF_THE_LOGIN", "1")
    warm, answer = node.run(SHOW, env={"LR": "1"})
    assert answer.warm.warm, answer.warm.why
    (before, number), (after, other) = shown(node, cold), shown(node, warm)
    assert after == before
    assert number != other


# -- not any more -----------------------------------------------------------------------------


def test_another_setting_is_cold_and_says_why(node: WarmNode) -> None:
    pair = node.keep_warm(node.run(HELLO)[0])
    _, plain = node.run(HELLO, env={"LANG": "C"}, warm=0.0)
    assert not plain.warm.warm and not plain.warm.why and pairs.lives(pair)
    _, fresh = node.run(HELLO, fresh=True)
    assert not fresh.warm.warm and not fresh.warm.why and pairs.lives(pair)
    job, other = node.run(HELLO, env={"LANG": "C"})
    assert other.warm.why == "cold start: LANG differs"
    assert not alive(pair.pid) and not living(pair.token)
    assert node.keep_warm(job).key != pair.key


def test_only_who_asks_starts_from_what_others_left(node: WarmNode) -> None:
    """A launch without --warm does not, whatever waits there; nor does a job's first attempt."""
    pair = node.keep_warm(node.run(HELLO)[0])
    for fields in ({}, {"start": "plain"}, {"attempt": attempt_of("a", 1)}):
        job, answer = node.run(HELLO, warm=0.0, **fields)
        assert not answer.warm.warm and not answer.warm.why and job.output == {"0": "hello\n"}
    _, other = node.run(HELLO, warm=0.0, attempt=attempt_of("a", 2))
    assert other.warm.why == "cold start: nothing waited there" and pairs.lives(pair)


def test_what_waits_for_a_jobs_next_attempt_is_that_jobs_alone(node: WarmNode) -> None:
    job, _ = node.run(HELLO, warm=0.0, attempt=attempt_of("first", 1))
    assert pairs.start(job.run, os.environ, 0o022, 600.0) == ""
    pair = node.ready()
    _, asked = node.run(HELLO)
    assert asked.warm.why == "cold start: nothing waited there" and pairs.lives(pair)
    _, another = node.run(HELLO, warm=0.0, attempt=attempt_of("another", 2))
    assert another.warm.why == "cold start: nothing waited there" and pairs.lives(pair)
    _, its = node.run(HELLO, warm=0.0, attempt=attempt_of("first", 2))
    assert its.warm.warm and its.supervisor == pair.pid


def attempt_of(job: str, number: int) -> dict[str, Any]:
    return {"number": number, "restarts": 3, "first_job": job, "first_node": 0}


def test_a_package_that_changed_is_imported_anew(node: WarmNode) -> None:
    pair = node.keep_warm(node.run(HELLO)[0])
    node.package("torch.__init__", "version = 2\n")
    job, cold = node.run("import torch; print(torch.version)")
    assert not cold.warm.warm and "torch/__init__.py has changed" in cold.warm.why
    assert job.output == {"0": "2\n"} and not alive(pair.pid)


@pytest.mark.parametrize("changed", ["src/edited.py", "site-packages/editable.pth"])
def test_what_a_package_imports_and_where_it_is_found_is_imported_anew(
    node: WarmNode, changed: str
) -> None:
    """What is installed to be edited lies among no packages: a file there says where it is."""
    source = node.directory / "src"
    source.mkdir()
    (source / "edited.py").write_text("version = 1\n")
    (node.packages / "editable.pth").write_text(f"{source}\n")
    node.package("quiet", "import edited")
    env = {"PYTHONPATH": f"{node.packages}{os.pathsep}{source}"}
    pair = node.keep_warm(node.run("import quiet", env=env)[0])
    (node.directory / changed).write_text("version = 22\n")
    _, cold = node.run("import quiet", env=env)
    assert not cold.warm.warm and f"{changed} has changed" in cold.warm.why
    assert not alive(pair.pid)


def test_a_variable_that_a_package_reads_is_seen(node: WarmNode) -> None:
    node.package("torch.__init__", "import os; seen = os.environ.get('ODD')")
    program = "import torch; print(torch.seen)"
    node.keep_warm(node.run(program)[0])
    job, cold = node.run(program, env={"ODD": "7"})
    assert not cold.warm.warm and "ODD, which a package reads" in cold.warm.why
    assert job.output == {"0": "7\n"}


LOUD = {
    "thread": "import _thread, time; _thread.start_new_thread(time.sleep, (1e6,))",
    "socket": "import socket; kept = socket.socket()",
    "rank": "import os; rank = os.environ.get('RANK')",
    "signal": "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)",
    "variable": "import os; os.environ['SET'] = 'by a package'",
    "hook": "import sys; sys.excepthook = print",
    "path": "import sys; sys.path.append('/somewhere')",
    "directory": "import os; os.chdir('/')",
    "method": "import multiprocessing; multiprocessing.set_start_method('spawn')",
    "error": "raise ValueError",
}
# Each package in a process of its own, from which a job could start until then.
IMPORTS_EACH = """
import json, os, socket, sys
sys.path[:0] = sys.argv[1:3]
from orchestrator.node.warm import agent
control, ours = socket.socketpair()
for name in sys.argv[3:]:
    if not os.fork():
        ours.close()
        sys.argv[1] = str(control.fileno())
        print(name, json.dumps(agent.imported([f"loud_{name}", "quiet"], (), control)), flush=True)
        os._exit(0)
    os.wait()
"""


def test_packages_that_are_not_quiet_are_found(node: WarmNode) -> None:
    for name, text in {**LOUD, "nothing": ""}.items():
        node.package(f"loud_{name}", text)
    node.package("quiet", "")
    words = ["-c", IMPORTS_EACH, node.library, node.packages, *LOUD, "nothing"]
    told = subprocess.run([PYTHON, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True)
    rows = (line.partition(" ") for line in told.stdout.splitlines())
    found = {name: json.loads(answer) for name, _, answer in rows}
    assert "ready" in found.pop("nothing")
    assert {name: list(each["packages"]) for name, each in found.items()} == {
        name: [f"loud_{name}"] for name in LOUD
    }


def test_a_package_that_is_not_quiet_is_left_to_the_ranks(node: WarmNode) -> None:
    node.package("quiet", "")
    node.package("loud", LOUD["directory"])
    job, _ = node.run("import loud, quiet")
    pair = node.keep_warm(imports(job, "loud", "quiet"))
    assert pairs.ask(pair)["skipped"] == ["loud"]
    job, warm = node.run("import sys; print('loud' in sys.modules, 'quiet' in sys.modules)")
    assert warm.warm.warm and job.output == {"0": "False True\n"}


def test_all_that_read_their_rank_are_found_in_one_go(node: WarmNode) -> None:
    """Each time torch is imported anew; those that import them are found with them."""
    count = node.directory / "count"
    node.package("torch.__init__", f"open({str(count)!r}, 'a').write('x')\n")
    node.package("reader", "import os; rank = os.environ.get('LOCAL_RANK')")
    node.package("user", "import reader")
    node.package("other", "import os; rank = 'RANK' in os.environ")
    node.package("quiet", "")
    job, _ = node.run(HELLO)
    count.write_text("")
    pair = node.keep_warm(imports(job, "user", "reader", "other", "quiet"))
    assert sorted(pairs.ask(pair)["skipped"]) == ["other", "reader", "user"]
    assert count.read_text() == "xx"


LISTS = """
import os
first = dict(os.environ)
second = {name: value for name, value in os.environ.items() if name.startswith("LISTS_")}
third = os.environ.copy()
"""


def test_who_lists_all_variables_reads_those_with_its_own_name(node: WarmNode) -> None:
    node.package("lists", LISTS)
    program = "import lists; print(sorted(lists.second))"
    node.keep_warm(imports(node.run(program)[0], "lists"))
    job, warm = node.run(program, env={"ODD": "7", "SSH_CLIENT": "10.0.0.1 50000 22"})
    assert warm.warm.warm, warm.warm.why
    node.keep_warm(imports(job, "lists"))
    job, cold = node.run(program, env={"LISTS_A": "1"})
    assert "LISTS_A, which a package reads" in cold.warm.why
    assert job.output == {"0": "['LISTS_A']\n"}


def test_a_job_does_not_wait_for_all_that_is_still_imported(node: WarmNode) -> None:
    """The package ends its import once the process is told that somebody waits."""
    begun = node.directory / "begun"
    waits = "import select, sys; select.select([int(sys.argv[1])], [], [])"
    node.package("slow", f"open({str(begun)!r}, 'w').close()\n{waits}")
    node.package("late", "")
    job, _ = node.run(HELLO)
    visit = Visit(umask=0o022).of(WarmVisit)
    visit.followed = imports(job, "slow", "late").run
    visit.job_over()
    wait_until(begun.exists, "the import")
    program = "import sys; print('slow' in sys.modules, 'late' in sys.modules)"
    job, warm = node.run(program)
    assert warm.warm.warm, warm.warm.why
    assert job.output == {"0": "True False\n"}


def test_a_rank_notes_its_packages_and_nothing_of_the_users(node: WarmNode) -> None:
    node.package("quiet", "")
    (node.directory / "own.py").write_text("")
    job, _ = node.run("import own, quiet, json")
    names = json.loads(Path(job.run.path, "modules.json").read_text())
    assert "quiet" in names and not {"own", "json", "__main__"} & set(names)


def test_a_torch_that_is_not_quiet_is_remembered(node: WarmNode) -> None:
    node.package("torch.__init__", "import socket; kept = socket.socket()")
    job, _ = node.run(HELLO)
    pairs.start(job.run, os.environ, 0o022)
    wait_until(lambda: not pairs.all_pairs(), "its end")
    _, cold = node.run(HELLO)
    assert cold.warm.why == "cold start: torch opens sockets when it is imported"


def test_it_leaves_after_its_time(node: WarmNode) -> None:
    job, _ = node.run(HELLO, warm=0.001)
    pairs.start(job.run, os.environ, 0o022)
    wait_until(lambda: not pairs.all_pairs(), "its end")
    _, cold = node.run(HELLO)
    assert cold.warm.why == "cold start: what waited there has left: its time was over"
    assert pairs.start_for(job.run.read_spec().replace(warm=60.0), job.run, os.environ, 0o022) == ""
    names = {path.name for path in Path(pairs.root()).iterdir()}
    assert names == {pair.key for pair in pairs.all_pairs()}, "what was noted is forgotten"


def test_it_stays_for_as_long_as_the_last_job_said(
    node: WarmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was made for the next attempt of a job is kept afterwards, but not for its hour."""
    job, _ = node.run(HELLO)
    spec = job.run.read_spec()
    for seconds in (3600.0, 60.0, 3600.0):
        assert pairs.start_for(spec.replace(warm=seconds), job.run, os.environ, 0o022) == ""
        (pair,) = pairs.all_pairs()
        assert seconds - 60 < pairs.ask(pair)["left"] <= seconds
    monkeypatch.setattr(time, "time", partial(add, time.time(), 1e6))
    assert [each.key for each in pairs.all_pairs()] == [pair.key], "the clock was set"


MEMORY = "MemTotal:       1000 kB\nMemFree:           1 kB\nMemAvailable:   {} kB\n"
STALLS = "some avg10=0.00 avg60={} avg300=1.22 total=5\nfull avg10=99.00 avg60=99.00 total=5\n"


def short_of_memory(node: WarmNode) -> None:
    (node.directory / "meminfo").write_text(MEMORY.format(79))


def stalls(node: WarmNode) -> None:
    (node.directory / "pressure").write_text(STALLS.format("10.01"))


def new_package(node: WarmNode) -> None:
    node.package("another", "")


def no_library(node: WarmNode) -> None:
    shutil.rmtree(node.library)


@pytest.mark.parametrize("happens", [short_of_memory, stalls, new_package, no_library])
def test_it_leaves_by_itself(node: WarmNode, happens: Callable[[WarmNode], None]) -> None:
    """It looks when somebody calls, and every 15 s; until something happens it stays."""
    files = {"/proc/meminfo": MEMORY.format(80), "/proc/pressure/memory": STALLS.format("10.00")}
    for path, text in files.items():
        own = node.directory / Path(path).name.replace("memory", "pressure")
        own.write_text(text)
        node.edit("orchestrator/node/warm/standby.py", path, str(own))
    pair = node.keep_warm(node.run(HELLO)[0])
    agent = pairs.ask(pair)["agent"]
    assert pairs.ask(pair)["ready"]
    happens(node)
    pairs.ask(pair)
    wait_until(lambda: not alive(pair.pid) and not alive(agent), "the end of both")
    assert not pairs.all_pairs() and not Path(pair.directory).exists()


def test_no_more_than_two_wait(node: WarmNode) -> None:
    job, _ = node.run(HELLO)
    spec = job.run.read_spec()
    began = []
    for language in ("C", "POSIX", "C.UTF-8"):
        own = spec.replace(env={**spec.env, "LANG": language})
        assert pairs.start_for(own, job.run, os.environ, 0o022) == ""
        before = {pair.key for pair in began}
        began.append(next(pair for pair in pairs.all_pairs() if pair.key not in before))
    assert [pair.key for pair in pairs.all_pairs()] == [pair.key for pair in began[1:]]
    assert not alive(began[0].pid) and not living(began[0].token)


@pytest.mark.parametrize("which", ["supervisor", "agent"])
def test_a_killed_process_is_a_cold_start(node: WarmNode, which: str) -> None:
    pair = node.keep_warm(node.run(HELLO)[0])
    agent = pairs.ask(pair)["agent"]
    os.kill(pair.pid if which == "supervisor" else agent, signal.SIGKILL)
    wait_until(lambda: not alive(agent) and not alive(pair.pid), "the end of both")
    job, cold = node.run(HELLO)
    assert not cold.warm.warm and job.output == {"0": "hello\n"}
    whys = {"supervisor": "the process that waited was killed"}
    why = whys.get(which, "what waited there has left: its torchrun ended")
    assert cold.warm.why == f"cold start: {why}"


def test_one_that_does_not_answer_is_killed(
    node: WarmNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = node.keep_warm(node.run(HELLO)[0])
    monkeypatch.setattr(pairs, "ANSWER_SECONDS", 0.2)
    os.kill(pair.pid, signal.SIGSTOP)
    job, cold = node.run(HELLO)
    assert cold.warm.why == "cold start: the warm process did not answer"
    assert job.output == {"0": "hello\n"} and not alive(pair.pid) and not living(pair.token)


# -- a stop meanwhile -------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_a_stop_during_the_hand_over(
    node: WarmNode, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whatever comes first: nothing is left, and nothing starts afterwards."""
    pair = node.keep_warm(node.run(HELLO)[0])
    agent = pairs.ask(pair)["agent"]
    receipts = []
    send = frames.send

    def send_and_stop(connection: Any, message: dict[str, Any], files: Any = ()) -> None:
        asks, goes = message.get("do") == "take", bool(message.get("go"))
        if moment == "after" and goes:
            send(connection, message, files)
        if goes or (asks and moment == "before"):
            run = node.jobs[-1].run
            stop = Stop(job=run.job, node=0, why="enough", grace=0.0, wait=PATIENCE)
            receipts.append(stop_job.stop(run, stop))
        if not (moment == "after" and goes):
            send(connection, message, files)

    monkeypatch.setattr(handover, "frames", _With(send_and_stop))
    try:
        node.start(WAITS)
    except Refusal as refusal:
        assert refusal.kind == STOPPED or "did not start" in str(refusal)
    assert receipts and not any(receipt.left for receipt in receipts)
    run = node.jobs[-1].run
    wait_until(lambda: run.last(Ended), "the end")
    wait_until(lambda: not alive(pair.pid) and not alive(agent), "the end of both")
    assert not job_processes.of_job(run.job, 0)


HOLD = """\
def hold():  # until nobody holds the other end
    with open({fifo!r}) as end:
        end.read()


"""
STANDBY, AGENT = "orchestrator/node/warm/standby.py", "orchestrator/node/warm/agent.py"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (STANDBY, '        reason = self.outdated(order["environment"])'),
        (STANDBY, "            self.job_taken = spec, order, [*files]"),
        (STANDBY, "    process_title.show_command([*program, *names])"),
        (STANDBY, "    standby.close()"),
        (STANDBY, "    run_job(WarmSupervisor(RunDir(spec.job"),
        (AGENT, '    agent_start.settle(cast("AgentStart", order))'),
        (AGENT, "    process_title.show_command(command)"),
    ],
)
def test_a_stop_at_every_moment_after_the_offer(node: WarmNode, file: str, line: str) -> None:
    """The process is held before that line until the stop has answered."""
    fifo = str(node.directory / "hold")
    os.mkfifo(fifo)
    indent = line[: len(line) - len(line.lstrip())]
    node.edit(file, line, f"{indent}hold()\n{line}")
    node.edit(file, "\nclass ", "\n" + HOLD.format(fifo=fifo) + "class ", count=1)
    pair = node.keep_warm(node.run(HELLO)[0])
    agent = pairs.ask(pair)["agent"]
    job, receipts = node.new_job(), []
    node.jobs.append(job)
    spec = node.spec(job, WAITS)

    def start() -> None:
        with contextlib.suppress(Refusal):
            Visit(umask=0o022).answer(Start(spec=spec))

    def stop() -> None:
        order = Stop(job=job.run.job, node=0, why="enough", grace=0.0, wait=PATIENCE)
        receipts.append(stop_job.stop(job.run, order))

    starting, stopping = threading.Thread(target=start), threading.Thread(target=stop)
    starting.start()
    held = wait_until(lambda: is_held(fifo), "the moment")
    stopping.start()
    stopping.join(PATIENCE)
    os.close(held)
    for thread in (stopping, starting):
        thread.join(PATIENCE)
    (receipt,) = receipts
    assert not receipt.left
    wait_until(lambda: job.run.last(Ended), "the end")
    wait_until(lambda: not alive(pair.pid) and not alive(agent), "the end of both")
    assert not job_processes.of_job(job.run.job, 0) and not living(pair.token)
    assert not Path(job.run.log).exists() or "waits" not in job.output.get("0", "")


def is_held(fifo: str) -> int | None:
    """Return the other end, once somebody reads."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


class _With:
    """The module, with another `send`."""

    def __init__(self, send: Any) -> None:
        self.send, self.receive = send, frames.receive


def test_what_is_left_of_another_boot_is_removed_when_it_is_old(home: Path) -> None:
    """Homes may be shared: a pair that may still wait on another machine stays."""
    record = {"pid": 1, "started": 1, "token": "t", "idle": 60.0, "setting": {"the machine": "m"}}
    for name, since in (("a" * 16, time.time()), ("b" * 16, 1e9), ("c" * 16, time.time())):
        path = home / "warm" / name
        path.mkdir(parents=True)
        here = {"the machine": setting.machine()} if name.startswith("c") else record["setting"]
        (path / "pair.json").write_text(json.dumps({**record, "since": since, "setting": here}))
        os.utime(path, (since, since))
    assert pairs.all_pairs() == []
    assert [path.name for path in (home / "warm").iterdir()] == ["a" * 16]


# -- what runs when Python starts -------------------------------------------------------------

HOOK = "import builtins, os\nbuiltins.HOOKED = os.environ.get('HOOK', 'off')\n"
HOOKED = "import builtins; print(builtins.HOOKED)"


def test_a_hook_at_the_start_of_python_runs_as_after_a_cold_start(node: WarmNode) -> None:
    """So work ddtrace-run, opentelemetry-instrument and coverage: a variable turns them on."""
    node.package("sitecustomize", HOOK)
    hook = {"HOOK": "on"}
    cold, _ = node.run(HOOKED, env=hook)
    pair = node.keep_warm(cold)
    warm, answer = node.run(HOOKED, env=hook)
    assert answer.warm.warm, answer.warm.why
    assert cold.output == warm.output == {"0": "on\n"}
    for env, said in (({"HOOK": "other"}, "other\n"), ({}, "off\n")):
        node.keep_warm(warm)
        other, answer = node.run(HOOKED, env=env)
        assert "HOOK, which a package reads" in answer.warm.why and not answer.warm.warm
        assert other.output == {"0": said}
    assert not alive(pair.pid)


def test_a_variable_that_nothing_reads_is_not_kept(node: WarmNode) -> None:
    node.package("sitecustomize", HOOK)
    env = {"HOOK": "on", "ODD": "o" * 2000, "ADDRESS": "https://me:pass@host/", "TOKEN": "t" * 99}
    pair = node.keep_warm(node.run(HOOKED, env=env)[0])
    variables = processes.environment(pairs.ask(pair)["agent"])
    assert b"HOOK=on" in variables
    assert not any(name.startswith((b"ODD=", b"ADDRESS=", b"TOKEN=")) for name in variables)
    kept = Path(pair.directory, "pair.json").read_text()
    assert "ooo" not in kept and "pass@" not in kept


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os; os.environ.get('RANK')", "sitecustomize reads RANK when Python starts"),
        (
            "import _thread, time; _thread.start_new_thread(time.sleep, (1e6,))",
            "what Python imports at its start starts threads when it is imported",
        ),
    ],
)
def test_a_hook_that_no_waiting_process_can_stand_for_is_cold(
    node: WarmNode, text: str, why: str
) -> None:
    node.package("sitecustomize", text)
    job, _ = node.run(HELLO)
    pairs.start(job.run, os.environ, 0o022)
    wait_until(lambda: not pairs.all_pairs(), "its end")
    _, cold = node.run(HELLO)
    assert cold.warm.why == f"cold start: {why}"
