"""The link program, shipped and started as over SSH, with pipes in the place of the channel."""

import ast
import contextlib
import fcntl
import json
import os
import selectors
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.connect.channel import NodeChannel
from orchestrator.head.nodes.environment import Environment
from orchestrator.head.nodes.library import own_library
from orchestrator.node.job import job_processes
from orchestrator.node.job.run_directory import (
    RunDir,
    connect_supervisor,
    note_stop_of_all,
    runs_here,
)
from orchestrator.node.server.session import Refusal, ServerSession
from orchestrator.node.start import start as node_start
from orchestrator.protocol.requests.follow import (
    AskJobState,
    Follow,
    JobState,
    RankState,
    Stop,
    StopAll,
    StopReceipt,
)
from orchestrator.protocol.requests.machine import PortRequest, Probe
from orchestrator.protocol.requests.request import Ping
from orchestrator.protocol.requests.start import Start
from orchestrator.protocol.spec import Target
from tests.node.running import (
    PATIENCE,
    PYTHON,
    Job,
    alive,
    script,
    spare_others,
    spec_of,
    streams,
    wait_until,
)

OFFSET = struct.Struct(">Q")
F_SETPIPE_SZ = 1031
NewJob = Callable[..., Job]


class Pipes:
    """The interface of an SSH connection and its channel, with a local process behind it."""

    def __init__(self, before: str, env: dict[str, str]) -> None:
        self.before, self.env = before, env
        self.timeout = PATIENCE

    def run(self, command: str, timeout: float) -> Any:
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f"{self.before}\n{command}"],
            env={**os.environ, **self.env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        # A login that reads nothing yet still takes our program: sshd's window is 2 MB.
        fcntl.fcntl(self.stdin, F_SETPIPE_SZ, 1 << 20)
        self.waiting = selectors.DefaultSelector()
        self.waiting.register(self.stdout, selectors.EVENT_READ)
        return self

    def set_combine_stderr(self, _: bool) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        self.timeout = seconds

    def recv(self, size: int) -> bytes:
        if not self.waiting.select(self.timeout):
            raise TimeoutError
        return os.read(self.stdout.fileno(), size)

    def sendall(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the other end of a channel just hears it
            self.stdin.write(data)
            self.stdin.flush()

    def recv_stderr_ready(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        return self.process.returncode is not None

    def recv_stderr(self, size: int) -> bytes:
        assert self.process.stderr
        return self.process.stderr.read(size)

    def close(self) -> None:
        """Close both pipes, as a lost SSH connection does: end of file, and no reader."""
        for file in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                file.close()


class NodeLink(NodeChannel):
    """A link, and what it streams."""

    connection: Any

    def __init__(self, before: str = "", env: dict[str, str] | None = None) -> None:
        super().__init__(Pipes(before, env or {}), Environment(PYTHON), PATIENCE)  # type: ignore[arg-type]

    @property
    def process(self) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = self.connection.process
        return process

    def frames(self, patience: float = PATIENCE) -> Iterator[tuple[bytes, Any]]:
        """('L', (offset, bytes)) ..., ('J', message)."""
        while True:
            kind, size = self.header(time.monotonic() + patience, "silence")
            data = self.exactly(size, time.monotonic() + patience, "silence")
            if kind == b"J":
                yield kind, json.loads(data)
            else:
                yield kind, (OFFSET.unpack(data[:8])[0], data[8:])

    def beats(self) -> Iterator[float]:
        """Yield the server's signs of life, not its answers to those of the head."""
        return (m["beat"] for kind, m in self.frames() if kind == b"J" and "beat" in m)

    def follow(self, job: Job, log: int = 0, ranks: int = 0, events: int = 0) -> None:
        who = {"job": job.run.job, "part": job.run.part, "attempt": 1}
        self.ask(Follow(**who, log=log, ranks=ranks, events=events), PATIENCE)


@pytest.fixture
def new_link(home: Path) -> Iterator[Callable[..., NodeLink]]:
    links: list[NodeLink] = []

    def begin(before: str = "", **env: str) -> NodeLink:
        links.append(NodeLink(before, env))
        links[-1].begin(PATIENCE)
        return links[-1]

    yield begin
    for link in links:
        link.close()
        link.process.kill()
        link.process.wait()
        assert link.process.stderr
        link.process.stderr.close()


NewLink = Callable[..., NodeLink]


class Copy:
    """A head's copy of a run, built from its frames alone; offsets must fit exactly."""

    def __init__(self) -> None:
        self.files = {b"L": b"", b"R": b"", b"E": b""}
        self.gone = False

    def take(self, kind: bytes, content: Any) -> None:
        if kind == b"J":
            self.gone = self.gone or bool(content.get("supervisor_gone"))
            return
        offset, data = content
        assert offset == len(self.files[kind])
        assert data
        self.files[kind] += data
        if kind == b"L":
            # Whose bytes they are was said before they came.
            records = [line.split() for line in self.files[b"R"].splitlines()]
            assert int(records[0][0]) <= offset
        streams(self.files[b"L"][:offset], self.complete_records(offset))

    def complete_records(self, end: int) -> bytes:
        lines = self.files[b"R"].splitlines(keepends=True)
        return b"".join(line for line in lines if int(line.split()[0]) < end)

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.files[b"E"].splitlines()]

    def take_all(self, link: NodeLink) -> None:
        for kind, content in link.frames():
            self.take(kind, content)
            if self.gone:
                return


# -- the way there ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise",
    [
        "",
        "echo Welcome; echo; echo 'orchestrator-0123456789abcdef'",
        "printf 'no end of line'; echo warning >&2",
        "head -c 300000 /dev/urandom",
        "printf '\\n\\0\\377J\\0\\0\\0\\2{}\\n'",
    ],
)
def test_login_noise_is_skipped(new_link: NewLink, noise: str) -> None:
    link = new_link(noise)
    assert link.ask(Ping(), PATIENCE).time == pytest.approx(time.time(), abs=10)


def test_probe_imports_no_unneeded_modules() -> None:
    """A head asks many nodes at once, and often: these take a quarter of the server's start."""
    names = "orchestrator.node.server.server, orchestrator.node.machine.requests"
    code = f"import sys, {names}; print(*sys.modules)"
    repository = Path(__file__).parents[3]
    command = [PYTHON, "-S", "-c", f"import sys; sys.path.insert(0, {str(repository)!r}); {code}"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "orchestrator.node.machine.probe" in loaded
    assert not {"concurrent.futures", "hmac", "secrets", "tempfile", "logging"} & set(loaded)


PACKAGES = {"orchestrator", "orchestrator.node", "orchestrator.engine"}


@pytest.mark.slow
def test_shipped_library_is_self_contained() -> None:
    files = {name: data.decode() for name, data in own_library().files}
    modules = {name.removesuffix(".py").replace("/", ".") for name in files}
    known = modules | {name.removesuffix(".__init__") for name in modules}
    for name, text in files.items():
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                # No node reads it.
                node.body.clear()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("orchestrator"):
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
                missing = [one for one in wanted if not {one, node.module} & (known - PACKAGES)]
                assert not missing or wanted == ["orchestrator.__version__"], (name, missing)


def test_unwritable_home_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    link = NodeLink(env={"ORCHESTRATOR_HOME": str(tmp_path / "file" / "home")})
    with pytest.raises(NodeError, match="Not a directory"):
        link.begin(PATIENCE)
    link.close()


@pytest.mark.slow
def test_server_ends_with_head(new_link: NewLink) -> None:
    link = new_link()
    link.close()
    assert link.process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_heartbeat_comes_every_second(new_link: NewLink) -> None:
    beats = new_link().beats()
    assert 0.9 < -next(beats) + next(beats) < 5


# -- requests ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_probe_holds_port_for_job(new_link: NewLink, tmp_path: Path) -> None:
    request = {
        "cwd": str(tmp_path),
        "workdir": None,
        "peers": (),
        "target": Target(kind="engine", name=""),
    }
    port = PortRequest(wanted=41000, exact=False)
    first = new_link().ask(Probe(**request, port=port), PATIENCE)
    second = new_link().ask(Probe(**request, port=port), PATIENCE)
    assert first.port is not None and second.port is not None
    assert second.port > first.port >= 41000
    assert first.library.startswith(os.environ["ORCHESTRATOR_HOME"])
    assert new_link().ask(Probe(**request), PATIENCE).port is None


@pytest.mark.slow
def test_unknown_job_is_refused(new_link: NewLink) -> None:
    link = new_link()
    for name in ("nothing", "../../etc", ""):
        with pytest.raises(NodeError):
            link.ask(Follow(job=name, part=0, attempt=1, log=0, ranks=0, events=0), PATIENCE)
    with pytest.raises(NodeError, match="this machine knows nothing of job nothing"):
        link.ask(Follow(job="nothing", part=0, attempt=1, log=0, ranks=0, events=0), PATIENCE)
    assert (
        link.ask(AskJobState(job="nothing", part=0, attempt=1), PATIENCE).state == "unknown there"
    )


@pytest.mark.slow
def test_job_starts_once_and_outlives_connection(
    new_link: NewLink, job: Job, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    text = (
        "import os; print('ready'); open('go').read(); print(os.environ['ORCHESTRATOR_EXPERIMENT'])"
    )
    spec = job.spec(script(tmp_path, text), workdir=tmp_path)
    link = new_link()
    answer = link.ask(Start(spec=spec_of(spec)), PATIENCE)
    assert not answer.shared
    assert os.getsid(answer.supervisor) == answer.supervisor
    with pytest.raises(NodeError, match="is here already"):
        link.ask(Start(spec=spec_of(spec)), PATIENCE)
    wait_until(lambda: job.said("ready"))
    # Sshd does this when the connection is gone.
    os.killpg(link.process.pid, signal.SIGKILL)
    link.process.wait()
    (tmp_path / "go").write_text("")
    wait_until(lambda: job.of_kind("ended"))
    assert job.ended() == {0: 0}
    own = Path(job.run.experiment)
    assert job.output["0"] == f"ready\n{own}\n"
    assert (own / "outputs").is_dir()


@pytest.mark.slow
def test_shared_experiment_directory_is_used(
    new_link: NewLink, new_job: NewJob, tmp_path: Path
) -> None:
    job, other = new_job(), new_job()
    (tmp_path / "job.json").write_text(json.dumps({"job": job.run.job}))
    text = "import os; print(os.environ['ORCHESTRATOR_EXPERIMENT'])"
    for one in (job, other):
        spec = one.spec(script(tmp_path, text))
        spec["env"]["ORCHESTRATOR_EXPERIMENT"] = str(tmp_path)
        assert new_link().ask(Start(spec=spec_of(spec)), PATIENCE).shared == (one is job)
        wait_until(lambda one=one: one.of_kind("ended"))
    assert job.output["0"] == f"{tmp_path}\n"
    assert other.output["0"] != f"{tmp_path}\n"


@pytest.mark.slow
def test_job_that_cannot_start_is_explained(new_link: NewLink, new_job: NewJob) -> None:
    job = new_job()
    spec = job.spec({"kind": "script", "name": "x", "args": []}, agent=["/no/such/python"])
    with pytest.raises(NodeError, match="No such file or directory"):
        new_link().ask(Start(spec=spec_of(spec)), PATIENCE)
    broken = new_job()
    spec = broken.spec({"kind": "script", "name": "x", "args": []}, env={"A\0": "B"})
    with pytest.raises(NodeError, match="embedded null byte"):
        new_link().ask(Start(spec=spec_of(spec)), PATIENCE)


@pytest.mark.slow
def test_hanging_supervisor_never_starts_job(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new_job: NewJob
) -> None:
    (tmp_path / "__main__.py").write_text("import time; time.sleep(1000)")
    monkeypatch.setattr(node_start, "LIBRARY", str(tmp_path))
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remember(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)
    spec = new_job().spec({"kind": "script", "name": "x", "args": []})
    with pytest.raises(Refusal, match="did not start"):
        ServerSession().answer(
            Start(spec=spec_of(spec).replace(patience=node_start.TOLD_SECONDS + 0.3))
        )
    assert started[0].wait(PATIENCE) == -signal.SIGKILL
    assert started[0].stdout
    started[0].stdout.close()


# -- following --------------------------------------------------------------------------------

LINES = """
import os, random, sys
random.seed(1)
for number in range(30_000):
    print(os.environ["RANK"], number, "x" * random.randrange(100))
"""


@pytest.mark.slow
def test_stream_resumes_at_offsets_after_cut(new_link: NewLink, job: Job, tmp_path: Path) -> None:
    job.start(job.spec(script(tmp_path, LINES), nproc=2))
    copy = Copy()
    for cut in (0, 1, 3, 7):
        link = new_link()
        link.follow(job, *(len(copy.files[kind]) for kind in (b"L", b"R", b"E")))
        for _, (kind, content) in zip(range(cut), link.frames(), strict=False):
            copy.take(kind, content)
        link.close()
    job.wait()
    link = new_link()
    link.follow(job, *(len(copy.files[kind]) for kind in (b"L", b"R", b"E")))
    copy.take_all(link)
    assert copy.files[b"L"] == Path(job.run.log).read_bytes()
    assert copy.files[b"R"] == Path(job.run.ranks).read_bytes()
    assert copy.files[b"E"] == Path(job.run.events).read_bytes()


@pytest.mark.slow
def test_slow_head_does_not_fill_memory(new_link: NewLink, job: Job, tmp_path: Path) -> None:
    job.start(job.spec(script(tmp_path, "for _ in range(200): print('x' * 99_999)"))).wait()
    link = new_link()

    def peak_kb() -> int:
        status = Path(f"/proc/{link.process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0])

    link.ask(Ping(), PATIENCE)
    before = peak_kb()
    link.follow(job)
    # By now it could have read all 20 MB.
    time.sleep(0.5)
    copy = Copy()
    copy.take_all(link)
    assert len(copy.files[b"L"]) == 20_000_000
    assert peak_kb() - before < 6_000


# -- ends -------------------------------------------------------------------------------------

WAITS = "import time; print('ready'); time.sleep(1000)"


@pytest.mark.slow
def test_stop_returns_receipt(new_link: NewLink, job: Job, tmp_path: Path) -> None:
    job.start(job.spec(script(tmp_path, WAITS)))
    wait_until(lambda: job.said("ready"))
    link, who = new_link(), {"job": job.run.job, "part": 0, "attempt": 1}
    job_pids = job.living()
    receipt = link.ask(Stop(**who, why="enough", grace=10.0, wait=20.0), PATIENCE)
    proved = {"killed": {}, "left": (), "gpu_memory": {}, "gpu_unknown": "", "port": None}
    changing = {"ended": receipt.ended, "took": receipt.took}
    assert receipt == StopReceipt(job=job.run.job, **proved, **changing, runs=runs_here())
    assert sorted(receipt.ended) == sorted(job_pids)
    assert job.wait()["why"] == "enough"
    # Again, when it is over: the same receipt, and nothing happens.
    again = link.ask(Stop(**who, why="more", grace=0.0, wait=20.0), PATIENCE)
    assert again == receipt.replace(ended={}, took=again.took)
    assert len(job.of_kind("ended")) == 1


ORPHANS = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when its supervisor is gone
subprocess.Popen(["env", "-i", "setsid", "sleep", "1000"])
print("ready")
time.sleep(1000)
"""


@pytest.mark.slow
def test_stop_sweeps_job_with_killed_supervisor(
    new_link: NewLink, new_job: NewJob, tmp_path: Path
) -> None:
    job, other = new_job(), new_job()
    for one in (job, other):
        one.start(one.spec(script(tmp_path, ORPHANS), nproc=2))
        wait_until(lambda one=one: one.said("ready", "0") and one.said("ready", "1"))
    wait_until(lambda: len(job.living()) == 7)  # torchrun; and twice keeper, rank, sleep
    living = job.living()
    job.supervisor.kill()
    job.supervisor.wait()
    link, who = new_link(), {"job": job.run.job, "part": 0, "attempt": 1}
    state = link.ask(AskJobState(job=job.run.job, part=0, attempt=1), PATIENCE)
    assert state.state == "lost"
    assert set(state.processes or ()) == set(living)
    receipt = link.ask(Stop(**who, why="enough", grace=0.0, wait=5.0), PATIENCE)
    assert set(receipt.killed) == set(living)
    assert sorted(receipt.killed.values()).count("sleep") == 2
    assert receipt.left == ()
    assert not any(alive(pid) for pid in living)
    assert len(other.living()) == 7
    assert not other.of_kind("ended")
    # It is over now for everybody who asks.
    assert job.events[-1]["event"] == "ended"
    assert job.events[-1]["swept"]
    copy = Copy()
    link.follow(job)
    copy.take_all(link)
    assert copy.events()[-1] == "ended"


SLEEPS = ["sleep", "1000"]
LISTENS = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind("socket")
server.listen()
print(".", end="", flush=True)
client = server.accept()[0]
open(sys.argv[1], "wb").write(client.recv(4096))
"""


@pytest.mark.slow
def test_stop_all_finds_jobs_by_directory_or_tag(
    home: Path, new_job: NewJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, lost, over = new_job(), new_job(), new_job()
    over.start(over.spec(script(tmp_path, "print(1)", "over.py"))).wait()
    for job in (known, lost):
        job.start(job.spec(script(tmp_path, WAITS)))
        wait_until(lambda job=job: job.said("ready"))
    Path(lost.run.path).rename(tmp_path / "away")
    tagged = {one.job for one in job_processes.tagged_jobs()}
    assert {job.run.job for job in (known, lost)} <= tagged
    spare_others(monkeypatch, {job.run.job for job in (known, lost, over)})
    found = ServerSession().answer(StopAll(why="emergency", grace=0.0, wait=10.0)).receipts
    assert {receipt.job for receipt in found} == {known.run.job, lost.run.job}
    assert all(receipt.killed for receipt in found)
    assert [receipt.left for receipt in found] == [(), ()]


@pytest.fixture
def for_all() -> Iterator[Path]:
    """A directory that other users may enter, which pytest's are not."""
    with tempfile.TemporaryDirectory(prefix="orch-all-") as directory:
        Path(directory).chmod(0o777)
        yield Path(directory)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may")
def test_root_stops_jobs_of_all_users(
    home: Path, for_all: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with a supervisor to ask, one without; and nothing in their files is believed."""
    jobs = {name: f"theirs-{os.getpid()}-{name}" for name in ("listens", "alone")}
    spare_others(monkeypatch, set(jobs.values()))
    asked = for_all / "asked"
    processes = {}
    for name, job in jobs.items():
        directory = for_all / "runs" / job / "0" / "1"
        directory.mkdir(parents=True)
        os.chown(directory, 65534, 65534)
        words = ["/usr/bin/python3", "-c", LISTENS, str(asked)] if name == "listens" else SLEEPS
        processes[name] = subprocess.Popen(
            words,
            env={"ORCHESTRATOR_RUN": str(directory)},
            cwd=directory,
            user=65534,
            stdout=subprocess.PIPE,
        )
    assert processes["listens"].stdout
    assert processes["listens"].stdout.read(1) == b"."
    mine = ServerSession().answer(StopAll(why="emergency", grace=0.0, wait=5.0)).receipts
    assert mine == ()
    words = StopAll(why="emergency", grace=0.0, wait=5.0, all_users=True)
    # Without a wait the process stays as a zombie.
    threading.Thread(target=processes["alone"].wait).start()
    found = ServerSession().answer(words).receipts
    theirs = {one.job.rpartition("-")[2]: one for one in found if one.user}
    assert {name: one.user for name, one in theirs.items()} == {
        "listens": "nobody",
        "alone": "nobody",
    }
    assert theirs["alone"].killed
    assert json.loads(asked.read_text())["why"] == "emergency"
    assert [one.left for one in theirs.values()] == [(), ()]
    assert not list((for_all / "runs" / jobs["alone"] / "0/1").iterdir())
    processes["listens"].wait()


# -- the state of a job -----------------------------------------------------------------------


@pytest.mark.slow
def test_job_state_is_reported(new_link: NewLink, new_job: NewJob, tmp_path: Path) -> None:
    job = new_job(node=2)
    target = script(tmp_path, "print('ready'); open('go').read(); raise SystemExit(3)")
    os.mkfifo(tmp_path / "go")
    job.start(job.spec(target, first=4, workdir=tmp_path))
    wait_until(lambda: job.said("ready", "4"))
    link = new_link()

    def state() -> JobState:
        return link.ask(AskJobState(job=job.run.job, part=job.run.part, attempt=1), PATIENCE)

    running = state()
    assert (running.state, running.part) == ("running", 2)
    pid = job.of_kind("rank_started")[0]["pid"]
    assert running.ranks == {4: RankState(state="started", pid=pid)}
    assert running.log_bytes == len("ready\n")
    assert pid in (running.processes or ())
    (tmp_path / "go").write_text("")
    job.wait()
    ended = state()
    assert (ended.state, ended.why) == ("ended", "rank 4 failed")
    # Torchrun is not awaited after its last rank.
    assert ended.agent in (1, -signal.SIGKILL)
    rank = ended.ranks[4]
    assert (rank.state, rank.pid, rank.code, rank.words) == ("ended", pid, 3, "3")
    assert ended.processes is None
    assert (
        link.ask(AskJobState(job="another", part=0, attempt=1), PATIENCE).state == "unknown there"
    )


@pytest.mark.slow
def test_long_home_path_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_job: NewJob, new_link: NewLink
) -> None:
    deep = tmp_path.joinpath(*["directory" * 5] * 6)
    deep.mkdir(parents=True)
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(deep))
    job = new_job("j" * 200)
    job.start(job.spec(script(tmp_path, WAITS)))
    connect_supervisor(RunDir(job.run.job, 0)).close()
    assert (
        new_link().ask(AskJobState(job=job.run.job, part=0, attempt=1), PATIENCE).state == "running"
    )


def test_server_that_waited_knows_no_earlier_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    waiting, there = ServerSession(), ServerSession()
    waiting.waits = True
    note_stop_of_all()
    waiting.answer(AskJobState(job="job", part=0, attempt=1))
    run = RunDir("job", 0)
    waiting.refuse_if_stopped(run)
    with pytest.raises(Refusal, match="was stopped"):
        there.refuse_if_stopped(run)
