"""What the closer look at a node found (node/facts/deep_probe.py), for the doctor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.head.connect.channel import NodeChannel, nonsense
from orchestrator.protocol import messages
from orchestrator.protocol.message import Nonsense, decode

PATIENCE = 90.0  # longer than the longest limit of a part, which is that of importing torch


@dataclass(frozen=True)
class Gpu:
    """One GPU, as its own tool tells; bytes. None: this model or driver does not say."""

    vendor: str  # nvidia, amd
    index: int | None
    model: str
    uuid: str = ""
    pci: str = ""
    memory: int | None = None
    used: int | None = None
    busy: int | None = None  # percent
    temperature: int | None = None
    driver: str = ""
    compute_mode: str = ""
    mig: bool | None = None
    ecc: bool | None = None
    ecc_errors: int | None = None  # uncorrected, since the driver started
    ecc_errors_ever: int | None = None
    pages_pending: bool | None = None  # memory that is retired at the next reset
    rows_pending: bool | None = None
    rows_failed: bool | None = None  # memory that could not be replaced: the card is to be changed
    pcie_width: int | None = None
    pcie_width_most: int | None = None
    problem: str = ""  # of a GPU that is sick


@dataclass(frozen=True)
class Holder:
    """A process that computes on a GPU."""

    pid: int
    gpu: str  # its uuid, "" where the tool does not say
    name: str
    used: int | None = None
    user: str = ""
    job: str = ""  # of ours


@dataclass(frozen=True)
class Xid:
    """An error that NVIDIA's driver reported since the machine was started."""

    pci: str
    xid: int
    words: str
    count: int


@dataclass(frozen=True)
class Code:
    """The git revision of the workdir."""

    commit: str
    top: str
    changed: tuple[str, ...]  # files, the first hundred
    changes: int
    diff: str  # a hash of the changes: equal commit and diff are equal code


@dataclass(frozen=True)
class Torch:
    """The outcome of importing torch on a node."""

    python: str
    torch: str = ""
    cuda: str = ""
    hip: str = ""
    nccl: str = ""
    available: bool = False  # torch.cuda.is_available()
    gpus: int = 0
    error: str = ""


@dataclass(frozen=True)
class Checkup:
    """Parts that were not asked for are None; what could not be found out is in `problems`."""

    gpus: tuple[Gpu, ...] | None = None
    holders: tuple[Holder, ...] | None = None
    xids: tuple[Xid, ...] | None = None
    code: Code | None = None
    script: str | None = None  # sha256
    torch: Torch | None = None
    names: tuple[str, ...] | None = None  # the addresses that the node's own name stands for there
    problems: dict[str, str] = field(default_factory=dict)  # part -> why it is not known

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def ask(channel: NodeChannel, workdir: str, script: str = "", parts: Sequence[str] = ()) -> Checkup:
    """Ask a node for its checkup; the parts are gpus, xids, code, torch and names, or all."""
    request = messages.Checkup(workdir=workdir, script=script, parts=tuple(parts))
    answer = channel.ask(request, PATIENCE)
    try:
        return decode(Checkup, answer.checkup)
    except Nonsense as error:
        raise nonsense(error) from error
