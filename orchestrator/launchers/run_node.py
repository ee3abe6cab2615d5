"""`orchestrator run-node`: one machine's part of a job, started by hand, without SSH.

It is the head of this one node: the same supervisor, log, events, verdict and exit codes.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common import hiding, interrupt
from orchestrator.common.errors import CheckFailed, NodeError, OrchestratorError, UsageError
from orchestrator.common.hosts import host_out_of_url, is_loopback
from orchestrator.config.launch import LaunchArguments
from orchestrator.config.parse import waiting_time
from orchestrator.head.commands.follow import follow_launched
from orchestrator.head.connect import reach as reaching
from orchestrator.head.connect.reach import Reached
from orchestrator.head.connect.subprocess_transport import LocalTransport
from orchestrator.head.nodes.facts import ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan import accelerate, plan
from orchestrator.head.plan.accelerate import Accelerate
from orchestrator.head.plan.model import Layout, Plan
from orchestrator.head.plan.request import LaunchRequest
from orchestrator.head.schedulers import queue
from orchestrator.head.screen.events import say
from orchestrator.head.start.claims import without_claims
from orchestrator.head.start.launch import discarded_on_error, start_job
from orchestrator.head.start.nodes import Nodes, settle_node
from orchestrator.head.start.parts import Prepared, first_placement, make_plan, run_hook
from orchestrator.head.start.record import Running, record_job
from orchestrator.head.start.request import resolve_request
from orchestrator.protocol.control import (
    Agreed,
    Hello,
    Reply,
    message_to_frame,
    read_frame,
)
from orchestrator.protocol.message import Nonsense, decode_value
from orchestrator.protocol.requests.machine import PortRequest, Probe
from orchestrator.protocol.requests.start import TakenPorts
from orchestrator.protocol.timing import STRANGER_SECONDS
from orchestrator.records import experiments
from orchestrator.records.experiment import Experiment, JobRecord

# Kubernetes sets this variable to the node's rank in an Indexed Job.
INDEX = "JOB_COMPLETION_INDEX"


@dataclass(frozen=True)
class MachinePart:
    """This machine's part of the job."""

    master: str
    port: int
    nnodes: int
    rank: int
    world: int | None


@dataclass(frozen=True)
class ThisMachine:
    """The one node whose part is started here, of a job of so many."""

    count: int

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (Node(socket.gethostname()),)

    def transport(self, timeout: float) -> LocalTransport:
        return LocalTransport()

    def experiment(self, root: Path, name: str) -> Experiment:
        return experiments.create_experiment(root, name)

    def mark(self, record: JobRecord) -> JobRecord:
        return replace(record, part_of=self.count)


def read_part(environ: Mapping[str, str]) -> MachinePart:
    """Read the environment; one error names every variable that is missing or wrong."""
    wrong: list[str] = []

    def number(name: str, least: int, default: int | None = None) -> int:
        text = environ.get(name, "").strip()
        if text.isdigit() and int(text) >= least:
            return int(text)
        if text:
            wrong.append(f"{name} is {text!r}; it must be a number from {least} up")
        elif default is None:
            wrong.append(f"{name} is not set")
        return default or 0

    nnodes = number("NNODES", 1)
    name = INDEX if environ.get(INDEX) and not environ.get("NODE_RANK") else "NODE_RANK"
    rank = number(name, 0, 0 if nnodes == 1 else None)
    port = number("MASTER_PORT", 1, plan.DEFAULT_PORT)
    world = number("WORLD_SIZE", 1, 0)
    # Only checked here; its value is read with the other options.
    number("NPROC_PER_NODE", 1, 0)
    master = environ.get("MASTER_ADDR", "").strip() or ("127.0.0.1" if nnodes == 1 else "")
    # torch and the resolver take an IPv6 address without brackets.
    master = host_out_of_url(master)
    if not master:
        wrong.append("MASTER_ADDR is not set")
    if nnodes and rank >= nnodes:
        wrong.append(f"{name} is {rank}, but with NNODES={nnodes} the last is {nnodes - 1}")
    if wrong:
        raise UsageError(
            "the environment does not say which node of the job this machine is:\n    "
            + "\n    ".join(wrong),
            "MASTER_ADDR=10.0.0.1 NNODES=2 NODE_RANK=0 orchestrator run-node train.py"
            "   (NODE_RANK=1 on the other)",
        )
    return MachinePart(master, port, nnodes, rank, world or None)


def run_part(mine: MachinePart, patience: float, arguments: LaunchArguments) -> int:
    arguments.refuse(dict.fromkeys(("detach", "dry_run"), "is not for run-node"))
    waiting_time("--wait", patience)
    request = without_claims(resolve_request(arguments))
    hiding.held.extend(request.secrets)
    mine = replace(mine, port=request.config.launch.master_port or mine.port)
    nodes = reach(request, mine, patience)
    (probed,) = nodes.probed
    if request.accelerate is not None:
        request = checked(request, request.accelerate, mine, probed)
    count, _ = plan.count_ranks(probed, request.config.launch)
    program = (
        request.target.name if request.target.kind != "module" else f"-m {request.target.name}"
    )
    hello = Hello(
        rank=mine.rank,
        nnodes=mine.nnodes,
        nproc=count,
        host=socket.gethostname(),
        program=program,
        world=mine.world,
    )
    if mine.rank:
        agreed = join(hello, (mine.master, mine.port), patience)
        launched = follow_lead(request, mine, nodes, agreed)
    else:
        launched = lead(request, mine, nodes, hello, patience)
    return follow_launched(launched, arguments.view)


def checked(
    request: LaunchRequest, by: Accelerate, mine: MachinePart, node: ProbedNode
) -> LaunchRequest:
    """Check accelerate's file as far as this machine can, before it meets the others."""
    accelerate.check_installed([node])
    # A file that serves all nodes contains machine_rank 0.
    rank = by.number("machine_rank") or 0
    if rank not in (0, mine.rank):
        raise CheckFailed(
            f"machine_rank is {rank} in {by.file}, but NODE_RANK is {mine.rank}",
            "leave machine_rank out of the file: it is computed",
        )
    return replace(request, config=accelerate.count_ranks(request.config, by, [node], mine.nnodes))


def address_of(master: str, patience: float) -> str:
    """Return its IP address; a container's name is known only once the container has started."""
    deadline = time.monotonic() + patience
    if not queue.resolve_name(master):
        say(f"MASTER_ADDR {master!r} cannot be resolved here yet")
    while not (address := queue.resolve_name(master)):
        if time.monotonic() > deadline:
            raise UsageError(
                f"MASTER_ADDR {master!r} could not be resolved here within {patience:.0f} s",
                "write the master's IP address, or correct its name",
            )
        time.sleep(PAUSE_SECONDS)
    return address


def reach(request: LaunchRequest, mine: MachinePart, patience: float) -> Nodes:
    """Start the server on this machine and probe it; it holds the port of torchrun from here on."""
    address = address_of(mine.master, patience)
    port = PortRequest(wanted=mine.port, exact=True, peers=mine.nnodes > 1)
    asked = Probe(
        cwd=str(Path.cwd()),
        workdir=request.config.launch.workdir,
        peers=(address,),
        target=request.target,
        accelerate=request.accelerate is not None,
        port=port if mine.rank == 0 else None,
    )
    node = settle_node(Node(socket.gethostname()), request.config.launch)
    reached = reaching.reach_node(LocalTransport(), node, asked)
    if mine.rank == 0:
        check_master(mine, reached, address)
    return Nodes(ThisMachine(mine.nnodes), LocalTransport(), (reached,))


def check_master(mine: MachinePart, reached: Reached, address: str) -> None:
    """Check that MASTER_ADDR is this machine, and its port free."""
    addresses = [entry.address for entry in reached.facts.addresses]
    here = address in addresses or is_loopback(address)
    if here and reached.facts.port:
        return
    if here:
        raise CheckFailed(
            f"port {mine.port} is taken on this machine, the master: by another NODE_RANK=0?",
            "set MASTER_PORT to another one, the same on all nodes",
        )
    say(
        f"MASTER_ADDR {mine.master} is not an address of this machine ({', '.join(addresses)}):"
        " right behind NAT, otherwise NODE_RANK=0 belongs on another machine"
    )


def lead(
    request: LaunchRequest, mine: MachinePart, nodes: Nodes, greeting: Hello, patience: float
) -> Running:
    """As node 0, wait for all nodes, and send them the job's name and its experiment."""
    with Master(greeting, mine.port) as master:
        hellos = master.gather(patience)
        experiment = experiments.create_experiment(
            request.where.experiments, request.config.launch.name
        )
        interrupt.undo_on_interrupt(experiment.discard)
        agreed = Agreed(
            job=f"{experiment.name}-{secrets.token_hex(3)}",
            experiment=str(experiment.path),
            counts=tuple(hello.nproc for hello in hellos),
            token=secrets.token_hex(32),
            peers_port=nodes.reached[0].facts.peers_port or 0,
        )
        with discarded_on_error(experiment):
            plan = make(request, mine, nodes, agreed)
        prepared = Prepared(request, nodes, experiment, plan)
        record = record_job(prepared)
        # The other nodes look for the record to learn if they share this directory.
        master.send(Reply(go=agreed))
    return begin(prepared, mine, record, agreed)


def follow_lead(request: LaunchRequest, mine: MachinePart, nodes: Nodes, agreed: Agreed) -> Running:
    """Start this machine's part as any other node."""
    plan = make(request, mine, nodes, agreed)
    name = f"{request.config.launch.name}-node{mine.rank}"
    interrupt.hold_interrupts()
    experiment = experiments.create_experiment(request.where.experiments, name)
    prepared = Prepared(request, nodes, experiment, plan)
    return begin(prepared, mine, record_job(prepared), agreed)


def begin(prepared: Prepared, mine: MachinePart, record: JobRecord, agreed: Agreed) -> Running:
    """Start this machine's part of a job that has a record."""
    # Supervisors ask no name server: one that hangs would hold up all that they do.
    address = queue.resolve_name(mine.master) or mine.master
    planned = prepared.plan
    ports = TakenPorts(port=planned.master_port, peers_port=agreed.peers_port)
    first = first_placement(record, address, ports)
    return start_job(
        prepared, record, first.replace(master=planned.master_address, token=agreed.token)
    )


def make(request: LaunchRequest, mine: MachinePart, nodes: Nodes, agreed: Agreed) -> Plan:
    """Plan this node's part; the other machines plan theirs."""
    layout = Layout(
        counts=agreed.counts,
        whys=("its own",) * len(agreed.counts),
        master=mine.master,
        port=mine.port,
        master_ip=queue.resolve_name(mine.master),
        index=mine.rank,
    )
    return run_hook(
        make_plan(request, nodes, agreed.job, agreed.experiment, layout), nodes, request
    )


# -- the meeting of all machines --------------------------------------------------------------


# The interval between two attempts to reach node 0.
PAUSE_SECONDS = 0.2
# The interval between two messages about missing nodes.
REMIND_SECONDS = 15.0


def why_not_one_job(nodes: Sequence[Hello]) -> str:
    """Return why these nodes cannot be one job, or ""; missing nodes are no reason."""
    first = nodes[0]
    seen: dict[int, Hello] = {}
    for node in nodes:
        if node.nnodes != first.nnodes:
            return f"NNODES is {first.nnodes} on {first.who} and {node.nnodes} on {node.who}"
        if node.rank in seen:
            return f"NODE_RANK is {node.rank} twice: on {seen[node.rank].host} and on {node.host}"
        if node.program != first.program:
            return f"{first.who} starts {first.program}, and {node.who} {node.program}"
        seen[node.rank] = node
    world = sum(node.nproc for node in nodes)
    for node in nodes:
        if len(nodes) == first.nnodes and node.world not in (None, world):
            return f"WORLD_SIZE is {node.world} on {node.who}, but all nodes together have {world}"
    return ""


class Master:
    """Node 0: gathers the others and tells them to go; on an error no node is left waiting."""

    def __init__(self, hello: Hello, port: int) -> None:
        self.own = hello
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            self.server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            raise CheckFailed(
                f"port {port} is taken on this machine, the master ({error.strerror})",
                "set MASTER_PORT to another one, the same on all nodes",
            ) from error
        self.there: dict[socket.socket, Hello] = {}

    def __enter__(self) -> Master:
        return self

    def __exit__(self, _: object, error: object, *__: object) -> None:
        if isinstance(error, OrchestratorError):
            self.send(Reply(failed=f"{self.own.who} starts nothing: {error.what}"))
        for connection in (self.server, *self.there):
            connection.close()

    @property
    def nodes(self) -> list[Hello]:
        return sorted([self.own, *self.there.values()], key=lambda node: node.rank)

    def gather(self, patience: float) -> list[Hello]:
        """Wait for all nodes and return them in their order."""
        deadline = time.monotonic() + patience
        # A job of one node waits for no hello that would be checked.
        self.check()
        while missing := sorted(set(range(self.own.nnodes)) - {node.rank for node in self.nodes}):
            names = f"NODE_RANK {', '.join(map(str, missing))}"
            say(f"waiting for {names}")
            if not select.select([self.server], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise refusal(f"{names} did not arrive within {patience:.0f} s")
            self.admit()
        return self.nodes

    def admit(self) -> None:
        """Accept one connection; close it if the caller is not a node of such a job."""
        connection, _ = self.server.accept()
        connection.settimeout(STRANGER_SECONDS)
        try:
            hello = decode_value(Hello, read_frame(connection), newer=True)
        except (OSError, Nonsense):
            connection.close()
            return
        # A node whose command was interrupted has left, and may be there again.
        left = [one for one in select.select(list(self.there), [], [], 0)[0] if not one.recv(1)]
        for one in left:
            del self.there[one]
            one.close()
        self.there[connection] = hello
        self.check()

    def check(self) -> None:
        """Refuse nodes that cannot form one job, here and on the nodes that have connected."""
        if reason := why_not_one_job([self.own, *self.there.values()]):
            self.send(Reply(error=reason))
            raise refusal(reason)

    def send(self, reply: Reply) -> None:
        for connection in self.there:
            with contextlib.suppress(OSError):
                connection.sendall(message_to_frame(reply))


def refusal(reason: str) -> CheckFailed:
    return CheckFailed(
        f"the nodes do not agree: {reason}; nothing was started",
        "use each NODE_RANK from 0 to NNODES-1 once, and the same NNODES, program and master on all"
        " nodes",
    )


def join(hello: Hello, address: tuple[str, int], patience: float) -> Agreed:
    """On any other node, wait for all nodes, and return what node 0 decided."""
    deadline, remind = time.monotonic() + patience, time.monotonic() + REMIND_SECONDS / 5
    reason = ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(address, timeout=STRANGER_SECONDS) as master:
                master.sendall(message_to_frame(hello))
                master.settimeout(max(0.01, deadline - time.monotonic()))
                return decision(decode_value(Reply, read_frame(master), newer=True))
        except Nonsense:
            reason = "another program listens there, or another version of orchestrator"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > remind:
            remind = time.monotonic() + REMIND_SECONDS
            say(f"node 0 cannot be reached at {address[0]}:{address[1]} yet ({reason})")
        time.sleep(PAUSE_SECONDS)
    raise NodeError(
        f"node 0 did not answer within {patience:.0f} s at {address[0]}:{address[1]}"
        f" ({reason or 'it does not answer'})",
        "start it with NODE_RANK=0 on the machine that MASTER_ADDR names; firewalls have to allow"
        " MASTER_PORT",
    )


def decision(reply: Reply) -> Agreed:
    """Return what node 0 decided, or raise its reason for starting nothing."""
    if reply.error:
        raise refusal(reply.error)
    if reply.go is None:
        raise CheckFailed(reply.failed, "its terminal says what to do")
    return reply.go
