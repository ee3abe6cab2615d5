"""Answers a head's requests about this machine."""

from __future__ import annotations

from orchestrator.node.machine import reachability
from orchestrator.node.machine.probe import probe_machine
from orchestrator.node.server.ports import Ports
from orchestrator.node.server.session import LIBRARY, ServerSession, answers
from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.requests.machine import (
    Dial,
    Dialed,
    Examine,
    Listen,
    Listening,
    Probe,
    Probed,
)


@answers(Probe)
def probed(session: ServerSession, request: Probe) -> Probed:
    facts = probe_machine(request)
    if request.port:
        ports = session.of(Ports)
        ports.hold(request.port)
        facts["port"] = ports.number
        if request.port.peers:
            facts["peers_port"] = ports.peers_number
    return Probed(**facts, library=LIBRARY)


@answers(Examine)
def examine(session: ServerSession, request: Examine) -> Checkup:
    # A launch does not need this import.
    from orchestrator.node.machine.checkup import run_checkup

    return run_checkup(request)


@answers(Listen)
def listen(session: ServerSession, request: Listen) -> Listening:
    return Listening(ports=reachability.listen_on_ports(request))


@answers(Dial)
def dial(session: ServerSession, request: Dial) -> Dialed:
    return Dialed(answers=reachability.dial_addresses(request))
