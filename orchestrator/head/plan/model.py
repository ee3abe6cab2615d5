"""The parts of a plan: the program, every node's part, and each setting with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.common.hosts import in_url
from orchestrator.head.nodes.node_list import Node
from orchestrator.protocol.requests.claims import Wish


@dataclass(frozen=True)
class EnvSetting:
    """One environment variable of a node's ranks, and why it has its value."""

    name: str
    value: str
    why: str
    yours: bool = False  # set by the user, not computed
    secret: bool = False  # shown nowhere


@dataclass(frozen=True)
class NodeAddress:
    """A node's own address in the job's network, and the interface that has it."""

    address: str
    interface: str


@dataclass(frozen=True)
class ProgramTarget:
    """The program that was asked for. Kind: "engine", "module", or "auto" for a file or program."""

    kind: str
    name: str
    args: tuple[str, ...]
    near: str = ""  # a question after a file that may be meant, where there is none of the name


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
    target: ProgramTarget  # kind: "engine", "script", "module" or "program"
    settings: tuple[EnvSetting, ...]  # in order; later ones win
    agent: tuple[str, ...]  # torchrun, as the supervisor starts it, up to what `placed` adds
    way: str = ""  # by which program the node was reached, and why
    placed: tuple[tuple[str, str], ...] = ()  # fields of the spec, and its options for them
    library: str = ""  # where this package is on the node
    runs: str = ""  # names its directory for jobs
    unset: tuple[str, ...] = ()  # variables that the hook removed from the environment
    program: tuple[str, ...] = ()  # how torchrun's command line names the program
    paste: tuple[str, ...] = ()  # the same job without a supervisor, for a shell
    files: tuple[tuple[str, str], ...] = ()  # (name, text), written where the agent starts
    wish: Wish | None = None  # the GPUs or slots that the job is to hold here

    @property
    def env(self) -> dict[str, str]:
        return {setting.name: setting.value for setting in self.settings}

    @property
    def last_rank(self) -> int:
        return self.first_rank + self.nproc - 1


@dataclass(frozen=True)
class Plan:
    """The whole job."""

    job: str
    start: str  # fork or plain
    master_address: str
    master_port: int
    world_size: int
    nodes: tuple[NodePlan, ...]
    spares: tuple[str, ...]
    notes: tuple[str, ...]  # decisions made for the user, printed at every launch
    transport: str = "ethernet"  # how NCCL's data travels: Fabric.kind
    hints: tuple[str, ...] = ()  # printed by `plan --explain`

    @property
    def master(self) -> str:
        """Show where ranks meet, as host:port or [v6]:port."""
        return f"{in_url(self.master_address)}:{self.master_port}"
