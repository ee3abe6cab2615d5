"""Measure how long the agents of many nodes need to meet, and to leave: ours, and torchrun's own.

    python scripts/bench/meet.py [--agents 8 64 256 1024] [--late 1] [--limit 60]   (root)

An agent is a thread with torchrun's own agent and rendezvous, but for its ranks: 64 in a process,
node 0 in one of its own. `seconds` is the time from the start of the last agent until all know
their ranks. All agents share the processors of this machine, which as many machines would not:
`agents` is the processor time of one of them, `node 0` that of the agent that all have to ask, its
store included. Packets and bytes are those of the network, connections included. With `--late`,
node 0 takes so many seconds longer to import torch than the others.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

# Avoids a page of warnings about names.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from ground import machine, progress, require_own_network, show, table
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, registry

from orchestrator.node.job.ranks import fast_torchrun

WAYS = ("ours", "static", "c10d")
# The node, the clock at begin and end of a part, and the processor seconds.
RECORD = struct.Struct("dddd")
# Agents in a process.
GROUP = 64


@dataclass(frozen=True)
class Cost:
    """The cost of one part: to meet or to leave."""

    # Seconds since the last agent began.
    seconds: float
    # Processor seconds of an agent other than that of node 0.
    agent: float
    # Processor seconds of the agent of node 0.
    first: float
    # Packets of each agent, both ways.
    packets: float
    kilobytes: float


class Meeting(NamedTuple):
    """The settings of a meeting, which all agents know."""

    size: int
    way: str
    master: tuple[str, int]


class Gates(NamedTuple):
    """Pipes at which agents wait until their other end is closed."""

    others: tuple[int, int]
    first: tuple[int, int]
    leaving: tuple[int, int]


class Sent(NamedTuple):
    packets: int
    octets: int


class Agent(SimpleElasticAgent):
    """torchrun's agent without ranks."""

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        return {}

    def _stop_workers(self, worker_group: Any) -> None: ...

    def _monitor_workers(self, worker_group: Any) -> Any: ...

    def _shutdown(self, death_sig: Any = signal.SIGTERM, timeout: int = 30) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how agents of many nodes meet.")
    parser.add_argument("--agents", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--late", type=float, default=0.0, help="seconds: node 0 begins later")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one meeting")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    require_own_network()
    gc.freeze()
    about = machine()
    results: dict[tuple[int, str], tuple[Cost, ...]] = {}
    for size in options.agents:
        for way in options.ways:
            progress(f"{size} agents: {way}")
            results[size, way] = meeting(size, way, options.late, options.limit)
    progress("")
    data = {f"{n} {way}": [asdict(c) for c in costs] for (n, way), costs in results.items()}
    show(options.json, "How agents meet and leave", about, render(results), data)


def render(results: dict[tuple[int, str], tuple[Cost, ...]]) -> str:
    head = ["agents", "way", "part", "seconds", "an agent", "node 0", "packets", "kB"]
    rows = []
    for (size, way), costs in results.items():
        for part, cost in zip(("meet", "leave"), costs, strict=False):
            rows.append(
                [
                    str(size),
                    way,
                    part,
                    f"{cost.seconds:.2f} s",
                    f"{1000 * cost.agent:.2f} ms",
                    f"{1000 * cost.first:.0f} ms",
                    f"{cost.packets:.0f}",
                    f"{cost.kilobytes:.1f}",
                ]
            )
        if len(costs) < 2:
            rows.append([str(size), way, "leave" if costs else "meet", "never", *[""] * 4])
    return table(head, rows)


# -- one meeting ---------------------------------------------------------------------------------


def meeting(size: int, way: str, late: float, limit: float) -> tuple[Cost, ...]:
    """Run agents that all meet and then leave; return the cost of each part that all ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gates = Gates(*(os.pipe() for _ in range(3)))
    told, tell = os.pipe()
    groups = [range(1), *(range(n, min(n + GROUP, size)) for n in range(1, size, GROUP))]
    pids = [fork(group, Meeting(size, way, ("127.0.0.1", port)), gates, tell) for group in groups]
    for gate in gates:
        os.close(gate[0])
    os.close(tell)
    costs: list[Cost] = []
    with contextlib.suppress(TimeoutError):
        # Returns when all agents are ready.
        heard(told, size, limit)
        for last in (True, False):
            before = traffic()
            os.close((gates.others if last else gates.leaving)[1])
            if last:
                time.sleep(late)
                os.close(gates.first[1])
            records = heard(told, size, limit)
            costs.append(cost(records, before, traffic()))
    os.close(told)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    for gate in gates:
        with contextlib.suppress(OSError):
            os.close(gate[1])
    return tuple(costs)


def cost(records: Sequence[tuple[float, ...]], before: Sent, after: Sent) -> Cost:
    """Return the cost of one part from the agents' records."""
    begun = max(record[1] for record in records)
    [first] = (record[3] for record in records if record[0] == 0)
    return Cost(
        seconds=max(record[2] for record in records) - begun,
        agent=(sum(record[3] for record in records) - first) / max(1, len(records) - 1),
        first=first,
        packets=(after.packets - before.packets) / len(records),
        kilobytes=(after.octets - before.octets) / len(records) / 1e3,
    )


def heard(told: int, size: int, limit: float) -> list[tuple[float, ...]]:
    """Return a record of each agent; TimeoutError where one is missing after the limit."""
    deadline, data = time.monotonic() + limit, b""
    while len(data) < size * RECORD.size:
        if not select.select([told], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        more = os.read(told, 1 << 16)
        if not more:
            raise TimeoutError
        data += more
    return list(RECORD.iter_unpack(data))


def fork(nodes: range, about: Meeting, gates: Gates, tell: int) -> int:
    """Start a process with the agents of these nodes, which goes on until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    for gate in gates:
        os.close(gate[1])
    threads = [threading.Thread(target=agent, args=(n, about, gates, tell)) for n in nodes]
    for thread in threads:
        thread.start()
    signal.pause()
    os._exit(0)


def agent(node: int, about: Meeting, gates: Gates, tell: int) -> None:
    """Run the agent of a node: wait for its gate, meet, wait for the other gate, leave."""
    me = Agent(spec(node, about))
    os.write(tell, RECORD.pack(node, 0, 0, 0))
    os.read((gates.others if node else gates.first)[0], 1)
    measured(tell, node, lambda: meet(me, node, about))
    os.read(gates.leaving[0], 1)
    measured(tell, node, me._exit_barrier)


def spec(node: int, about: Meeting) -> WorkerSpec:
    """Return the spec of one rank per node, with the rendezvous as torchrun would make it."""
    size, way, master = about
    backend = "c10d" if way == "c10d" else "static"
    config = {"rank": node, "timeout": 900} if backend == "static" else {}
    parameters = RendezvousParameters(
        backend=backend,
        endpoint="{}:{}".format(*master),
        run_id="bench",
        min_nodes=size,
        max_nodes=size,
        local_addr="127.0.0.1",
        **config,
    )
    if backend == "c10d":
        parameters.config["is_host"] = node == 0
    return WorkerSpec(
        role="default",
        local_world_size=1,
        entrypoint="true",
        max_restarts=0,
        rdzv_handler=cast("RendezvousHandler", Later(parameters)),
        master_addr=master[0],
        master_port=master[1],
    )


class Later:
    """A rendezvous that is made when it is first needed: making it connects to the store."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self.parameters = parameters

    def __getattr__(self, name: str) -> Any:
        self.handler = registry.get_rendezvous_handler(self.parameters)
        self.__class__ = Made
        return getattr(self.handler, name)


class Made(Later):
    def __getattr__(self, name: str) -> Any:
        return getattr(self.handler, name)


def meet(me: Agent, node: int, about: Meeting) -> None:
    if about.way == "ours" and node:
        fast_torchrun.wait_for(*about.master)
    me._rendezvous(me._worker_group)


def measured(tell: int, node: int, part: Callable[[], Any]) -> None:
    """Run a part and write its cost; the process of node 0 includes the store's thread."""
    processor = time.thread_time if node else time.process_time
    before, begun = processor(), time.monotonic()
    try:
        part()
    except Exception as error:  # noqa: BLE001  it never meets the others
        os.write(2, f"node {node}: {error}\n".encode() if node < 2 else b"")
        return
    os.write(tell, RECORD.pack(node, begun, time.monotonic(), processor() - before))


def traffic() -> Sent:
    """Return what has gone over the loopback of this namespace."""
    [line] = (line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    octets, packets = line.partition(":")[2].split()[:2]
    return Sent(int(packets), int(octets))


if __name__ == "__main__":
    main()
