"""The data of a plan: its layout, each node's part, and each setting with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.common.hosts import host_in_url
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.requests.claims import DeviceRequest
from orchestrator.protocol.spec import Target


@dataclass(frozen=True)
class EnvSetting:
    """One environment variable of a node's ranks, and why it has its value."""

    name: str
    value: str
    why: str
    # True if the user set it; False if it was computed.
    yours: bool = False
    # True if its value may not be shown.
    secret: bool = False


@dataclass(frozen=True)
class NodeAddress:
    """A node's own address in the job's network, and the interface that has it."""

    address: str
    interface: str


@dataclass(frozen=True)
class Layout:
    """Holds what all nodes of a job share: the numbers of their ranks, and where these meet."""

    # The number of ranks of every node of the job.
    counts: tuple[int, ...]
    # The reasons for these numbers.
    whys: tuple[str, ...]
    port: int
    # The address of the first node.
    master: str = ""
    # The IP address if `master` is a host name.
    master_ip: str = ""
    # The index of the first node that is planned here.
    index: int = 0
    notes: tuple[str, ...] = ()
    job: str = ""
    # The job's directory.
    experiment: str = ""
    # The start method: "fork" or "plain".
    start: str = "fork"
    # The kind of the program, the same on all nodes.
    kind: str = "auto"

    def first_rank(self, index: int) -> int:
        return sum(self.counts[:index])


@dataclass(frozen=True)
class NodePlan:
    """One node's part of a job."""

    index: int
    node: Node
    address: str
    first_rank: int
    nproc: int
    nproc_why: str
    python: str
    workdir: str
    target: Target
    # Later settings override earlier ones.
    settings: tuple[EnvSetting, ...]
    # Torchrun's command line for the supervisor, without the options of `placed`.
    agent: tuple[str, ...]
    # The program that connects to the node, and the reason.
    way: str = ""
    # The fields of the placement, each with the agent's option for it.
    placed: tuple[tuple[str, str], ...] = ()
    # The path of this package on the node.
    library: str = ""
    # The name of the node's directory for runs.
    runs: str = ""
    # The variables that the hook removed from the environment.
    unset: tuple[str, ...] = ()
    # The program and its arguments as torchrun's command line takes them.
    program: tuple[str, ...] = ()
    # The command line that runs the node's part from a shell, without a supervisor.
    paste: tuple[str, ...] = ()
    # Files as (name, text) that are written into the agent's working directory.
    files: tuple[tuple[str, str], ...] = ()
    # The GPUs or slots that the job holds on the node.
    devices: DeviceRequest | None = None

    @property
    def env(self) -> dict[str, str]:
        return {setting.name: setting.value for setting in self.settings}

    @property
    def last_rank(self) -> int:
        return self.first_rank + self.nproc - 1


@dataclass(frozen=True)
class Plan:
    """The plan of a whole job."""

    job: str
    # The start method: "fork" or "plain".
    start: str
    master_address: str
    master_port: int
    world_size: int
    nodes: tuple[NodePlan, ...]
    # Decisions made for the user, printed at every launch.
    notes: tuple[str, ...]
    spares: tuple[str, ...] = ()
    # The kind of network for NCCL's data, see Fabric.kind.
    transport: str = "ethernet"
    # Lines that `plan --explain` prints.
    hints: tuple[str, ...] = ()

    @property
    def master(self) -> str:
        """Return the master's address as host:port or [v6]:port."""
        return f"{host_in_url(self.master_address)}:{self.master_port}"
