"""Reserves GPUs and slots for a job that is about to start, and passes them to its supervisor."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.node.job.run_directory import PartDir
from orchestrator.node.machine import amd, nvidia
from orchestrator.node.server.session import Refusal, ServerSession, SessionState
from orchestrator.node.start.lock_table import LockTable, printable_text
from orchestrator.protocol.facts import Card
from orchestrator.protocol.requests.claims import (
    RUNNING,
    SLOT,
    STARTING,
    VISIBLE,
    WAITING,
    ClaimEntry,
    DeviceRequest,
    Taken,
    devices_in_words,
    holders_in_words,
)
from orchestrator.protocol.requests.start import Claimed, LockTableState, ReadLockTable
from orchestrator.protocol.spec import Spec
from orchestrator.protocol.timing import RIVALS_SECONDS

# The interval of the looks at the locks of others.
LOOK_SECONDS = 0.05
# A driver that is loaded for each query needs some seconds.
TOOL_SECONDS = 5.0
# This server computes for other processes.
SHARED_BY_ALL = ("nvidia-cuda-mps-server",)
OF_VENDOR = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


class Device(NamedTuple):
    """One GPU, or one slot of a machine without GPUs, which can be reserved."""

    # The name in the machine's lock table.
    key: str
    # The name for people, such as GPU 3.
    name: str
    # The name in the variable that hides other GPUs from a process.
    value: str = ""
    vendor: str = ""
    uuid: str = ""


class Claims(SessionState):
    """The devices that this session holds, with at most one entry in the lock table."""

    def __init__(self, session: ServerSession) -> None:
        super().__init__(session)
        self.lock_table: LockTable | None = None
        self.entry: ClaimEntry | None = None
        self.held: list[Device] = []
        # All devices that the request may use.
        self.of: list[Device] = []

    @property
    def files(self) -> list[int]:
        """Return the descriptor that holds all locks; a supervisor inherits it."""
        return [self.lock_table.fd] if self.lock_table and self.held else []

    @property
    def place(self) -> str:
        """Return the path of this session's entry, or an empty string if nothing is held."""
        if self.lock_table is None or self.entry is None or not self.held:
            return ""
        return self.lock_table.file(self.entry.id)

    def opened(self) -> LockTable:
        if self.lock_table is None:
            self.lock_table = LockTable()
            # Reading the entries removes those of this user that have ended.
            self.lock_table.entries()
        return self.lock_table

    # -- to wait ------------------------------------------------------------------------------

    def wait(self, entry: ClaimEntry) -> None:
        """Enter the queue, visible to all readers of the lock table, and hold no device."""
        self.unlock()
        if self.entry is not None and self.entry.id != entry.id:
            self.forget(self.entry)
        self.enter(entry.replace(state=WAITING))

    def unlock(self) -> None:
        for one in self.held:
            self.opened().unlock(one.key)
        self.held = []

    def forget(self, entry: ClaimEntry) -> None:
        self.opened().remove(entry.id)
        self.opened().unlock(entry.id)
        self.entry = None

    def enter(self, entry: ClaimEntry) -> None:
        lock_table = self.opened()
        if self.entry is None and not lock_table.lock(entry.id):
            raise Refusal(f"another process has the entry {entry.id}")
        if self.entry is not None:
            entry = entry.replace(id=self.entry.id)
        self.entry = entry
        lock_table.write(entry)

    # -- to take ------------------------------------------------------------------------------

    def take(self, devices: DeviceRequest, patience: float, *, new: bool = False) -> Claimed:
        """Reserve the requested devices, all or none; wait `patience` seconds for other starts.

        A new launch that has not waited leaves enough devices for those in the queue.
        """
        # The devices are still held from the attempt before.
        if self.held:
            return self.claimed()
        lock_table, deadline = self.opened(), time.monotonic() + patience
        self.of, count, lacking = wanted_devices(devices)
        if lacking:
            return Claimed(lacking=lacking)
        strangers, unsure = users_of(self.of) if count else ({}, "")
        while True:
            free = [one for one in self.of if not lock_table.locked(one.key)]
            unused = [one for one in free if one.key not in strangers]
            if new and self.entry is None:
                before = launches_waiting(lock_table.entries(), len(unused) - count)
                if before:
                    return Claimed(taken=before, unsure=unsure)
            most = count if devices.needed else min(count, len(unused))
            if len(unused) >= most and self.lock(nearest_devices(unused, most), devices):
                return self.claimed().replace(unsure=unsure)
            if len(unused) >= most:
                # A device has just been taken by another launch; others may be free.
                continue
            taken = device_holders(lock_table.entries(), self.of, strangers)
            if not any(each.state == STARTING for each in taken) or time.monotonic() > deadline:
                return Claimed(taken=taken, unsure=unsure)
            time.sleep(LOOK_SECONDS)

    def lock(self, chosen: Sequence[Device], devices: DeviceRequest) -> bool:
        """Lock these devices and write the entry; return False, with no lock, if one is taken."""
        lock_table, got = self.opened(), list[Device]()
        try:
            for one in chosen:
                if not lock_table.lock(one.key):
                    return False
                got.append(one)
            self.note(got, devices)
            self.held = got
        finally:
            # Another launch was faster, or the disk is full.
            if not self.held:
                for one in got:
                    lock_table.unlock(one.key)
        return True

    def note(self, got: Sequence[Device], devices: DeviceRequest) -> None:
        now = time.time()
        before = self.entry or ClaimEntry(id=os.urandom(8).hex(), state=STARTING, job="", since=now)
        self.enter(
            before.replace(
                state=STARTING,
                job=devices.job,
                since=now,
                keys=tuple(one.key for one in got),
                names=tuple(one.name for one in got),
            )
        )

    def claimed(self) -> Claimed:
        names = devices_in_words([one.name for one in self.held])
        part = len(self.held) < len(self.of)
        words = f"{names} of {len(self.of)}" if part else names
        return Claimed(held=True, words=words)

    def let_go(self) -> None:
        """Release devices that no job uses; a launch from the queue returns to its place there."""
        if self.lock_table is None or self.entry is None or self.entry.state == RUNNING:
            return
        if self.entry.order:
            self.wait(self.entry.replace(keys=(), names=()))
        else:
            self.unlock()
            self.forget(self.entry)

    def drop(self) -> None:
        """Release everything; locks that a supervisor has inherited stay held by it."""
        if self.lock_table is None:
            return
        if self.entry is not None and self.entry.state != RUNNING:
            self.lock_table.remove(self.entry.id)
        self.lock_table.close()
        self.lock_table, self.entry, self.held = None, None, []

    # -- for a job ----------------------------------------------------------------------------

    def environment(self, spec: Spec) -> dict[str, str]:
        """Reserve a job's devices if not held yet; return the variables that hide the others."""
        if spec.devices is None:
            return {}
        try:
            claimed = self.take(spec.devices, RIVALS_SECONDS)
        except OSError:
            if spec.devices.needed:
                raise
            return {}
        if spec.devices.needed and (claimed.lacking or claimed.taken):
            raise Refusal(claimed.lacking or holders_in_words(claimed.taken))
        return hiding_others(self.held, self.of)

    def job_started(self, part: PartDir, spec: Spec) -> None:
        """Mark the entry as running; keep the locks here if there may be another attempt."""
        if self.entry is None or not self.held:
            return
        now = time.time()
        # The disk may be full.
        with contextlib.suppress(OSError):
            self.enter(self.entry.replace(state=RUNNING, job=part.job, since=now))
        if not spec.restarts:
            self.drop()

    def beat(self) -> None:
        if self.lock_table is not None:
            self.lock_table.touch()

    def leave(self) -> None:
        self.drop()


# -- what there is --------------------------------------------------------------------------------


def wanted_devices(devices: DeviceRequest) -> tuple[list[Device], int, str]:
    """Return the devices that fit a request, the number wanted, and why that is impossible.

    The devices are the GPUs that the job's ranks may see, or slots of a machine without GPUs.
    """
    everything = gpus_here()
    if not everything:
        lacking = f"has no GPU, and {devices.gpus} are wanted" if devices.gpus else ""
        return slots_of(max(devices.of, devices.slots)), devices.gpus or devices.slots, lacking
    named = asked_for(devices.visible)
    some = visible_gpus(everything, named) if named else everything
    count, there = len(some) if devices.gpus is None else devices.gpus, len(some)
    words = f"has {there} GPUs for this job, and {count} are wanted"
    return some, count, words if count > there else ""


def users_of(some: Sequence[Device]) -> tuple[dict[str, Taken], str]:
    """Return the processes that compute on these GPUs, and the reason if they are unknown."""
    if not any(one.vendor == "nvidia" for one in some):
        return {}, ""
    # Launches on machines without GPUs do not need this import.
    from orchestrator.node.machine.checkup import owner_of_process

    holders, problem = nvidia.computing_processes(TOOL_SECONDS)
    by_uuid = {one.uuid: one for one in some if one.uuid}
    found: dict[str, Taken] = {}
    for holder in holders:
        device = by_uuid.get(holder.gpu)
        program = os.path.basename(holder.name)
        if device is None or program in SHARED_BY_ALL:
            continue
        whose = owner_of_process(holder.pid) or {}
        found[device.key] = Taken(
            names=(device.name,),
            user=str(whose.get("user") or "another user"),
            job=printable_text(str(whose.get("job") or "")),
            program=printable_text(program),
            pid=holder.pid,
        )
    return found, problem


def launches_waiting(entries: Sequence[ClaimEntry], left: int) -> tuple[Taken, ...]:
    """Return the queued launches if a launch that starts now would not leave enough for them."""
    some = [one for one in entries if one.state == WAITING]
    if left < 0 or sum(one.wants for one in some) <= left:
        return ()
    return tuple(Taken(names=(), user=one.user, job=one.job, state=WAITING) for one in some)


def device_holders(
    entries: Sequence[ClaimEntry], some: Sequence[Device], strangers: dict[str, Taken]
) -> tuple[Taken, ...]:
    """Return the holders of these devices, from the lock table and from running programs."""
    names, found, booked = {one.key: one.name for one in some}, list[Taken](), set[str]()
    for entry in entries:
        keys = [key for key in entry.keys if key in names and key not in booked]
        booked.update(keys)
        if keys:
            taken = Taken(
                names=tuple(names[key] for key in keys),
                user=entry.user,
                job=entry.job,
                state=entry.state,
            )
            found.append(taken)
    return (*found, *(taken for key, taken in strangers.items() if key not in booked))


def read_table(session: ServerSession, request: ReadLockTable) -> LockTableState:
    lock_table, (some, count, _) = session.of(Claims).opened(), wanted_devices(request.devices)
    free = sum(not lock_table.locked(one.key) for one in some)
    return LockTableState(
        entries=tuple(lock_table.entries()), free=free, total=len(some), wants=count
    )


# -- which GPUs of this machine: free ones that are near each other --------------------------------


def gpus_here(root: str = "") -> list[Device]:
    """Return the GPUs that a login sees here, in the order of the bus."""
    found: Sequence[Card] = nvidia.read_cards(root, seen=True) or amd.read_cards(root)
    return [
        Device(
            key=f"gpu-{card.pci or index}",
            name=f"GPU {index}",
            value=card.uuid if card.vendor == "nvidia" and card.uuid else str(index),
            vendor=card.vendor,
            uuid=card.uuid,
        )
        for index, card in enumerate(found)
    ]


def slots_of(count: int) -> list[Device]:
    return [Device(key=f"{SLOT}{index}", name=f"slot {index}") for index in range(count)]


def visible_gpus(known: Sequence[Device], named: str) -> list[Device]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names; as in CUDA, up to the first error.

    A part of a GPU (MIG) is reserved by its own name.
    """
    chosen: list[Device] = []
    for word in filter(None, (part.strip() for part in named.split(","))):
        if word.startswith("MIG-"):
            chosen.append(Device(f"mig-{word}", word, word, "nvidia"))
            continue
        if word.isdigit():
            fits = known[int(word) : int(word) + 1]
        else:
            fits = [one for one in known if one.uuid.lower().startswith(word.lower())]
        if len(fits) != 1 or fits[0] in chosen:
            break
        chosen.append(fits[0])
    return chosen


def nearest_devices(free: Sequence[Device], count: int) -> Sequence[Device]:
    """Return `count` devices that are closest on the bus; of equal choices the first."""
    rows = [free[start : start + count] for start in range(len(free) - count + 1)]
    return min(rows, key=lambda row: number_of(row[-1]) - number_of(row[0])) if count else []


def number_of(device: Device) -> int:
    word = device.name.rpartition(" ")[2]
    return int(word) if word.isdigit() else 0


def hiding_others(chosen: Sequence[Device], of: Sequence[Device]) -> dict[str, str]:
    """Return the variables that hide the other GPUs from a process; empty if it has all."""
    vendors = {device.vendor for device in chosen} - {""}
    if not vendors or {device.key for device in chosen} == {device.key for device in of}:
        return {}
    values = ",".join(device.value for device in chosen)
    names = {OF_VENDOR[vendor]: values for vendor in vendors}
    by_number = "nvidia" in vendors and all(device.value.isdigit() for device in chosen)
    return {**names, **({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if by_number else {})}


def asked_for(named: str) -> str:
    """Return the GPUs named by the launch's settings, or else by the login's."""
    return named or next(filter(None, (os.environ.get(name) for name in VISIBLE)), "")
