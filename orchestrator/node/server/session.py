"""Does what one head asks of its node: a method for every request of the protocol."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.node.facts.probe import probe
from orchestrator.node.job import cleanup, processes, stop_job
from orchestrator.node.job.attempts import resume_dir
from orchestrator.node.job.hang import Activity, collect
from orchestrator.node.job.port import Port
from orchestrator.node.job.processes import OPTIONS
from orchestrator.node.job.run_directory import RunDir, all_runs, home, machine, stop_of_all
from orchestrator.node.server import outputs, payload, reachability
from orchestrator.node.server.hook import HookError, run_hook
from orchestrator.node.server.job_state import job_state
from orchestrator.node.server.stream import FileStreamer
from orchestrator.protocol import messages
from orchestrator.protocol.events import Ended
from orchestrator.protocol.message import Message
from orchestrator.protocol.messages import Nothing, Request
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.timing import SERVER_PATIENCE
from orchestrator.protocol.version import OWN, conflict

if TYPE_CHECKING:
    from orchestrator.node.calls.relay import Calls
    from orchestrator.node.transfer.give import Giver, Source
    from orchestrator.node.transfer.take import Taking
    from orchestrator.node.warm.handover import WarmSupervisor

START_SECONDS = 20.0
TAKEN_SECONDS = 0.5  # an answer about what is taken waits so long for its end
LIBRARY = os.path.abspath(__file__).rsplit(os.sep, 4)[0]

R = TypeVar("R", bound=Request[Any])
A = TypeVar("A", bound=Message)


class Refusal(Exception):
    """A request that cannot be done; its text goes to the user."""

    def __init__(self, text: str, kind: str = "") -> None:
        super().__init__(text)
        self.kind = kind


HANDLERS: dict[type[Request[Any]], Callable[[Session, Any], Message]] = {}


def answers(
    kind: type[R],
) -> Callable[[Callable[[Session, R], A]], Callable[[Session, R], A]]:
    """Register the method that answers this kind of request."""

    def register(method: Callable[[Session, R], A]) -> Callable[[Session, R], A]:
        HANDLERS[kind] = method
        return method

    return register


class Session:
    """One head's visit, and what was opened, started or announced in it."""

    def __init__(self, umask: int = 0o077) -> None:
        self.umask = umask  # of the login, for what is the user's own
        self.port: Port | None = None
        self.peers: socket.socket | None = None  # where the other nodes' supervisors will call
        self.streamer: FileStreamer | None = None
        self.activity: Activity | None = None
        self.supervisor: subprocess.Popen[bytes] | None = None  # started in this visit
        self.followed: RunDir | None = None
        self.piece = bytearray()  # what the next request is about
        self.parcels: dict[str, RunDir] = {}  # that wait for the start of their jobs
        self.rooms: list[RunDir] = []  # of jobs that checkpoints were brought for
        self.listed: set[tuple[str, str]] = set()  # outputs that the head knows
        self.calls: Calls | None = None  # in the ranks of a job
        self.patience = SERVER_PATIENCE
        self.build: Any = None  # node/environments/build.py, once an environment is made
        self.code: Any = None  # node/transfer/checkout.py, once this head sends code
        self.waits = False  # for its head, which comes later
        self.next_attempt: Any = None  # node/warm/next_attempt.py, of a job that may be restarted
        self.arrivals: Any = None  # node/server/arrivals.py, once this head sends files
        self.givers: list[Giver] = []  # what other nodes may fetch here
        self.taking: Taking | None = None  # from another node
        self.stop_of_all = stop_of_all()  # the last one before this visit

    def answer(self, request: Request[Any]) -> Message:
        """Do what is asked; raise a Refusal where that cannot be."""
        if self.waits:  # perhaps through a stop of all jobs, none of which is of this head
            self.waits, self.stop_of_all = False, stop_of_all()
        try:
            return HANDLERS[type(request)](self, request)
        except (HookError, OSError, ValueError, RuntimeError) as error:
            raise Refusal(processes.in_words(error)) from error

    def leave_nothing(self) -> None:
        """Discard what no job of this visit took up: parcels and snapshots."""
        for run in self.parcels.values():
            payload.discard(run)
        for run in self.rooms:
            outputs.discard(run)
        if self.build is not None:
            self.build.end()
        self.end_giving(messages.EndGiving())
        self.end_taking(messages.EndTaking())
        if self.code is not None:
            self.code.leave()

    def leave_no_library(self) -> None:
        """Remove earlier versions of these sources, which nobody has used for a week."""
        with contextlib.suppress(OSError, ValueError):
            cleanup.remove_libraries(LIBRARY)

    # -- before a launch ---------------------------------------------------------------------

    @answers(messages.Probe)
    def probe(self, request: messages.Probe) -> messages.Probed:
        facts = probe(request)
        if request.port:
            self.hold_port(request.port)
            facts["port"] = self.port.number if self.port else 0
            if request.port.peers:
                facts["peers_port"] = self.peers.getsockname()[1] if self.peers else 0
        return messages.Probed(**facts, library=LIBRARY, time=time.time())

    def hold_port(self, wish: messages.PortWish) -> None:
        """Hold a port for the ranks of a job, and one for its supervisors."""
        self.port = Port(wish.wanted, wish.exact)
        if wish.peers:
            from orchestrator.node.peers.peers import listen  # not for every probe

            self.peers = listen(self.port.number)

    @answers(messages.Examine)
    def examine(self, request: messages.Examine) -> messages.CheckedUp:
        from orchestrator.node.facts.deep_probe import checkup  # a launch does without it

        return messages.CheckedUp(checkup=checkup(request), time=time.time())

    @answers(messages.Listen)
    def listen(self, request: messages.Listen) -> messages.Listening:
        return messages.Listening(ports=reachability.listen(request))

    @answers(messages.Dial)
    def dial(self, request: messages.Dial) -> messages.Dialed:
        return messages.Dialed(answers=reachability.dial(request))

    @answers(messages.Hook)
    def hook(self, request: messages.Hook) -> messages.Hooked:
        changed, unset = run_hook(request.text, request.env, request.workdir, self.umask)
        return messages.Hooked(env=changed, unset=tuple(unset))

    # -- the code ----------------------------------------------------------------------------

    def visit(self) -> Any:
        """Return this head's work on the store of code, which a probe does without."""
        if self.code is None:
            from orchestrator.node.transfer.checkout import Visit

            self.code = Visit()
        return self.code

    @answers(messages.CheckOut)
    def check_out(self, request: messages.CheckOut) -> messages.CheckedOut:
        from orchestrator.node.transfer.store import Incomplete

        try:
            checked: messages.CheckedOut = self.visit().check_out(request)
        except Incomplete:
            raise Refusal("contents of the tree are lacking", messages.LACKING) from None
        return checked

    @answers(messages.OfferTree)
    def offer_tree(self, request: messages.OfferTree) -> messages.Lacking:
        lacking: messages.Lacking = self.visit().offer(request.tree, self.take_piece())
        return lacking

    @answers(messages.Contents)
    def contents(self, request: messages.Contents) -> Nothing:
        self.visit().contents(request.tree, request.size, self.take_piece())
        return Nothing()

    @answers(messages.Compare)
    def compare(self, request: messages.Compare) -> messages.Compared:
        from orchestrator.node.transfer.checkout import compare

        return compare(request.directory, self.take_piece())

    def take_piece(self) -> bytearray:
        piece, self.piece = self.piece, bytearray()
        return piece

    # -- a job -------------------------------------------------------------------------------

    @answers(messages.Parcel)
    def parcel(self, request: messages.Parcel) -> Nothing:
        run = RunDir(request.job, request.node)
        self.parcels[run.path] = run
        self.refuse_if_stopped(run)
        payload.keep(run, request.name, self.take_piece())
        return Nothing()

    @answers(messages.Start)
    def start(self, request: messages.Start) -> messages.StartedHere:
        spec = request.spec
        run = RunDir(spec.job, spec.node)
        try:
            run.create()
        except FileExistsError:
            raise Refusal(f"job {spec.job} already has node {spec.node} here") from None
        try:
            self.refuse_if_stopped(run, first_run(spec))
        except Refusal:
            with contextlib.suppress(OSError):  # a stop has written its last event there
                os.rmdir(run.path)
            raise
        first = first_run(spec)
        payload.hand_over(run, first)
        shared = is_experiment(spec.env["ORCHESTRATOR_EXPERIMENT"], spec.job)
        if not shared:
            own = os.path.join(first.path, "experiment")
            os.makedirs(os.path.join(own, "outputs"), mode=0o700, exist_ok=first.job != run.job)
            outputs.hand_over(run, os.path.join(own, "outputs"))
            if first.path != run.path:
                os.symlink(own, os.path.join(run.path, "experiment"))
            spec = spec.replace(env={**spec.env, "ORCHESTRATOR_EXPERIMENT": own})
        if spec.attempt is not None:
            resume_dir.remove_forgotten(time.time())
            names = {"ORCHESTRATOR_ATTEMPT": str(spec.attempt.number)}
            names["ORCHESTRATOR_RESUME_DIR"] = resume_dir.make(first)
            names["ORCHESTRATOR_FIRST_WORLD_SIZE"] = str(spec.attempt.ranks)
            spec = spec.replace(env={**spec.env, **names})
        if self.peers and spec.lease:
            spec = spec.replace(lease=spec.lease.replace(fd=self.peers.fileno()))
        for name, text in spec.files:
            run.write(name, text)
        # The library stays as long as this run may need it.
        spec_here = self.at_home(spec)
        run.write_spec(spec_here)
        pid, warm = self.start_supervisor(run, spec_here)
        if self.code is not None:
            self.code.started(spec.workdir, run)
        if self.peers:
            self.peers.close()  # now it is the supervisor's alone, and closed when that ends
            self.peers = None
        return messages.StartedHere(supervisor=pid, shared=shared, run=run.path, warm=warm)

    @answers(messages.StandBy)
    def stand_by(self, request: messages.StandBy) -> Nothing:
        """Keep a spec as that of a part that is over: a later attempt may begin with it."""
        spec = self.at_home(request.spec)
        run = RunDir(spec.job, spec.node)
        run.create()
        run.write_spec(spec)
        end = Ended(time=time.time(), agent=None, why="it stands by", killed={}, left=(), ranks={})
        run.append_event(end)
        if self.code is not None:
            self.code.started(spec.workdir, run)
        if spec.warm or spec.attempt is not None:
            from orchestrator.node.warm import next_attempt

            idle = next_attempt.SPARE_SECONDS
            next_attempt.begin(run, os.environ, self.umask, idle)
        return Nothing()

    @answers(messages.TakePorts)
    def take_ports(self, request: messages.TakePorts) -> messages.TakenPorts:
        self.hold_port(request.port)
        assert self.port is not None
        peers_port = self.peers.getsockname()[1] if self.peers else 0
        return messages.TakenPorts(port=self.port.number, peers_port=peers_port)

    @answers(messages.AskKept)
    def kept(self, request: messages.AskKept) -> messages.Kept:
        from orchestrator.node.job.attempts import kept  # not for every job

        return messages.Kept(at=kept.last(RunDir(request.job, request.node)))

    @answers(messages.AskSaved)
    def saved(self, request: messages.AskSaved) -> messages.Saved:
        from orchestrator.node.saved import look  # not for every job

        answer = look.saved(RunDir(request.job, request.node), request.given)
        self.listed |= {(answer.roots[each.place], each.path) for each in answer.files}
        return answer

    @answers(messages.GetReady)
    def get_ready(self, request: messages.GetReady) -> Nothing:
        from orchestrator.node.warm import next_attempt

        next_attempt.begin(RunDir(request.job, request.node), os.environ, self.umask)
        return Nothing()

    @answers(messages.StartAgain)
    def start_again(self, request: messages.StartAgain) -> messages.StartedHere:
        first = RunDir(request.attempt.first_job, request.attempt.first_node)
        return self.start(messages.Start(spec=next_spec(first.read_spec(), request)))

    def at_home(self, spec: Spec) -> Spec:
        """Complete a spec by what only this machine knows."""
        return spec.replace(library=LIBRARY, version=OWN, umask=self.umask, machine=machine())

    def refuse_if_stopped(self, run: RunDir, first: RunDir | None = None) -> None:
        """Refuse a job that was stopped while its head was still starting it."""
        over = first is not None and first.attempts_are_forbidden
        if over or run.start_is_forbidden or stop_of_all() != self.stop_of_all:
            raise Refusal(f"job {run.job} was stopped before it had started", messages.STOPPED)

    def start_supervisor(self, run: RunDir, spec: Spec) -> tuple[int, messages.WarmStart]:
        """Start it and wait until torchrun is on its way, or raise the reason why it is not."""
        held = [open_.fileno() for open_ in (self.port and self.port.holder, self.peers) if open_]
        supervisor: subprocess.Popen[bytes] | WarmSupervisor
        with open(os.path.join(run.path, "supervisor.err"), "wb") as errors:
            files = [errors.fileno(), *held]
            warm, why = self.take_warm(run, spec, files)
            if warm is not None:
                supervisor = warm
            else:
                supervisor = self.supervisor = subprocess.Popen(
                    [sys.executable, *OPTIONS, LIBRARY, "supervise", run.job, str(run.node)],
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
            self.refuse_if_stopped(run)
            with open(os.path.join(run.path, "supervisor.err"), "rb") as file:
                words = word + file.read()[-2000:]
            raise Refusal(
                words.decode("utf-8", "replace").strip() or "its supervisor did not start"
            )
        return supervisor.pid, messages.WarmStart(warm=warm is not None, why=why)

    def take_warm(
        self, run: RunDir, spec: Spec, files: list[int]
    ) -> tuple[WarmSupervisor | None, str]:
        """Hand the job over to a warm process; without one that fits, say why."""
        if not spec.warm and not os.path.isdir(os.path.join(home(), "warm")):
            return None, ""
        from orchestrator.node.warm.handover import hand_over  # not for every start

        attempt = hand_over(run, spec, os.environ, self.umask, files)
        return attempt.supervisor, attempt.why

    def keep_warm(self) -> None:
        """Leave processes that are ready for the next job, now that the followed one is over."""
        if self.followed is None or stop_of_all() != self.stop_of_all:
            return
        run, self.followed = self.followed, None
        with contextlib.suppress(OSError, ValueError):
            spec = run.read_spec()
            if spec.warm:
                from orchestrator.node.warm import pairs

                pairs.start(spec, run, os.environ, self.umask)

    def look_ahead(self) -> None:
        """See that processes are ready for the next attempt of the job that is followed."""
        if self.next_attempt is not None:
            self.next_attempt.look(time.monotonic())

    def prepare_next_attempt(self, run: RunDir) -> None:
        """Have processes ready for what may follow: another attempt, or the next warm launch."""
        self.next_attempt = None
        with contextlib.suppress(OSError, ValueError):
            spec = run.read_spec()
            attempt = spec.attempt
            if spec.warm or (attempt is not None and attempt.number <= attempt.restarts):
                from orchestrator.node.warm.next_attempt import NextAttempt  # not for every job

                self.next_attempt = NextAttempt(run, spec, os.environ, self.umask)

    @answers(messages.Follow)
    def follow(self, request: messages.Follow) -> messages.Following:
        run = RunDir(request.job, request.node)
        if not os.path.isdir(run.path):
            raise Refusal(f"this machine knows nothing of job {run.job}", messages.UNKNOWN_JOB)
        other = conflict(run.job, run.version(), OWN)
        if other:
            raise Refusal(other, messages.OTHER_VERSION)
        self.streamer = FileStreamer(run, request.log, request.ranks, request.events)
        self.activity = Activity(run)
        self.followed = run
        self.prepare_next_attempt(run)
        self.patience = min(SERVER_PATIENCE, request.patience or SERVER_PATIENCE)
        if request.head is not None:
            self.streamer.tell_head("here", request.head)
        return messages.Following(time=time.time())

    @answers(messages.Leave)
    def leave(self, request: messages.Leave) -> messages.Left:
        if self.streamer is not None:
            self.streamer.tell_head("left", request.at)
        return messages.Left()

    @answers(messages.End)
    def end(self, request: messages.End) -> Nothing:
        stop_job.end(RunDir(request.job, request.node), request.why, request.grace)
        return Nothing()

    @answers(messages.Stop)
    def stop(self, request: messages.Stop) -> messages.StopReceipt:
        return stop_job.stop(RunDir(request.job, request.node), request)

    @answers(messages.StopAll)
    def stop_all(self, request: messages.StopAll) -> messages.StopReceipts:
        if request.all_users and os.getuid() != 0:
            raise Refusal("only root can end the jobs of other users there")
        return messages.StopReceipts(receipts=tuple(stop_job.stop_all(request)))

    @answers(messages.Jobs)
    def jobs(self, request: messages.Jobs) -> messages.JobStates:
        runs = [run for run in all_runs() if request.job in (None, run.job)]
        # Who names a job knows which of its parts is this machine's.
        states = (job_state(run) for run in (runs if request.job else processes.here(runs)))
        return messages.JobStates(jobs=tuple(states), time=time.time())

    @answers(messages.AskStuck)
    def stuck(self, request: messages.AskStuck) -> messages.Stuck:
        stacks = collect(RunDir(request.job, request.node))
        return messages.Stuck(stuck=stacks, time=time.time())

    @answers(messages.AskPaces)
    def paces(self, request: messages.AskPaces) -> messages.Paces:
        from orchestrator.node.job.beside import pace  # a minute after the start, and later

        run = RunDir(request.job, request.node)
        return messages.Paces(paces=pace.read(run) if request.read else pace.ask(run))

    @answers(messages.AskProfile)
    def profile(self, request: messages.AskProfile) -> messages.ProfileState:
        from orchestrator.node.server import profile  # not for every visit

        return profile.ask(RunDir(request.job, request.node), request.wish)

    @answers(messages.Call)
    def call(self, request: messages.Call) -> Nothing:
        from orchestrator.node.calls.relay import Calls  # a launch does without it

        self.calls = Calls(RunDir(request.job, request.node))
        return Nothing()

    @answers(messages.Outputs)
    def outputs(self, request: messages.Outputs) -> messages.OutputFiles:
        run = RunDir(request.job, request.node)
        listing = outputs.of_job(run, checkpoints=request.checkpoints, beside=request.beside)
        return self.list(listing)

    @answers(messages.Files)
    def files(self, request: messages.Files) -> messages.OutputFiles:
        return self.list(outputs.of_path(request.path, request.directory))

    @answers(messages.Checkpoints)
    def checkpoints(self, request: messages.Checkpoints) -> messages.OutputFiles:
        return self.list(outputs.of_checkpoints(request))

    @answers(messages.MakeRoom)
    def make_room(self, request: messages.MakeRoom) -> messages.Room:
        run = RunDir(request.job, request.node)
        self.rooms.append(run)
        return messages.Room(directory=outputs.room_for(run))

    def list(self, listing: messages.OutputFiles) -> messages.OutputFiles:
        self.listed |= {(file.place or listing.place, file.path) for file in listing.files}
        return listing

    @answers(messages.Output)
    def output(self, request: messages.Output) -> messages.OutputPiece:
        self.refuse_if_not_listed(request)
        return messages.OutputPiece(data=outputs.piece(request.place, request.path, request.offset))

    @answers(messages.SumOutput)
    def sum_output(self, request: messages.SumOutput) -> messages.OutputSum:
        self.refuse_if_not_listed(request)
        return outputs.digest(request)

    def refuse_if_not_listed(self, request: messages.Output | messages.SumOutput) -> None:
        if (request.place, request.path) not in self.listed:  # walking each time takes too long
            raise Refusal(f"no such output: {request.path!r}")

    # -- warm processes ----------------------------------------------------------------------

    @answers(messages.Warm)
    def warm(self, request: messages.Warm) -> messages.WarmPairs:
        from orchestrator.node.warm import listing  # not for every start

        pairs = tuple(map(listing.described, listing.pairs_here()))
        return messages.WarmPairs(pairs=pairs, time=time.time())

    @answers(messages.WarmOff)
    def warm_off(self, request: messages.WarmOff) -> messages.WarmEnds:
        from orchestrator.node.warm import listing

        return messages.WarmEnds(ends=tuple(map(listing.ended, listing.pairs_here())))

    # -- environments ------------------------------------------------------------------------

    @answers(messages.LookAtEnvironment)
    def look_at_environment(self, request: messages.LookAtEnvironment) -> messages.EnvironmentState:
        from orchestrator.node.environments.look import look

        return look(request)

    @answers(messages.BuildEnvironment)
    def build_environment(self, request: messages.BuildEnvironment) -> Nothing:
        from orchestrator.node.environments.build import Build

        self.build = Build(request)
        return Nothing()

    @answers(messages.AskBuild)
    def ask_build(self, request: messages.AskBuild) -> messages.BuildProgress:
        if self.build is None:
            raise Refusal("no environment is made here")
        progress: messages.BuildProgress = self.build.progress()
        return progress

    @answers(messages.PruneEnvironments)
    def prune_environments(
        self, request: messages.PruneEnvironments
    ) -> messages.PrunedEnvironments:
        from orchestrator.node.environments.place import Environments

        removed, freed = Environments(request.root).prune()
        return messages.PrunedEnvironments(removed=tuple(removed), freed=freed)

    # -- files from the head -----------------------------------------------------------------

    @answers(messages.OfferFiles)
    def offer_files(self, request: messages.OfferFiles) -> messages.WantedFiles:
        from orchestrator.node.server.arrivals import Arrivals

        if self.arrivals is not None:
            self.arrivals.close()
        self.arrivals = Arrivals(request.directory, self.take_piece(), self.umask)
        wanted: messages.WantedFiles = self.arrivals.compare(dry_run=request.dry_run)
        return wanted

    @answers(messages.WriteFile)
    def write_file(self, request: messages.WriteFile) -> Nothing:
        piece = self.take_piece()
        if self.arrivals is None:
            raise Refusal("a file that was not offered")
        self.arrivals.write(request, piece)
        return Nothing()

    # -- from node to node -------------------------------------------------------------------

    @answers(messages.GiveTree)
    def give_tree(self, request: messages.GiveTree) -> messages.Giving:
        from orchestrator.node.transfer import forward

        return self.give(forward.Given(self.visit().store, request.tree), request)

    @answers(messages.GiveFiles)
    def give_files(self, request: messages.GiveFiles) -> messages.Giving:
        from orchestrator.node.transfer.files import Given

        return self.give(Given(request.directory, request.files, request.coming), request)

    def give(
        self, source: Source, request: messages.GiveTree | messages.GiveFiles
    ) -> messages.Giving:
        from orchestrator.node.transfer.give import Giver

        self.givers.append(Giver(request.token, source, request.seconds))
        return messages.Giving(port=self.givers[-1].port)

    @answers(messages.EndGiving)
    def end_giving(self, request: messages.EndGiving) -> Nothing:
        while self.givers:
            self.givers.pop().close()
        return Nothing()

    @answers(messages.TakeTree)
    def take_tree(self, request: messages.TakeTree) -> Nothing:
        from orchestrator.node.transfer import forward

        self.end_taking(messages.EndTaking())
        self.taking = forward.take(self.visit().store, request)
        return Nothing()

    @answers(messages.TakeFiles)
    def take_files(self, request: messages.TakeFiles) -> Nothing:
        from orchestrator.node.transfer import files

        self.end_taking(messages.EndTaking())
        self.taking = files.take(request, self.umask)
        return Nothing()

    @answers(messages.TakeSaved)
    def take_saved(self, request: messages.TakeSaved) -> Nothing:
        from orchestrator.node.saved import take

        self.end_taking(messages.EndTaking())
        self.taking = take.take(request, self.umask)
        return Nothing()

    @answers(messages.AskTaken)
    def ask_taken(self, request: messages.AskTaken) -> messages.Taken:
        if self.taking is None:
            raise Refusal("nothing is being taken here")
        return self.taking.progress(TAKEN_SECONDS)

    @answers(messages.EndTaking)
    def end_taking(self, request: messages.EndTaking) -> Nothing:
        if self.taking is not None:
            self.taking.end()
        return Nothing()

    # -- after a job -------------------------------------------------------------------------

    @answers(messages.Living)
    def living(self, request: messages.Living) -> messages.LivingRuns:
        return messages.LivingRuns(living=tuple(processes.living(request.runs)))

    @answers(messages.Release)
    def release(self, request: messages.Release) -> messages.Released:
        run = RunDir(request.job, request.node)
        with contextlib.suppress(OSError, ValueError):
            spec = run.read_spec()
            if not spec.warm:
                from orchestrator.node.warm import next_attempt

                next_attempt.end(spec, os.environ, self.umask)
        self.next_attempt = None
        gone = resume_dir.remove(run)
        return messages.Released(gone=gone)

    @answers(messages.Remove)
    def remove(self, request: messages.Remove) -> messages.RemovedRuns:
        from orchestrator.node.transfer import prune

        snapshots = prune.snapshots_of(request.runs)  # their names go with the runs
        removed = cleanup.remove(request.runs, LIBRARY)
        gone = [(run.job, run.node) for run in removed.runs if not run.problem]
        return removed.replace(freed=removed.freed + prune.remove(snapshots, gone))

    @answers(messages.Beat)
    def clock(self, request: messages.Beat) -> messages.Clock:
        return messages.Clock(time=time.time())


def next_spec(first: Spec, request: messages.StartAgain) -> Spec:
    """Return what the next attempt runs: what the first one ran, at this place among its nodes."""
    place = {
        "--nnodes": request.nnodes,
        "--node-rank": request.node,
        "--master-addr": request.master,
        "--master-port": request.port,
    }
    names = [word.partition("=")[0] for word in first.agent]
    if "--main_process_port" in names and (request.node, request.nnodes) == (
        first.node,
        first.nnodes,
    ):
        place = {"--main_process_port": request.port}  # accelerate's; its file has the rest
    if not set(place) <= set(names):
        raise Refusal("another launcher starts its ranks, and wants the nodes that it had")
    agent = [
        f"{name}={place[name]}" if name in place else word
        for name, word in zip(names, first.agent)  # noqa: B905  3.9
    ]
    own = {
        "ORCHESTRATOR_JOB": request.job,
        "NODE_RANK": str(request.node),
        "NNODES": str(request.nnodes),
    }
    lease = first.lease and first.lease.replace(
        address=request.master, port=request.peers_port, token=request.token, attached=True, fd=None
    )
    return first.replace(
        job=request.job,
        node=request.node,
        nnodes=request.nnodes,
        first_rank=request.first_rank,
        attempt=request.attempt,
        port=0 if request.node else request.port,
        agent=tuple(agent),
        env={**first.env, **own},
        lease=lease,
        fresh=False,
    )


def first_run(spec: Spec) -> RunDir:
    """Return this machine's part of the first of the attempts that share their files."""
    if spec.attempt is None:
        return RunDir(spec.job, spec.node)
    return RunDir(spec.attempt.first_job, spec.attempt.first_node)


def is_experiment(path: str, job: str) -> bool:
    """Is the head's experiment directory this very one here, on a shared disk?"""
    try:
        with open(os.path.join(path, "job.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("job") == job) and os.access(path, os.W_OK)
    except (OSError, ValueError):
        return False
