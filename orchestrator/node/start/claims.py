"""Holds GPUs and slots for a job that is about to start, and hands them over to its supervisor."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.machine import amd, nvidia
from orchestrator.node.server.visit import Refusal, RoomState, ServerSession
from orchestrator.node.start.book import Book, printable
from orchestrator.protocol.facts import Card
from orchestrator.protocol.requests.claims import (
    RUNNING,
    SLOT,
    STARTING,
    VISIBLE,
    WAITING,
    ClaimEntry,
    Taken,
    Wish,
    in_words,
    who_has,
)
from orchestrator.protocol.requests.start import Claimed, Page, ReadBook
from orchestrator.protocol.spec import Spec

LOOK_SECONDS = 0.05  # between two looks at what others hold
START_PATIENCE_SECONDS = 2.0  # for others who try at the same moment, and give up or start
TOOL_SECONDS = 5.0  # a driver that is loaded for each query takes some
SHARED_BY_ALL = ("nvidia-cuda-mps-server",)  # computes for others
OF_VENDOR = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


class Device(NamedTuple):
    """One GPU, or one slot of a machine without: it can be claimed."""

    key: str  # its name in the machine's book
    name: str  # for people: GPU 3
    value: str = ""  # its name in the variable that hides the others from a process
    vendor: str = ""
    uuid: str = ""


class Claims(RoomState):
    """Holds what this visit has of the machine, with at most one entry in its book."""

    def __init__(self, visit: ServerSession) -> None:
        super().__init__(visit)
        self.book: Book | None = None
        self.entry: ClaimEntry | None = None
        self.held: list[Device] = []
        self.of: list[Device] = []  # that it could have

    @property
    def files(self) -> list[int]:
        """Return the open file that holds all: a supervisor inherits it."""
        return [self.book.fd] if self.book and self.held else []

    @property
    def place(self) -> str:
        """Return the path of the entry that says what is held; nothing where nothing is."""
        if self.book is None or self.entry is None or not self.held:
            return ""
        return self.book.file(self.entry.id)

    def opened(self) -> Book:
        if self.book is None:
            self.book = Book()
            self.book.entries()  # which removes those of ours that have ended
        return self.book

    # -- to wait ------------------------------------------------------------------------------

    def wait(self, entry: ClaimEntry) -> None:
        """Stand in the queue, seen by all who read the book, and hold nothing."""
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
        book = self.opened()
        if self.entry is None and not book.lock(entry.id):
            raise Refusal(f"another process has the entry {entry.id}")
        if self.entry is not None:
            entry = entry.replace(id=self.entry.id)
        self.entry = entry
        book.write(entry)

    # -- to take ------------------------------------------------------------------------------

    def take(self, wish: Wish, patience: float, *, new: bool = False) -> Claimed:
        """Hold what is wished, or nothing; wait so long for those who are about to start.

        A new launch that has not waited leaves enough to those who do.
        """
        if self.held:  # for the attempt before
            return self.claimed()
        book, deadline = self.opened(), time.monotonic() + patience
        self.of, count, lacking = wanted(wish)
        if lacking:
            return Claimed(lacking=lacking)
        strangers, unsure = users_of(self.of) if count else ({}, "")
        while True:
            free = [one for one in self.of if not book.locked(one.key)]
            unused = [one for one in free if one.key not in strangers]
            if new and self.entry is None:
                before = waiting(book.entries(), len(unused) - count)
                if before:
                    return Claimed(taken=before, unsure=unsure)
            most = count if wish.needed else min(count, len(unused))
            if len(unused) >= most and self.lock(nearest(unused, most), wish):
                return self.claimed().replace(unsure=unsure)
            if len(unused) >= most:
                continue  # one of them has just been taken: there may be others
            taken = takers(book.entries(), self.of, strangers)
            if not any(each.state == STARTING for each in taken) or time.monotonic() > deadline:
                return Claimed(taken=taken, unsure=unsure)
            time.sleep(LOOK_SECONDS)

    def lock(self, chosen: Sequence[Device], wish: Wish) -> bool:
        """Take all of these, and say so in the book; or none."""
        book, got = self.opened(), list[Device]()
        try:
            for one in chosen:
                if not book.lock(one.key):
                    return False
                got.append(one)
            self.note(got, wish)
            self.held = got
        finally:
            if not self.held:  # others were quicker, or the disk is full
                for one in got:
                    book.unlock(one.key)
        return True

    def note(self, got: Sequence[Device], wish: Wish) -> None:
        now = time.time()
        before = self.entry or ClaimEntry(id=os.urandom(8).hex(), state=STARTING, job="", since=now)
        self.enter(
            before.replace(
                state=STARTING,
                job=wish.job,
                since=now,
                keys=tuple(one.key for one in got),
                names=tuple(one.name for one in got),
            )
        )

    def claimed(self) -> Claimed:
        names = in_words([one.name for one in self.held])
        part = len(self.held) < len(self.of)
        words = f"{names} of {len(self.of)}" if part else names
        return Claimed(held=True, words=words)

    def let_go(self) -> None:
        """Let go of what no job has; who came from the queue stands there again."""
        if self.book is None or self.entry is None or self.entry.state == RUNNING:
            return
        if self.entry.order:
            self.wait(self.entry.replace(keys=(), names=()))
        else:
            self.unlock()
            self.forget(self.entry)

    def drop(self) -> None:
        """Let go of everything; what a supervisor has inherited stays held by that."""
        if self.book is None:
            return
        if self.entry is not None and self.entry.state != RUNNING:
            self.book.remove(self.entry.id)
        self.book.close()
        self.book, self.entry, self.held = None, None, []

    # -- for a job ----------------------------------------------------------------------------

    def environment(self, spec: Spec) -> dict[str, str]:
        """Hold what a job needs, if it is not held yet; return what shows its ranks those alone."""
        if spec.wish is None:
            return {}
        try:
            claimed = self.take(spec.wish, START_PATIENCE_SECONDS)
        except OSError:
            if spec.wish.needed:
                raise
            return {}
        if spec.wish.needed and (claimed.lacking or claimed.taken):
            raise Refusal(claimed.lacking or who_has(claimed.taken))
        return hiding_others(self.held, self.of)

    def job_started(self, run: RunDir, spec: Spec) -> None:
        """Leave to the supervisor what it has inherited; keep it as well for a further attempt."""
        if self.entry is None or not self.held:
            return
        now = time.time()
        with contextlib.suppress(OSError):  # a disk that is full
            self.enter(self.entry.replace(state=RUNNING, job=run.job, since=now))
        if spec.attempt is None:
            self.drop()

    def beat(self) -> None:
        if self.book is not None:
            self.book.touch()

    def leave(self) -> None:
        self.drop()


# -- what there is --------------------------------------------------------------------------------


def wanted(wish: Wish) -> tuple[list[Device], int, str]:
    """Return what a wish may be met with, how many of these, and why that can never be.

    That is GPUs which the job's ranks may see, or slots of a machine that has none.
    """
    everything = gpus_here()
    if not everything:
        lacking = f"has no GPU, and {wish.gpus} are wanted" if wish.gpus else ""
        return slots_of(max(wish.of, wish.slots)), wish.gpus or wish.slots, lacking
    named = asked_for(wish.visible)
    some = visible(everything, named) if named else everything
    count, there = len(some) if wish.gpus is None else wish.gpus, len(some)
    words = f"has {there} GPUs for this job, and {count} are wanted"
    return some, count, words if count > there else ""


def users_of(some: Sequence[Device]) -> tuple[dict[str, Taken], str]:
    """Return who computes on which of these GPUs, and why that is not known."""
    if not any(one.vendor == "nvidia" for one in some):
        return {}, ""
    # A launch on machines without GPUs does without.
    from orchestrator.node.machine.checkup import owner

    holders, problem = nvidia.computing(TOOL_SECONDS)
    by_uuid = {one.uuid: one for one in some if one.uuid}
    found: dict[str, Taken] = {}
    for holder in holders:
        device = by_uuid.get(holder.gpu)
        program = os.path.basename(holder.name)
        if device is None or program in SHARED_BY_ALL:
            continue
        whose = owner(holder.pid) or {}
        found[device.key] = Taken(
            names=(device.name,),
            user=str(whose.get("user") or "somebody"),
            job=printable(str(whose.get("job") or "")),
            program=printable(program),
            pid=holder.pid,
        )
    return found, problem


def waiting(entries: Sequence[ClaimEntry], left: int) -> tuple[Taken, ...]:
    """Return the launches that wait, if one that starts now would not leave enough for them."""
    some = [one for one in entries if one.state == WAITING]
    if left < 0 or sum(one.wants for one in some) <= left:
        return ()
    return tuple(Taken(names=(), user=one.user, job=one.job, state=WAITING) for one in some)


def takers(
    entries: Sequence[ClaimEntry], some: Sequence[Device], strangers: dict[str, Taken]
) -> tuple[Taken, ...]:
    """Say who has which of these, by the book, and then by who computes there."""
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


def read(visit: ServerSession, request: ReadBook) -> Page:
    """Read the book, once it is another than before, the head says more, or the time is over."""
    claims, deadline, called = visit.of(Claims), time.monotonic() + request.seconds, False
    book, (some, count, _) = claims.opened(), wanted(request.wish)
    used = users_of(some)[0] if request.programs else {}
    while True:
        entries = tuple(book.entries())
        if set(entries) != set(request.before) or called or time.monotonic() > deadline:
            free = sum(not book.locked(one.key) and one.key not in used for one in some)
            return Page(entries=entries, free=free, total=len(some), wants=count)
        called = visit.is_called(LOOK_SECONDS)


# -- which GPUs of this machine: free ones that are near each other --------------------------------


def gpus_here(root: str = "") -> list[Device]:
    """Return the GPUs that a login sees here, in the order of the bus."""
    found: Sequence[Card] = nvidia.cards(root, seen=True) or amd.cards(root)
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


def visible(known: Sequence[Device], named: str) -> list[Device]:
    """Return those that a value of CUDA_VISIBLE_DEVICES names; as in CUDA, up to the first error.

    What names a part of a GPU (MIG) is claimed by that name.
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


def nearest(free: Sequence[Device], count: int) -> Sequence[Device]:
    """Choose so many that are near each other on the bus; of equal choices the first."""
    rows = [free[start : start + count] for start in range(len(free) - count + 1)]
    return min(rows, key=lambda row: number_of(row[-1]) - number_of(row[0])) if count else []


def number_of(device: Device) -> int:
    word = device.name.rpartition(" ")[2]
    return int(word) if word.isdigit() else 0


def hiding_others(chosen: Sequence[Device], of: Sequence[Device]) -> dict[str, str]:
    """Return what hides the other GPUs from a process; nothing where it has all."""
    vendors = {device.vendor for device in chosen} - {""}
    if not vendors or {device.key for device in chosen} == {device.key for device in of}:
        return {}
    values = ",".join(device.value for device in chosen)
    names = {OF_VENDOR[vendor]: values for vendor in vendors}
    by_number = "nvidia" in vendors and all(device.value.isdigit() for device in chosen)
    return {**names, **({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if by_number else {})}


def asked_for(named: str) -> str:
    """Return the GPUs that the user's own settings name: those of the launch, else the login's."""
    return named or next(filter(None, (os.environ.get(name) for name in VISIBLE)), "")
