"""Starts a node's part of a job: run directory, environment, supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from typing import TYPE_CHECKING

from orchestrator.node.job import resume_dir
from orchestrator.node.job.processes import OPTIONS
from orchestrator.node.job.run_directory import RunDir, machine_name
from orchestrator.node.machine import compile_caches
from orchestrator.node.server.ports import Ports
from orchestrator.node.server.session import LIBRARY, Refusal, ServerSession
from orchestrator.node.start.claims import Claims
from orchestrator.node.transfer import checkout, receive
from orchestrator.protocol.events import Ended
from orchestrator.protocol.requests.request import NO_PART
from orchestrator.protocol.requests.start import Start, StartedHere
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.timing import TOLD_SECONDS
from orchestrator.protocol.version import OWN

if TYPE_CHECKING:
    import subprocess

    from orchestrator.node.warm.standbys import WarmSupervisor


def start_part(session: ServerSession, spec: Spec) -> StartedHere:
    """Start this node's part of a job; return the supervisor's PID and its directories."""
    run, first = RunDir(spec.job, spec.node), first_run(spec)
    make_run_directory(session, run, first)
    resume_dir.remove_forgotten(time.time())
    receive.move_files(run, first)
    shared = is_experiment(spec.env["ORCHESTRATOR_EXPERIMENT"], spec.job)
    there = spec if shared else with_local_experiment(spec, run, first)
    attempt: dict[str, str] = {}
    if spec.attempt is not None:
        attempt = {
            "ORCHESTRATOR_ATTEMPT": str(spec.attempt.number),
            "ORCHESTRATOR_RESUME_DIR": resume_dir.make_resume_dir(first),
            "ORCHESTRATOR_MEMORY_DIR": resume_dir.make_resume_dir(first, in_memory=True),
            "ORCHESTRATOR_FIRST_WORLD_SIZE": str(spec.attempt.ranks),
        }
    claims = session.of(Claims)
    caches = compile_caches.cache_variables(there, os.environ)
    env = {**there.env, **attempt, **claims.environment(spec), **caches}
    there = there.replace(env=env, claim=claims.place)
    ports = session.of(Ports)
    if ports.peers:
        there = there.replace(listener=ports.peers.fileno())
    for name, text in spec.files:
        run.write(name, text)
    # The spec names the library, which stays as long as this run may need it.
    there = at_home(session, there)
    run.write_spec(there)
    pid, warm, why_cold = start_supervisor(session, run, there)
    session.job_started(run, spec)
    ports.hand_over()
    return StartedHere(supervisor=pid, shared=shared, warm=warm, why_cold=why_cold)


def make_run_directory(session: ServerSession, run: RunDir, first: RunDir) -> None:
    try:
        run.create()
    except FileExistsError:
        raise Refusal(f"job {run.job} already has node {run.node} here") from None
    try:
        session.refuse_if_stopped(run, first)
    except Refusal:
        # A stop may have written its last event there.
        with contextlib.suppress(OSError):
            os.rmdir(run.path)
        raise


def with_local_experiment(spec: Spec, run: RunDir, first: RunDir) -> Spec:
    """Return the spec with an experiment directory on this node's own disk."""
    directory = os.path.join(first.path, "experiment")
    os.makedirs(os.path.join(directory, "outputs"), mode=0o700, exist_ok=first.job != run.job)
    if first.path != run.path:
        os.symlink(directory, os.path.join(run.path, "experiment"))
    return spec.replace(env={**spec.env, "ORCHESTRATOR_EXPERIMENT": directory})


def store_part(session: ServerSession, spec: Spec) -> StartedHere:
    """Store the spec as that of a part that is over, with which a later attempt may begin."""
    run = RunDir(spec.job, spec.node)
    run.create()
    shared = is_experiment(spec.env["ORCHESTRATOR_EXPERIMENT"], spec.job)
    spec = at_home(session, spec if shared else with_local_experiment(spec, run, run))
    run.write_spec(spec)
    end = Ended(time=time.time(), agent=None, why="it stands by", killed={}, left=(), ranks={})
    run.append_event(end)
    session.job_started(run, spec)
    if spec.warm or spec.attempt is not None:
        from orchestrator.node.warm import standbys
        from orchestrator.node.warm.session import SPARE_SECONDS

        standbys.start_standby(run, os.environ, session.umask, SPARE_SECONDS)
    return StartedHere(supervisor=0, shared=shared)


def at_home(session: ServerSession, spec: Spec) -> Spec:
    """Return the spec with the facts that only this machine knows."""
    spec = checkout.spec_with_snapshot_first(spec)
    return spec.replace(library=LIBRARY, version=OWN, umask=session.umask, machine=machine_name())


def start_supervisor(session: ServerSession, run: RunDir, spec: Spec) -> tuple[int, bool, str]:
    """Start the supervisor and wait until it has started torchrun; raise a Refusal otherwise.

    Return its PID, True if it comes from a standby, and the reason if it should have.
    """
    ports = session.of(Ports)
    inherited = [*session.of(Claims).files, *ports.files]
    supervisor: subprocess.Popen[bytes] | WarmSupervisor
    with open(os.path.join(run.path, "supervisor.err"), "wb") as errors:
        warm, reason = take_warm(session, run, spec, [errors.fileno(), *inherited])
        if warm is not None:
            supervisor = warm
        else:
            # A warm start does not need this import.
            import subprocess

            supervisor = session.supervisor = subprocess.Popen(
                [sys.executable, *OPTIONS, LIBRARY, "supervise", run.job, str(run.node)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                pass_fds=inherited,
            )
    assert supervisor.stdout is not None
    word = b""
    if select.select([supervisor.stdout], [], [], spec.patience - TOLD_SECONDS)[0]:
        word = supervisor.stdout.readline()
    if word != b"ready\n":
        # A supervisor that is only slow must not start the job later.
        supervisor.kill()
        session.refuse_if_stopped(run)
        with open(os.path.join(run.path, "supervisor.err"), "rb") as file:
            words = word + file.read()[-2000:]
        raise Refusal(words.decode("utf-8", "replace").strip() or "its supervisor did not start")
    return supervisor.pid, warm is not None, reason


def take_warm(
    session: ServerSession, run: RunDir, spec: Spec, files: list[int]
) -> tuple[WarmSupervisor | None, str]:
    """Start the job from a standby; return None and the reason if none fits."""
    later = spec.attempt is not None and spec.attempt.number > 1
    if not (spec.warm or later):
        # A standby is used only by launches that ask for one.
        return None, ""
    # Most starts do not need this import.
    from orchestrator.node.warm import standbys

    return standbys.start_from_standby(run, spec, os.environ, session.umask, files)


def part_of(request: Start) -> Spec:
    """Return the spec of the part to start: the one sent, or the one stored, at its new place."""
    place = request.place
    if request.spec is not None:
        return request.spec
    if place is None or place.attempt is None:
        raise Refusal("a start without a spec is that of a later attempt")
    try:
        spec = RunDir(place.attempt.first_job, place.attempt.first_node).read_spec()
    except FileNotFoundError:
        raise Refusal("it has lost its part of the job", NO_PART) from None
    moved = (place.node, place.nnodes) != (spec.node, spec.nnodes)
    if moved and not {"node", "nnodes", "master"} <= {name for name, _ in spec.placed}:
        raise Refusal("another launcher starts its ranks, and wants the nodes that it had")
    return spec.at(place)


def first_run(spec: Spec) -> RunDir:
    """Return this machine's part of the first of the attempts that share their files."""
    if spec.attempt is None:
        return RunDir(spec.job, spec.node)
    return RunDir(spec.attempt.first_job, spec.attempt.first_node)


def is_experiment(path: str, job: str) -> bool:
    """Return True if the head's experiment directory is visible here, on a shared disk."""
    try:
        with open(os.path.join(path, "job.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("job") == job) and os.access(path, os.W_OK)
    except (OSError, ValueError):
        return False
