"""Reservations of GPUs and slots of a machine, and the queue for them.

A reservation is for whole GPUs, or for slots of a machine without any. All of it is advisory: it
only separates launches that ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from orchestrator.common.hosts import number_ranges
from orchestrator.protocol.message import Few, Message, Moment

# The variables that hide GPUs from a process, in order of precedence.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
WAITING, STARTING, RUNNING = "waiting", "starting", "running"


class DeviceRequest(Message):
    """The GPUs or slots of one machine that a launch requests."""

    # The name of the launch, shown to other users.
    job: str = ""
    # The number of GPUs; None for all that its ranks would see.
    gpus: Optional[Few] = None
    # The CUDA_VISIBLE_DEVICES of its ranks, if it is set.
    visible: str = ""
    # The number of slots, on a machine without GPUs.
    slots: Few = 0
    # The number of all slots of that machine.
    of: Few = 0
    # True if the job must not start without them.
    needed: bool = True


# The prefix of a slot's key, on a machine without GPUs.
SLOT = "slot-"


class ClaimEntry(Message):
    """One entry of a machine's lock table: a job that runs or starts, or a launch that waits."""

    id: str
    # One of waiting, starting, running.
    state: str
    job: str
    since: Moment
    # The owner of the entry's file.
    user: str = ""
    # The keys of the devices that it holds.
    keys: tuple[str, ...] = ()
    # The names of these for people: GPU 3, slot 0.
    names: tuple[str, ...] = ()
    # The time since which it waits, by the clock of one node for all.
    order: Moment = 0.0
    # The number of GPUs or slots that it wants here.
    wants: Few = 0
    # The host where the command was typed.
    head: str = ""

    @property
    def rank(self) -> tuple[float, str]:
        """Return the sort key of a waiting entry, which is the same on all machines."""
        return self.order, self.id


class Taken(Message):
    """GPUs or slots that others hold."""

    names: tuple[str, ...]
    user: str
    job: str = ""
    # The name of a process that belongs to no job.
    program: str = ""
    pid: int = 0
    state: str = RUNNING


def holders_in_words(taken: Sequence[Taken]) -> str:
    """Return the holders as text: GPU 0-3: ada, job train_1."""
    return "; ".join(map(_who_has, taken)) or "others were quicker"


def _who_has(taken: Taken) -> str:
    if taken.state == WAITING:
        return f"{taken.user}'s {taken.job} waits for what is free"
    job = f"{'about to start' if taken.state == STARTING else 'job'} {taken.job}"
    what = f"{taken.program} (PID {taken.pid})" if taken.program else job
    return f"{devices_in_words(taken.names)}: {taken.user}, {what}"


def devices_in_words(names: Sequence[str]) -> str:
    """Return GPU 0-2 for GPU 0, GPU 1 and GPU 2."""
    numbers = [name.rpartition(" ")[2] for name in names]
    kinds = {name.rpartition(" ")[0] for name in names}
    if len(kinds) == 1 and all(number.isdigit() for number in numbers):
        return f"{kinds.pop()} {number_ranges(numbers)}"
    return ", ".join(names)
