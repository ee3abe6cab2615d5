"""The node's end of the one SSH channel the head keeps to this node.

Frames on standard input and output: one byte kind, four bytes length, payload. 'J' is JSON (a
request with "do", its answer, a heartbeat); from the head also 'P' a piece of a parcel, before the
request that is about it; to the head also 'L' log bytes, 'R' ranks records, 'E'
events, each with the eight-byte offset of the file they come from. Ends when the head hangs up;
jobs do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from orchestrator.node.facts.probe import probe
from orchestrator.node.job import cleanup, processes, stop_job
from orchestrator.node.job.hang import Activity, collect
from orchestrator.node.job.port import Port
from orchestrator.node.job.run_directory import RunDir, all_runs, connect
from orchestrator.node.peers.peers import listen
from orchestrator.node.server import outputs
from orchestrator.node.server import payload as shipped
from orchestrator.node.server import reachability as dialing
from orchestrator.node.server.hook import HookError, run_hook
from orchestrator.node.server.stream import Follower

HEADER = struct.Struct(">cI")
BACKLOG = 1 << 19  # read no more of the log while this much waits for the network
BEAT_SECONDS = 1.0
HEAD_SILENCE = 60.0  # a head that said nothing for so long is behind a dead connection
START_SECONDS = 20.0
LIBRARY = os.path.abspath(__file__).rsplit(os.sep, 4)[0]


class Refusal(Exception):
    """A request that cannot be done; its words go to the user."""


class Link:
    def __init__(self) -> None:
        self.waiting: list[memoryview] = []
        self.waiting_bytes = 0
        self.incoming = bytearray()
        self.heard = time.monotonic()
        self.next_beat = self.heard + BEAT_SECONDS
        self.port: Port | None = None
        self.peers: socket.socket | None = None  # where the other nodes' supervisors will call
        self.follower: Follower | None = None
        self.activity: Activity | None = None
        self.supervisor: subprocess.Popen[bytes] | None = None  # that this link has started
        self.piece = bytearray()  # what the next request is about
        self.parcels: dict[str, RunDir] = {}  # that wait for the start of their jobs
        self.listed: set[tuple[str, str]] = set()  # outputs that the head has been told of
        self.requests: dict[str, Callable[[dict[str, Any]], Any]] = {
            "probe": self.probe,
            "checkup": self.checkup,
            "listen": dialing.listen,
            "dial": dialing.dial,
            "hook": self.hook,
            "parcel": self.parcel,
            "start": self.start,
            "follow": self.follow,
            "leave": self.leave,
            "end": self.end,
            "jobs": self.jobs,
            "end_all": self.end_all,
            "living": lambda request: {"living": cleanup.living(request["runs"])},
            "remove": lambda request: cleanup.remove(request["runs"], LIBRARY),
            "stuck": self.stuck,
            "outputs": self.outputs,
            "output": self.output,
            "beat": lambda request: {"time": time.time()},
        }

    # -- the channel -------------------------------------------------------------------------

    def send(self, kind: bytes, *parts: bytes) -> None:
        size = sum(map(len, parts))
        for part in (HEADER.pack(kind, size), *parts):
            self.waiting.append(memoryview(part))
        self.waiting_bytes += size + HEADER.size

    def send_json(self, message: dict[str, Any]) -> None:
        self.send(b"J", json.dumps(message).encode("ascii"))

    def flush(self) -> None:
        while self.waiting:
            try:
                done = os.writev(1, self.waiting[:64])
            except BlockingIOError:
                return
            self.waiting_bytes -= done
            while self.waiting and done >= len(self.waiting[0]):
                done -= len(self.waiting.pop(0))
            if done:
                self.waiting[0] = self.waiting[0][done:]

    def loop(self) -> None:
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        while time.monotonic() - self.heard < HEAD_SILENCE:
            self.flush()
            if self.follower and self.waiting_bytes < BACKLOG:
                self.follower.pump(self.send)
                self.flush()
            poll = select.poll()
            poll.register(0, select.POLLIN)
            if self.waiting:
                poll.register(1, select.POLLOUT)
            elif self.follower and self.follower.bell is not None:
                poll.register(self.follower.bell, select.POLLIN)
            behind = self.follower is not None and self.follower.behind and not self.waiting
            left = 0.0 if behind else max(0.0, self.next_beat - time.monotonic())
            for fd, events in poll.poll(left * 1000):
                if fd == 0 and not self.receive():
                    return
                if fd == 1 and events & (select.POLLERR | select.POLLHUP):
                    return
                if self.follower and fd == self.follower.bell:
                    self.follower.drain_bell()
            self.beat()

    def beat(self) -> None:
        if time.monotonic() >= self.next_beat:
            self.next_beat = time.monotonic() + BEAT_SECONDS
            if not self.waiting:  # what waits to be sent is a sign of life itself
                activity = self.activity.look() if self.activity else {}
                self.send_json({"beat": time.time(), **activity})

    def receive(self) -> bool:
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            return True
        self.heard = time.monotonic()
        self.incoming += data
        while len(self.incoming) >= HEADER.size:
            kind, size = HEADER.unpack_from(self.incoming)
            if len(self.incoming) < HEADER.size + size:
                break
            payload = bytes(self.incoming[HEADER.size : HEADER.size + size])
            del self.incoming[: HEADER.size + size]
            if kind == b"P":
                self.piece += payload
            else:
                self.serve(json.loads(payload))
        return bool(data)

    def serve(self, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": request.get("id")}
        try:
            answer["ok"] = self.requests[request["do"]](request)
        except (Refusal, HookError, OSError, ValueError) as error:
            answer["error"] = str(error)
        self.send_json(answer)

    # -- requests ----------------------------------------------------------------------------

    def probe(self, request: dict[str, Any]) -> dict[str, Any]:
        facts = probe(request)
        if request.get("port"):
            self.port = Port(request["port"]["wanted"], request["port"]["exact"])
            facts["port"] = self.port.number
            if request["port"].get("peers"):
                self.peers = listen(self.port.number)
                facts["peers_port"] = self.peers.getsockname()[1] if self.peers else 0
        facts["library"] = LIBRARY
        facts["time"] = time.time()
        return facts

    def checkup(self, request: dict[str, Any]) -> dict[str, Any]:
        from orchestrator.node.facts.deep_probe import checkup  # a launch does without it

        return {"checkup": checkup(request), "time": time.time()}

    def hook(self, request: dict[str, Any]) -> dict[str, Any]:
        changed, unset = run_hook(request["text"], request["env"], request["workdir"])
        return {"env": changed, "unset": unset}

    def parcel(self, request: dict[str, Any]) -> dict[str, Any]:
        run = RunDir(request["job"], request["node"])
        self.parcels[run.path] = run
        piece, self.piece = self.piece, bytearray()
        shipped.keep(run, request["name"], piece)
        return {}

    def start(self, request: dict[str, Any]) -> dict[str, Any]:
        spec = request["spec"]
        run = RunDir(spec["job"], spec["node"])
        try:
            run.create()
        except FileExistsError:
            raise Refusal(f"job {spec['job']} already has node {spec['node']} here") from None
        shipped.hand_over(run)
        shared = is_experiment(spec["env"]["ORCHESTRATOR_EXPERIMENT"], spec["job"])
        if not shared:
            own = os.path.join(run.path, "experiment")
            os.makedirs(os.path.join(own, "outputs"), mode=0o700)
            spec["env"]["ORCHESTRATOR_EXPERIMENT"] = own
        held = [one.fileno() for one in (self.port and self.port.holder, self.peers) if one]
        if self.peers and spec.get("lease"):
            spec["lease"]["fd"] = self.peers.fileno()
        for name, text in spec.pop("files", []):
            run.write(name, text)
        run.write_spec({**spec, "library": LIBRARY})  # it stays as long as this run may need it
        with open(os.path.join(run.path, "supervisor.err"), "wb") as errors:
            supervisor = subprocess.Popen(
                [sys.executable, "-IS", LIBRARY, "supervise", run.job, str(run.node)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                pass_fds=held,
            )
        assert supervisor.stdout is not None
        word = b""
        if select.select([supervisor.stdout], [], [], START_SECONDS)[0]:
            word = supervisor.stdout.readline()
        if word != b"ready\n":
            supervisor.kill()  # one that is only slow would start the job when nobody expects it
            with open(os.path.join(run.path, "supervisor.err"), "rb") as file:
                why = word + file.read()[-2000:]
            raise Refusal(why.decode("utf-8", "replace").strip() or "its supervisor did not start")
        self.supervisor = supervisor
        if self.peers:
            self.peers.close()  # now it is the supervisor's alone, and closed when that ends
            self.peers = None
        return {"supervisor": supervisor.pid, "shared": shared, "run": run.path}

    def follow(self, request: dict[str, Any]) -> dict[str, Any]:
        run = RunDir(request["job"], request["node"])
        if not os.path.isdir(run.path):
            raise Refusal(f"this machine knows nothing of job {run.job}")
        self.follower = Follower(run, request["log"], request["ranks"], request["events"])
        self.activity = Activity(run)
        if "head" in request:
            self.follower.tell({"head": "here", "at": request["head"]})
        return {"time": time.time()}

    def leave(self, request: dict[str, Any]) -> dict[str, Any]:
        """The head goes on purpose: nobody is to miss it."""
        if self.follower is not None:
            self.follower.tell({"head": "left", "at": request["at"]})
        return {"left": True}

    def end(self, request: dict[str, Any]) -> dict[str, Any]:
        """With "wait": until it is over, and the receipt."""
        run = RunDir(request["job"], request["node"])
        if request.get("wait"):
            return stop_job.end(run, request)
        stop_job.tell(run, request)
        return {}

    def outputs(self, request: dict[str, Any]) -> dict[str, Any]:
        run = RunDir(request["job"], request["node"])
        kept = os.path.join(outputs.place(run), "checkpoints")
        has = os.path.isdir(kept) and bool(os.listdir(kept))
        files = outputs.listing(run)
        self.listed = {(run.path, one["path"]) for one in files}
        return {"files": files, "place": outputs.place(run), "checkpoints": has}

    def output(self, request: dict[str, Any]) -> dict[str, Any]:
        run = RunDir(request["job"], request["node"])
        if (run.path, request["path"]) not in self.listed:  # walking for every piece takes too long
            raise Refusal(f"no such output: {request['path']!r}")
        return {"data": outputs.piece(run, request["path"], request["offset"])}

    def stuck(self, request: dict[str, Any]) -> dict[str, Any]:
        """What every rank here is at."""
        run = RunDir(request["job"], request["node"])
        return {"stuck": collect(run), "time": time.time()}

    def jobs(self, request: dict[str, Any]) -> dict[str, Any]:
        """The state of one job here, or of all."""
        wanted = request.get("job")
        return {"jobs": [job_state(run) for run in all_runs() if wanted in (None, run.job)]}

    def end_all(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("all_users") and os.getuid() != 0:
            raise Refusal("only root can end the jobs of other users there")
        return {"receipts": stop_job.end_all(request)}


def job_state(run: RunDir) -> dict[str, Any]:
    """What `status` shows of one job on this node."""
    ranks: dict[int, dict[str, Any]] = {}
    state: dict[str, Any] = {"job": run.job, "node": run.node, "state": "lost", "ranks": ranks}
    ended = False
    for event in run.read_events():
        if event["event"] == "started":
            state["started"] = event["time"]
        elif event["event"] == "ended":
            ended = True
            state.update(ended=event["time"], agent=event["agent"], why=event["why"])
        elif event["event"].startswith("rank_"):
            rank = ranks.setdefault(event["rank"], {})
            rank.update(state=event["event"][5:], pid=event.get("pid", rank.get("pid")))
            rank.update({key: event[key] for key in ("code",) if key in event})
    try:
        spec = run.read_spec()
        state.update({key: spec[key] for key in ("nproc", "first_rank", "nnodes", "experiment")})
        state["log_bytes"] = os.stat(run.log).st_size
        state["log_time"] = os.stat(run.log).st_mtime
        connect(run).close()
        state["state"] = "running"
    except (OSError, ValueError, KeyError):
        pass  # over, or half written when the disk was full
    if ended:
        state["state"] = "ended"
    else:
        state["processes"] = [p.pid for p in processes.of_job(run.job, run.node)]
    return state


def is_experiment(path: str, job: str) -> bool:
    """Is the head's experiment directory this very one here, on a shared disk?"""
    try:
        with open(os.path.join(path, "job.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("job") == job) and os.access(path, os.W_OK)
    except (OSError, ValueError):
        return False


def main(nonce: str) -> None:
    os.write(1, f"\n{nonce}\n".encode())
    link = Link()
    step = "SLURM_STEP_ID" in os.environ
    if step:  # Slurm signals everything in a step; the end of the job has to come home all the same
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):  # the head is gone; the files have everything
        link.loop()
    for run in link.parcels.values():
        shipped.discard(run)
    if step and link.supervisor is not None:
        link.supervisor.wait()  # Slurm kills what is left of a step when its task ends: this one
