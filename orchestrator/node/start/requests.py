"""Answers what a head asks to start a node's part of a job, the first time and again."""

from __future__ import annotations

import contextlib
import math

from orchestrator.node.job import resume_dir
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.server.ports import Ports
from orchestrator.node.server.visit import Visit, answers
from orchestrator.node.start import book, claims, start
from orchestrator.node.start.claims import Claims
from orchestrator.node.warm.visit import WarmVisit
from orchestrator.protocol.requests.request import Nothing
from orchestrator.protocol.requests.start import (
    Claim,
    Claimed,
    Hook,
    Hooked,
    Page,
    ReadBook,
    Release,
    Start,
    StartedHere,
    TakenPorts,
    TakePorts,
    Unclaim,
    Wait,
)


@answers(Hook)
def hook(visit: Visit, request: Hook) -> Hooked:
    from orchestrator.node.start.hook import run_hook  # not for every job

    changed, unset = run_hook(request.text, request.env, request.workdir, visit.umask)
    return Hooked(env=changed, unset=tuple(unset))


@answers(Start)
def start_part(visit: Visit, request: Start) -> StartedHere:
    spec = start.part_of(request)
    return start.stand_by(visit, spec) if request.later else start.start(visit, spec)


@answers(TakePorts)
def take_ports(visit: Visit, request: TakePorts) -> TakenPorts:
    ports = visit.of(Ports)
    ports.hold(request.port)
    return TakenPorts(port=ports.number, peers_port=ports.peers_number)


@answers(Release)
def release(visit: Visit, request: Release) -> Nothing:
    from orchestrator.node.warm import standbys

    run = RunDir(request.job, request.node)
    with contextlib.suppress(OSError, ValueError):
        job = standbys.job_of(run.read_spec())
        if job:
            standbys.end_of_job(job)
    visit.of(WarmVisit).next_look = math.inf  # there is no next attempt
    visit.of(Claims).drop()
    resume_dir.remove(run)
    return Nothing()


@answers(Claim)
def claim(visit: Visit, request: Claim) -> Claimed:
    # What a further attempt wishes is known here.
    wish = RunDir(*request.part).read_spec().wish if request.part else request.wish
    if wish is None:
        return Claimed(held=True)
    claimed = visit.of(Claims).take(wish, request.patience, new=request.part is None)
    return claimed.replace(machine=book.machine())


@answers(Unclaim)
def unclaim(visit: Visit, request: Unclaim) -> Nothing:
    visit.of(Claims).let_go()
    return Nothing()


@answers(Wait)
def wait(visit: Visit, request: Wait) -> Nothing:
    visit.of(Claims).wait(request.entry)
    return Nothing()


@answers(ReadBook)
def read_book(visit: Visit, request: ReadBook) -> Page:
    return claims.read(visit, request)
