"""Starts a node's part of a job: run directory, environment, supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from typing import TYPE_CHECKING, Optional

from orchestrator.node.job import resume_dir
from orchestrator.node.job.processes import OPTIONS
from orchestrator.node.job.run_directory import PartDir, RunDir, machine_name, write_private
from orchestrator.node.machine import compile_caches
from orchestrator.node.server.ports import Ports
from orchestrator.node.server.session import LIBRARY, Refusal, ServerSession, stored_spec
from orchestrator.node.start.claims import Claims
from orchestrator.node.transfer import checkout, receive
from orchestrator.protocol.requests.start import Start, StartedHere
from orchestrator.protocol.spec import Placement, Spec
from orchestrator.protocol.timing import TOLD_SECONDS
from orchestrator.protocol.version import OWN

if TYPE_CHECKING:
    import subprocess

    from orchestrator.node.warm.standbys import WarmSupervisor


def start_part(session: ServerSession, request: Start) -> StartedHere:
    """Start an attempt of this node's part of a job; return the supervisor's PID."""
    spec = request.spec or spec_at(request.place)
    run = RunDir(spec.job, spec.part, spec.attempt)
    make_run_directory(session, run)
    resume_dir.remove_forgotten(time.time())
    receive.move_files(run)
    shared = is_experiment(spec.env["ORCHESTRATOR_EXPERIMENT"], spec.job)
    there = spec if shared else with_local_experiment(spec, run)
    if request.spec is not None:
        PartDir(run.job, run.part).write_spec(at_home(session, there))
    attempt: dict[str, str] = {}
    if spec.restarts:
        attempt = {
            "ORCHESTRATOR_ATTEMPT": str(spec.attempt),
            "ORCHESTRATOR_RESUME_DIR": resume_dir.make_resume_dir(run),
            "ORCHESTRATOR_MEMORY_DIR": resume_dir.make_resume_dir(run, in_memory=True),
            "ORCHESTRATOR_FIRST_WORLD_SIZE": str(spec.first_ranks),
        }
    claims = session.of(Claims)
    caches = compile_caches.cache_variables(there, os.environ)
    env = {**there.env, **attempt, **claims.environment(spec), **caches}
    there = there.replace(env=env, claim=claims.place)
    ports = session.of(Ports)
    if ports.peers:
        there = there.replace(listener=ports.peers.fileno())
    for name, text in spec.files:
        write_private(os.path.join(run.path, name), text)
    # The spec names the library, which stays as long as this run may need it.
    there = at_home(session, there)
    run.write_spec(there)
    pid, warm, why_cold = start_supervisor(session, run, there)
    session.job_started(run, spec)
    ports.hand_over()
    return StartedHere(supervisor=pid, shared=shared, warm=warm, why_cold=why_cold)


def make_run_directory(session: ServerSession, run: RunDir) -> None:
    try:
        run.create()
    except FileExistsError:
        raise Refusal(f"attempt {run.attempt} of job {run.job} is here already") from None
    try:
        session.refuse_if_stopped(run)
    except Refusal:
        # A stop may have written its last event there.
        with contextlib.suppress(OSError):
            os.rmdir(run.path)
        raise


def with_local_experiment(spec: Spec, part: PartDir) -> Spec:
    """Return the spec with an experiment directory on this node's own disk."""
    os.makedirs(os.path.join(part.experiment, "outputs"), mode=0o700, exist_ok=True)
    return spec.replace(env={**spec.env, "ORCHESTRATOR_EXPERIMENT": part.experiment})


def store_part(session: ServerSession, spec: Spec) -> StartedHere:
    """Store the spec of a spare, with which a later attempt may begin."""
    from orchestrator.node.warm import standbys
    from orchestrator.node.warm.session import SPARE_SECONDS

    part = PartDir(spec.job, spec.part)
    os.makedirs(part.home, mode=0o700)
    shared = is_experiment(spec.env["ORCHESTRATOR_EXPERIMENT"], spec.job)
    spec = at_home(session, spec if shared else with_local_experiment(spec, part))
    part.write_spec(spec)
    session.job_started(part, spec)
    standbys.start_standby(spec, os.environ, session.umask, SPARE_SECONDS)
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
                [sys.executable, *OPTIONS, LIBRARY, "supervise", *run.words],
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
    if not spec.warm and spec.attempt == 1:
        # A standby is used only by launches that ask for one.
        return None, ""
    # Most starts do not need this import.
    from orchestrator.node.warm import standbys

    return standbys.start_from_standby(run, spec, os.environ, session.umask, files)


def spec_at(place: Optional[Placement]) -> Spec:
    """Return the stored spec of a node's part, at its place in a later attempt."""
    if place is None:
        raise Refusal("a start without a spec is that of a later attempt")
    spec = stored_spec(PartDir(place.job, place.part))
    moved = (place.node, place.nnodes) != (spec.node, spec.nnodes)
    if moved and not {"node", "nnodes", "master"} <= {name for name, _ in spec.placed}:
        raise Refusal("another launcher starts its ranks, and wants the nodes that it had")
    return spec.at(place)


def is_experiment(path: str, job: str) -> bool:
    """Return True if the head's experiment directory is visible here, on a shared disk."""
    try:
        with open(os.path.join(path, "job.json"), encoding="utf-8") as file:
            return bool(json.load(file).get("job") == job) and os.access(path, os.W_OK)
    except (OSError, ValueError):
        return False
