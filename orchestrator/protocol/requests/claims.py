"""Who holds which GPUs and slots of a machine, and who waits for them.

A claim is on whole GPUs, or on slots of a machine that has none. All of it is advisory: it keeps
those apart who ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from orchestrator.common.hosts import ranges
from orchestrator.protocol.message import Few, Message, Moment

# The variables that hide GPUs from a process, in the order in which they count.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
WAITING, STARTING, RUNNING = "waiting", "starting", "running"


class Wish(Message):
    """The GPUs or slots of one machine that a launch wants."""

    job: str = ""  # the name of the launch, for those who find it there
    gpus: Optional[Few] = None  # so many; None: all that its ranks would see
    visible: str = ""  # CUDA_VISIBLE_DEVICES of its ranks, where that is set
    slots: Few = 0  # on a machine without GPUs,
    of: Few = 0  # of so many
    needed: bool = True  # the job must not start without them


SLOT = "slot-"  # how the key of a slot begins, where a machine has no GPUs


class ClaimEntry(Message):
    """One line of a machine's book: a job that runs or is about to, or a launch that waits."""

    id: str
    state: str  # waiting, starting, running
    job: str
    since: Moment
    user: str = ""  # whom the entry's file belongs to
    keys: tuple[str, ...] = ()  # that it holds
    names: tuple[str, ...] = ()  # of these, for people: GPU 3, slot 0
    order: Moment = 0.0  # since when it waits, by the clock of one node for all
    wants: Few = 0  # GPUs or slots of this machine,
    of: Few = 0  # of so many that it could have
    head: str = ""  # the host that it was typed on

    @property
    def rank(self) -> tuple[float, str]:
        """Return the place of a waiting entry: the order is the same on all machines."""
        return self.order, self.id


NO_ENTRIES: tuple[ClaimEntry, ...] = ()


class Taken(Message):
    """GPUs or slots that others have."""

    names: tuple[str, ...]  # for people
    user: str
    job: str = ""
    program: str = ""  # of a process that is no job of ours
    pid: int = 0
    state: str = RUNNING


def who_has(taken: Sequence[Taken]) -> str:
    """Say who has what: GPU 0-3: ada, job train_1."""
    return "; ".join(map(_who_has, taken)) or "others were quicker"


def _who_has(taken: Taken) -> str:
    if taken.state == WAITING:
        return f"{taken.user}'s {taken.job} waits for what is free"
    words = f"{in_words(taken.names)}: {taken.user}, "
    if taken.program:
        words += f"{taken.program} (PID {taken.pid})"
    else:
        words += f"{'about to start' if taken.state == STARTING else 'job'} {taken.job}"
    return words


def in_words(names: Sequence[str]) -> str:
    """Write GPU 0, GPU 1 and GPU 2 as GPU 0-2."""
    numbers = [name.rpartition(" ")[2] for name in names]
    kinds = {name.rpartition(" ")[0] for name in names}
    if len(kinds) == 1 and all(number.isdigit() for number in numbers):
        return f"{kinds.pop()} {ranges(numbers)}"
    return ", ".join(names)
