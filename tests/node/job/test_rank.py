"""Held against the real thing: what `python program args` does, a rank does."""

import importlib
import json
import os
import re
import signal
import subprocess
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.node.job.ranks import rank
from tests.node.running import PATIENCE, PYTHON, STAND_IN, alive, wait_until

pytestmark = pytest.mark.slow

RANK_PROGRAM = Path(rank.__file__)


@dataclass
class Ranks:
    """The ranks that one torchrun starts, with this test for their supervisor."""

    run: Path
    agent: subprocess.Popen[bytes]
    outputs: list[int]
    reports_fd: int
    output: str = ""
    _reports: bytes = b""
    # This is the output of the other ranks.
    others: str = ""

    def read(self) -> "Ranks":
        self.output += read(self.outputs[0]).decode()
        self.others += "".join(read(fd).decode() for fd in self.outputs[1:])
        self._reports += read(self.reports_fd)
        return self

    def reports(self, kind: str = "") -> list[dict[str, Any]]:
        self.read()
        lines = map(json.loads, self._reports.splitlines())
        return [line for line in lines if kind in ("", line["event"])]

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.read().output, repr(words))

    def end(self) -> int:
        """The exit code of rank 0; `output` is then all it said."""
        self.agent.wait(PATIENCE)
        (ended,) = [report for report in self.reports("ended") if report["rank"] == 0]
        assert isinstance(ended["code"], int)
        return ended["code"]


def read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""


Begin = Callable[..., Ranks]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    running: list[Ranks] = []

    def start(how: str, name: str, *args: str, kind: str = "script", **options: Any) -> Ranks:
        run = tmp_path / f"run{len(running)}"
        run.mkdir()
        target = {"kind": kind, "name": name, "args": list(args)}
        spec = {"start": how, "workdir": str(options.get("workdir", tmp_path)), "target": target}
        (run / "spec.json").write_text(json.dumps(spec))
        fds = []
        nproc = options.get("nproc", 1)
        for fifo in [*(f"out_{local}" for local in range(nproc)), "reports"]:
            os.mkfifo(run / fifo)
            fds.append(os.open(run / fifo, os.O_RDWR | os.O_NONBLOCK))
        words = [*(["--fork"] if how == "fork" else []), *options.get("agent", ())]
        agent = subprocess.Popen(
            [PYTHON, "-u", str(STAND_IN), *words, f"--nproc={nproc}",
             f"--log-dir={run}", str(RANK_PROGRAM)],
            env={**os.environ, "ORCHESTRATOR_RUN": str(run), **options.get("env", {})},
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        running.append(Ranks(run, agent, fds[:-1], fds[-1]))
        return running[-1]

    yield start
    for ranks in running:
        for report in ranks.reports("started"):
            if alive(report["pid"]):
                os.kill(report["pid"], signal.SIGKILL)
        ranks.agent.kill()
        ranks.agent.wait()
        for fd in [*ranks.outputs, ranks.reports_fd]:
            os.close(fd)


both = pytest.mark.parametrize("start", ["fork", "plain"])

SEES = """
import json, multiprocessing, os, signal, sys
import __main__
try:
    import sibling
except ImportError:
    sibling = None
multiprocessing.set_start_method("spawn")
def down(n): return n and down(n - 1)
sees = dict(
    argv=sys.argv[1:], path=sys.path, name=__name__, file=__file__, cwd=os.getcwd(),
    main=__main__.__dict__ is globals(), sibling=getattr(sibling, "here", None),
    signals=[str(signal.getsignal(n)) for n in signal.valid_signals() if n not in (9, 19)],
    mask=list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    process=multiprocessing.current_process().name, stdin=sys.stdin.read(),
    hooks=[sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
    executable=sys.executable, deep=down(980), flags=str(sys.flags),
    shells=os.environ["PWD"], streams=[sys.stdout.write_through, repr(sys.stdout.buffer)],
    shown=ascii(open("/proc/self/cmdline", "rb").read().rstrip(b"\\0")),
    session=os.getpid() == os.getsid(0) == os.getpgrp(),
)
with open(os.environ["SEES"], "w") as file:
    json.dump(sees, file, default=str)
"""


@pytest.fixture(scope="module")
def program_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    for directory in ("real", "package", "directory"):
        (tree / directory).mkdir()
        (tree / directory / "__main__.py").write_text(SEES)
        (tree / directory / "sibling.py").write_text(f"here = {directory!r}")
    (tree / "real" / "train.py").write_text(SEES)
    (tree / "link.py").symlink_to("real/train.py")
    (tree / "odd näme, $x.py").write_text(SEES)
    return tree


@both
@pytest.mark.parametrize(
    "name",
    ["./real/../link.py", "odd näme, $x.py", "directory", "-m package", "/real/train.py"],
)
def test_program_sees_same_as_under_python(
    begin: Begin, program_tree: Path, tmp_path: Path, start: str, name: str
) -> None:
    if name.startswith("/"):
        name = f"{program_tree}{name}"
    compare_with_python(begin, program_tree, tmp_path, start, name, {})


@both
@pytest.mark.parametrize("name", ["real/train.py", "-m package"])
def test_program_sees_same_with_safe_path(
    begin: Begin, program_tree: Path, tmp_path: Path, start: str, name: str
) -> None:
    env = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(program_tree)}
    compare_with_python(begin, program_tree, tmp_path, start, name, env)


def compare_with_python(
    begin: Begin, program_tree: Path, tmp_path: Path, start: str, name: str, more: dict[str, str]
) -> None:
    args = ["a b", "", "--flag", "$x", "*", "é\udcff"]
    env = {**os.environ, **more, "SEES": str(tmp_path / "python"), "PWD": str(program_tree)}
    words = ["-m", name[3:]] if name.startswith("-m") else [name]
    subprocess.run(
        [PYTHON, "-u", *words, *args],
        check=True, env=env, cwd=program_tree, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    kind = "module" if name.startswith("-m") else "script"
    env = {**more, "SEES": str(tmp_path / "rank")}
    ranks = begin(start, words[-1], *args, kind=kind, workdir=program_tree, env=env)
    assert ranks.end() == 0, ranks.output
    python, seen = (
        json.loads(re.sub(" at 0x[0-9a-f]+", "", (tmp_path / who).read_text()))
        for who in ("python", "rank")
    )
    # In the room that the command line of its parent had
    assert python.pop("shown").startswith(seen.pop("shown")[:-1])
    assert seen == python


ENDS = """
import atexit, ctypes, logging.handlers, os, signal, sys, tempfile, threading, time, weakref
how = sys.argv[1]
class Thing: pass
thing = Thing()
weakref.finalize(thing, print, "finalized")
atexit.register(print, "atexit: registered first, called last")
unclosed = open("unclosed.txt", "w")
unclosed.write("written")
memory = logging.handlers.MemoryHandler(99, target=logging.StreamHandler())
logging.getLogger().addHandler(memory)
logging.error("flushed at the end")
kept = tempfile.TemporaryDirectory()
open("kept.txt", "w").write(kept.name)
print("no newline, not flushed", end=" ")
sys.stderr.write("nor this: ")
def deeper(depth):
    return deeper(depth - 1) if depth else [][1]
def later():
    time.sleep(0.2)
    print("the thread's last word")
if how == "exit 3": sys.exit(3)
if how == "exit words": sys.exit("these words")
if how == "raise": deeper(3)
if how == "raise a chain":
    try: deeper(0)
    except IndexError as error: raise ValueError("two\\nlines") from error
if how == "_exit 5": os._exit(5)
if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
if how == "abort": os.abort()
if how == "thread": threading.Thread(target=later).start()
if how == "daemon": threading.Thread(target=time.sleep, args=[99], daemon=True).start()
if how == "excepthook":
    sys.excepthook = lambda kind, value, trace: print("hooked", kind.__name__, trace.tb_lineno)
    deeper(3)
if how == "raise atexit": atexit.register(deeper, 0)
print("the last line, without an end", end="", flush=how == "raise atexit")
"""

HOWS = re.findall(r'^if how == "(.*?)"', ENDS, re.MULTILINE)


@pytest.mark.parametrize("how", ["just ends", *HOWS])
def test_program_ends_as_under_python(begin: Begin, tmp_path: Path, how: str) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    python = subprocess.run(
        [PYTHON, "-u", "ends.py", how],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    left = (tmp_path / "unclosed.txt").read_text()
    kept = Path((tmp_path / "kept.txt").read_text()).exists()
    for start in ("fork", "plain"):
        (tmp_path / "unclosed.txt").unlink()
        ranks = begin(start, "ends.py", how)
        code = ranks.end()
        said = ranks.output
        wanted = python.stdout
        # Our handler also shows the Python stack.
        if how == "abort":
            said = said.partition("Fatal Python error")[0]
        said, wanted = (re.sub(" at 0x[0-9a-f]+", "", text) for text in (said, wanted))
        assert (code, said) == (python.returncode, wanted), start
        assert (tmp_path / "unclosed.txt").read_text() == left
        assert Path((tmp_path / "kept.txt").read_text()).exists() == kept
        assert bool(ranks.reports("finished")) == (code == 0)


@both
def test_crash_shows_python_stack(begin: Begin, tmp_path: Path, start: str) -> None:
    text = "import ctypes\ndef reads_nothing():\n    ctypes.string_at(0)\nreads_nothing()\n"
    (tmp_path / "crash.py").write_text(text)
    ranks = begin(start, "crash.py")
    assert ranks.end() == -signal.SIGSEGV
    assert f'File "{tmp_path}/crash.py", line 3 in reads_nothing' in ranks.output


USES_PROCESSES = """
import multiprocessing, os, sys
def square(x):
    return x * x
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(square, [1, 2, 3]), flush=True)
    multiprocessing.get_context("fork").Process(target=print, args=["joined at exit"]).start()
"""


@both
def test_multiprocessing_works_in_rank(begin: Begin, tmp_path: Path, start: str) -> None:
    (tmp_path / "uses.py").write_text(USES_PROCESSES)
    ranks = begin(start, "uses.py")
    assert ranks.end() == 0
    assert sorted(ranks.output.splitlines()) == [
        "fork [1, 4, 9]", "joined at exit", "spawn [1, 4, 9]"
    ]  # fmt: skip


OUTLIVED = """
import multiprocessing, os, sys
if sys.argv[1] == "daemon":
    wait = lambda: open("go").read()
    multiprocessing.get_context("fork").Process(target=wait, daemon=True).start()
    os._exit(0)
if os.fork() == 0:
    os.setsid()
    open("go").read()
    os._exit(0)
"""
NEVER_ENDS = """
import multiprocessing, sys, threading
frame = sys._getframe()
while "LEAVING_SECONDS" not in frame.f_globals:
    frame = frame.f_back
frame.f_globals["LEAVING_SECONDS"] = 0.1
wait = lambda: open("go").read()
if sys.argv[1] == "thread":
    threading.Thread(target=wait, name="prefetch").start()
else:
    multiprocessing.get_context("fork").Process(target=wait, name="prefetch").start()
raise ValueError("boom")
"""


@both
@pytest.mark.parametrize(
    ("program", "how", "code"),
    [
        (OUTLIVED, "daemon", 0),
        (OUTLIVED, "", 0),
        (NEVER_ENDS, "thread", 1),
        (NEVER_ENDS, "process", 1),
    ],
    ids=["process of multiprocessing", "daemon", "thread after a failure", "process after one"],
)
def test_rank_ends_although_something_of_it_lives(
    begin: Begin, tmp_path: Path, start: str, program: str, how: str, code: int
) -> None:
    os.mkfifo(tmp_path / "go")
    (tmp_path / "outlived.py").write_text(program)
    ranks = begin(start, "outlived.py", how)
    try:
        assert ranks.end() == code
    finally:
        if how != "thread":
            (tmp_path / "go").write_text("")
    assert ("ValueError: boom" in ranks.output) == bool(code)
    assert ("the program has failed, and its threads" in ranks.output) == bool(code)


@both
def test_shell_program_gets_default_signals(begin: Begin, tmp_path: Path, start: str) -> None:
    program = tmp_path / "program"
    text = """#!/bin/sh
printf '<%s>' "$@"
while read -r name bits; do case $name in Sig[BIC]*) echo "$name $bits"; esac; done </proc/$$/status
exit 7
"""
    program.write_text(text)
    program.chmod(0o755)
    args = ["a b", "", "*", "$(id)"]
    alone = subprocess.run([program, *args], stdout=subprocess.PIPE, text=True, check=False)
    ranks = begin(start, "./program", *args, kind="program")
    assert ranks.end() == 7

    def without_libc(said: str) -> str:
        """Mask libc's own signals, 32 and 33, which depend on the parent process."""
        return re.sub("[0-9a-f]{16}", lambda bits: hex(int(bits[0], 16) & 0x7FFFFFFF), said)

    assert without_libc(ranks.output) == without_libc(alone.stdout)
    assert not ranks.reports("finished")


@both
def test_missing_program_is_reported(begin: Begin, start: str) -> None:
    ranks = begin(start, "./missing", kind="program")
    assert ranks.end() == 1
    error = json.loads((ranks.run / "error_0.json").read_text())
    assert error["type"] == "FileNotFoundError"


@both
def test_exception_is_recorded_with_users_line(begin: Begin, tmp_path: Path, start: str) -> None:
    text = "import json\ndef load():\n    return json.loads('{')\nload()  # here\n"
    # A path that looks like the interpreter's own is the user's all the same.
    (tmp_path / "runpython.py").write_text(text)
    ranks = begin(start, "runpython.py")
    assert ranks.end() == 1
    error = json.loads((ranks.run / "error_0.json").read_text())
    assert error["type"] == "JSONDecodeError"
    assert error["message"].startswith("Expecting property name")
    assert error["traceback"] == ranks.output
    assert (error["file"], error["line"]) == (str(tmp_path / "runpython.py"), 3)
    assert error["function"] == "load"


def test_users_line_skips_trainer() -> None:
    ours = Path(orchestrator.__file__).parent / "engine" / "trainer.py"
    calls = [("/home/me/train.py", 9, "<module>", "t.train()"), (str(ours), 434, "train", "")]
    assert rank.users_line(traceback.StackSummary.from_list(calls)).lineno == 9
    assert rank.users_line(traceback.StackSummary.from_list(calls[1:])).lineno == 434
    installed = "/venv/lib/python3.11/site-packages/"
    calls = [
        (f"{installed}tool/cli.py", 3, "<module>", ""),
        (f"{installed}tool/run.py", 7, "main", ""),
        (f"{installed}torch/testing/_comparison.py", 1631, "assert_close", ""),
        ("/tmp/torchinductor_me/ab/cab.py", 915, "call", ""),
    ]
    assert rank.users_line(traceback.StackSummary.from_list(calls)).lineno == 7


def test_forked_ranks_draw_different_numbers(begin: Begin, tmp_path: Path) -> None:
    found = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    if subprocess.run([PYTHON, "-c", found], check=False).returncode:
        pytest.skip(f"{PYTHON} has no torch")
    drawn = "random.random(), numpy.random.random(), torch.rand(2).tolist()[1]"
    (tmp_path / "draw.py").write_text(f"import numpy, random, torch\nprint({drawn})")
    agent = ["--import=torch", "--import=numpy.random"]
    ranks = begin("fork", "draw.py", nproc=2, agent=agent)
    assert ranks.end() == 0
    ranks.read()
    numbers = [*ranks.output.split(), *ranks.others.split()]
    assert len(set(numbers)) == 6


@both
def test_rank_keeps_temporary_files_of_torchrun(begin: Begin, tmp_path: Path, start: str) -> None:
    (tmp_path / "ends.py").write_text("")
    ranks = begin(start, "ends.py")
    assert ranks.end() == 0
    assert ranks.agent.returncode == 0


# -- the keeper -------------------------------------------------------------------------------

WAITS = """
import signal, time
def got(number, frame):
    print("got", signal.Signals(number).name, flush=True)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, got)
print("waiting", flush=True)
while True:
    time.sleep(0.01)
"""


@both
def test_keeper_forwards_signals_and_takes_rank_along(
    begin: Begin, tmp_path: Path, start: str
) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    ranks = begin(start, "waits.py")
    ranks.wait_for("waiting")
    (started,) = wait_until(lambda: ranks.reports("started"))
    assert started["pid"] != started["keeper"]
    for name in ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"):
        os.kill(started["keeper"], signal.Signals[name])
        ranks.wait_for(f"got {name}")
    os.kill(started["keeper"], signal.SIGKILL)
    wait_until(lambda: not alive(started["pid"]), "the end of the rank")


@both
def test_peak_memory_is_of_rank_alone(begin: Begin, tmp_path: Path, start: str) -> None:
    (tmp_path / "big.py").write_text("x = bytearray(200 << 20); x[::4096] = b'1' * (200 << 8)")
    ranks = begin(start, "big.py")
    assert ranks.end() == 0
    (ended,) = ranks.reports("ended")
    assert 200 << 10 < ended["peak_kb"] < 300 << 10


def test_rank_imports_nothing_of_package() -> None:
    """It shares a process with the program, which may have a module of any name."""
    where = str(RANK_PROGRAM.parent)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import rank; print(*sys.modules)"
    words = [PYTHON, "-IS", "-c", code, where]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=True)
    names = done.stdout.decode().split()
    assert not [name for name in names if name.startswith("orchestrator")]
    assert importlib.util.find_spec("orchestrator")
