"""Answers what a head asks about this machine."""

from __future__ import annotations

import time

from orchestrator.node.facts.probe import probe
from orchestrator.node.server.ports import Ports
from orchestrator.node.server.visit import LIBRARY, Visit, answers
from orchestrator.protocol.requests.machine import (
    CheckedUp,
    Dial,
    Dialed,
    Examine,
    Hook,
    Hooked,
    Listen,
    Listening,
    Probe,
    Probed,
)


@answers(Probe)
def probed(visit: Visit, request: Probe) -> Probed:
    facts = probe(request)
    if request.port:
        ports = visit.of(Ports)
        ports.hold(request.port)
        facts["port"] = ports.number
        if request.port.peers:
            facts["peers_port"] = ports.peers_number
    return Probed(**facts, library=LIBRARY, time=time.time())


@answers(Examine)
def examine(visit: Visit, request: Examine) -> CheckedUp:
    from orchestrator.node.facts.deep_probe import checkup  # a launch does without it

    return CheckedUp(checkup=checkup(request), time=time.time())


@answers(Listen)
def listen(visit: Visit, request: Listen) -> Listening:
    from orchestrator.node.server import reachability

    return Listening(ports=reachability.listen(request))


@answers(Dial)
def dial(visit: Visit, request: Dial) -> Dialed:
    from orchestrator.node.server import reachability

    return Dialed(answers=reachability.dial(request))


@answers(Hook)
def hook(visit: Visit, request: Hook) -> Hooked:
    from orchestrator.node.server.hook import run_hook

    changed, unset = run_hook(request.text, request.env, request.workdir, visit.umask)
    return Hooked(env=changed, unset=tuple(unset))
