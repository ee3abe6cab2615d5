"""`orchestrator connections`: hold SSH connections open between commands, show and close them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from orchestrator.common.errors import EXIT_DONE, EXIT_NODE, OrchestratorError, UsageError
from orchestrator.common.text import Say, duration, parse_seconds
from orchestrator.config.launch import Where
from orchestrator.head.background.process import Answers, Background
from orchestrator.head.connect.held import control
from orchestrator.head.connect.held.control import Holding
from orchestrator.head.connect.held.transport import HeldTransport
from orchestrator.head.connect.ssh_config import Login, SshConfig
from orchestrator.head.connect.transport import Transport
from orchestrator.head.nodes.node_list import read_nodes
from orchestrator.head.screen import output
from orchestrator.head.screen.output import Cell, tell
from orchestrator.head.start.stages import Launched

IDLE_SECONDS = 600.0  # without use after which they are closed
START_SECONDS = 20.0
POLL_SECONDS = 0.05
STATES = {"open": "green", "connecting": "", "lost": "bold red"}
NODE_PATIENCE_SECONDS = 2.0  # with a node whose connection may be dead


# -- the command ----------------------------------------------------------------------------------


def connections(where: Where, *, idle: str | None, close: bool, as_json: bool) -> int:
    """Show the connections that are held, after opening or closing them."""
    if idle is not None and close:
        raise UsageError("--open cannot be combined with --close", "give one of them")
    if close:
        held = control.end()
    elif idle is not None:
        held = hold_all(where, parse_seconds("--open", idle))
    else:
        held = control.holding()
    if as_json:
        tell(json.dumps(to_data(held, closed=close), indent=1))
    else:
        tell(to_text(held, closed=close))
    lost = held is not None and any(one.state == "lost" for one in held.connections)
    return EXIT_NODE if lost and not close else EXIT_DONE


def hold_all(where: Where, idle: float) -> Holding | None:
    """Hold connections to all nodes of the list, and wait until each is there or has failed.

    Other nodes whose connections are held, and perhaps lost, are none of its business.
    """
    transport = HeldTransport(SshConfig(where.ssh_config))
    held = keep(transport, read_nodes(where.node_list), idle)
    names = {one.node for one in held.connections} if held else set()
    deadline = time.monotonic() + transport.timeout + START_SECONDS
    while held is not None and time.monotonic() < deadline:
        if all(one.state != "connecting" for one in held.connections):
            break
        time.sleep(POLL_SECONDS)
        held = control.holding()
        if held is not None:
            own = tuple(one for one in held.connections if one.node in names)
            held = replace(held, connections=own)
    return held


def to_text(held: Holding | None, *, closed: bool) -> str:
    if held is None or not held.connections:
        return "orchestrator: no connections are held open"
    rows: list[list[Cell]] = [["NODE", "CONNECTION", "COMMANDS NOW", ""]]
    for one in held.connections:
        state: Cell = "closed" if closed else (one.state, STATES[one.state])
        rows.append([one.node, state, str(one.sessions or "-"), one.why])
    ends = f"process {held.pid} " + (
        "is gone" if closed else f"ends after {duration(held.idle)} without use"
    )
    return f"{output.table(rows, output.terminal(), headed=True)}\n{ends}"


def to_data(held: Holding | None, *, closed: bool) -> dict[str, Any]:
    if held is None:
        return {"pid": None, "connections": []}
    listed = [asdict(one) | ({"state": "closed"} if closed else {}) for one in held.connections]
    return {"pid": held.pid, "idle": held.idle, "connections": listed}


# -- the process ----------------------------------------------------------------------------------


def held_connections(answers: Answers, idle: float, patience: float) -> None:
    """Become the process that holds connections."""
    from orchestrator.head.connect.held.process import hold_connections

    def ready() -> None:
        answers.tell(pid=os.getpid())
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        answers.out.close()
        os.chdir("/")  # no directory of the user's is held

    try:
        hold_connections(idle, ready, patience)
    except BlockingIOError:  # another command was faster, and starts one
        answers.tell(pid=None)


def keep_after(launched: Launched, say: Say) -> threading.Thread:
    """Hold the connections of a job with --warm open for the commands after it, meanwhile."""

    def hold() -> None:
        nodes = [node.node for node in launched.nodes.reached]
        try:
            if warm is not None:
                keep(launched.nodes.transport, nodes, parse_seconds("--warm", warm))
        except (OrchestratorError, OSError) as error:
            say(f"its SSH connections are not held open: {error}")

    warm = launched.running.record.launch.warm
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    return thread


def keep(
    transport: Transport,
    nodes: Sequence[Login],
    idle: float = IDLE_SECONDS,
    patience: float = NODE_PATIENCE_SECONDS,
) -> Holding | None:
    """Hold connections to these nodes from now on; None where nodes are not reached by SSH.

    The process that does so is started where there is none yet, and replaced where it runs another
    version of this program. It connects by itself, while the caller goes on.
    """
    if not isinstance(transport, HeldTransport):
        return None
    held = control.hold(transport, nodes, idle)
    if held is None:
        control.retire()
        Background(held_connections, idle=idle, patience=patience).answer()
        deadline = time.monotonic() + START_SECONDS
        while (held := control.hold(transport, nodes, idle)) is None:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)  # another command has started it, and it is not ready yet
    if held is None:
        raise OrchestratorError("the process that holds SSH connections does not answer")
    return held
