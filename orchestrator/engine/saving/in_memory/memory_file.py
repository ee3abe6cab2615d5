"""One shard of a training's state in memory: a file that outlives the process that wrote it.

A file is whole, or it is nothing: its first block, which says what is in it, is cleared before
anything else changes and is written last. So a shard has two of them, filled in turn. What stays
the same from state to state comes first in both, and is written into each of them once.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.ranks.agreement import Copies, hash_of
from orchestrator.engine.saving.pieces import DTYPES, Place, places_of
from orchestrator.engine.sharding.mesh import local_tensor

BLOCK_BYTES = 4096  # what stands before the tensors; they begin on a page
ALIGNMENT_BYTES = 64  # each tensor begins at a multiple, whatever its dtype
HEAD = struct.Struct("<8sQQQQqqI")
MAGIC = b"orchmem2"
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
LARGEST_BYTES = 1 << 50
LARGEST_NOTES_BYTES = 1 << 28
MOST_SHARDS = 1_000_000


class Damaged(Exception):
    """A file that is not whole, in words."""


@dataclass(frozen=True)
class Head:
    """Hold the first block: how much follows it, and the digests of both parts."""

    turn: int = 0
    size: int = 0  # of the tensors; 0: nothing follows
    fixed: int = 0  # how much of it stays the same from state to state, at its beginning
    notes: int = 0
    fixed_digest: int = 0
    digest: int = 0  # of the other tensors
    crc: int = 0  # of the notes

    def packed(self) -> bytes:
        head = HEAD.pack(MAGIC, *astuple(self))
        return head + zlib.crc32(head).to_bytes(4, "little")

    @classmethod
    def unpacked(cls, data: bytes) -> Head:
        """Read it; one that was cleared, or is not whole, raises Damaged."""
        packed, crc = data[: HEAD.size], data[HEAD.size : HEAD.size + 4]
        if len(crc) < 4 or zlib.crc32(packed) != int.from_bytes(crc, "little"):
            raise Damaged("it was not written to its end")
        magic, *values = HEAD.unpack(packed)
        head = cls(*values)
        if (
            magic != MAGIC
            or head.notes > LARGEST_NOTES_BYTES
            or not head.fixed <= head.size <= 1 << 50
        ):
            raise Damaged("it is none of ours")
        return head


HEAD_SIZE = HEAD.size + 4


@dataclass(frozen=True)
class Notes:
    """Say whose the tensors are, and hold all of the state that is no tensor."""

    step: int
    attempt: str  # of the job; later ones sort behind
    turn: int  # counts the states of an attempt
    fingerprint: Mapping[str, str]  # of the program and its model
    layout: str  # how the tensors are spread, in words,
    shards: int  # and over how many files
    tensors: tuple[Place, ...]
    rest: str

    def packed(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Notes:
        try:
            values = json.loads(data)
            known = {str(key): str(value) for key, value in values["fingerprint"].items()}
            shards = int(values["shards"])
            if not 0 < shards < MOST_SHARDS:
                raise ValueError(f"{shards} shards")
            return cls(int(values["step"]), str(values["attempt"]), int(values["turn"]), known,
                       str(values["layout"]), shards, tuple(map(place_in, values["tensors"])),
                       str(values["rest"]))  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Damaged(f"its notes make no sense ({error})") from None


def place_in(value: Any) -> Place:
    return Place(lengths(value["start"]), lengths(value["shape"]), str(value["name"]),
                 str(value["dtype"]), lengths(value["whole"]), int(value["offset"]))  # fmt: skip


def lengths(value: Any) -> tuple[int, ...]:
    found = tuple(map(int, value))
    if any(length < 0 for length in found):
        raise ValueError(f"no shape: {found}")
    return found


def laid_out(tensors: Mapping[str, Tensor], offset: int = 0) -> tuple[tuple[Place, ...], int]:
    """Give this rank's part of each tensor its place, from a byte on; and the end of all."""
    places = []
    for place in places_of(tensors):
        places.append(replace(place, offset=offset))
        offset += -(-place.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return tuple(places), offset


def tensor_at(place: Place, payload: Tensor) -> Tensor:
    """Return the part of the bytes that a tensor lies in, as that tensor."""
    if place.dtype not in DTYPES or min(place.shape, default=0) < 0:
        raise Damaged(f"{place.name!r} is not a tensor")
    end = place.offset + place.bytes
    if not 0 <= place.offset <= end <= payload.numel() or place.offset % ALIGNMENT_BYTES:
        raise Damaged(f"{place.name!r} lies outside of it")
    return payload[place.offset : end].view(DTYPES[place.dtype]).view(place.shape)


@dataclass(frozen=True)
class State:
    """A shard as it was kept."""

    head: Head
    notes: Notes
    payload: Tensor  # all bytes


class Slot:
    """A file to be written, mapped into this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settled = 0  # how much of its beginning is to stay as it is
        self.head = Head()  # of the state that was made whole last
        self.descriptor = -1
        self.room = 0
        self.mapped: Tensor | None = None

    def reserve(self, size: int) -> None:
        """Have the memory for so many bytes of tensors; OSError says that there is none.

        The pages are taken here: a write into a mapping that memory is missing for ends in SIGBUS.
        """
        if self.mapped is not None and self.room >= size:
            return
        self.close()
        self.descriptor = os.open(self.path, FLAGS | os.O_RDWR | os.O_CREAT, 0o600)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise OSError(f"{self.path} is not a plain file of its own")
        os.posix_fallocate(self.descriptor, 0, BLOCK_BYTES + size)
        view = mmap.mmap(
            self.descriptor, BLOCK_BYTES + size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE
        )
        self.mapped, self.room = torch.frombuffer(view, dtype=torch.uint8), size
        pin(self.mapped)

    def begin(self, size: int) -> Tensor:
        """Let the old state go, and return the memory for the tensors of the new one."""
        self.reserve(size)
        os.pwrite(self.descriptor, bytes(HEAD_SIZE), 0)
        assert self.mapped is not None
        return self.mapped[BLOCK_BYTES : BLOCK_BYTES + size]

    def finish(self, payload: Tensor, turn: int, notes: bytes, fixed: int = 0) -> Head:
        """Make whole what the tensors were copied into."""
        before = self.head.fixed_digest if self.settled else hash_of(payload[:fixed])
        digest, crc = hash_of(payload[fixed:]), zlib.crc32(notes)
        head = Head(turn, payload.numel(), fixed, len(notes), before, digest, crc)
        self.publish(head, notes)
        return head

    def publish(self, head: Head, notes: bytes) -> None:
        written = os.pwrite(self.descriptor, notes, BLOCK_BYTES + head.size)
        if written != len(notes):
            raise OSError(f"{self.path}: no memory is left")
        os.pwrite(self.descriptor, head.packed(), 0)
        self.head = head

    def close(self) -> None:
        if self.mapped is not None:
            unpin(self.mapped)
            self.mapped = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Fixed:
    """The tensors that are in both files of a shard once, as long as nothing changes them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.places, self.size = laid_out(tensors)
        self.copies = Copies()

    def note(self, tensors: Mapping[str, Tensor], payload: Tensor) -> None:
        """Remember where they are copied to: later states are compared with that."""
        values = {place.name: local_tensor(tensors[place.name]) for place in self.places}
        copies = {place.name: tensor_at(place, payload) for place in self.places}
        self.copies.note(values, copies)

    def leave_changed(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep only what is as it was; what has changed once is in every state from then on."""
        there = {place.name: tensors[place.name] for place in self.places if place.name in tensors}
        equal = self.copies.equal({name: local_tensor(value) for name, value in there.items()})
        now = {(place.name, place.start, place.whole) for place in places_of(there)}
        self.places = tuple(
            place
            for place in self.places
            if place.name in equal and (place.name, place.start, place.whole) in now
        )

    def laid_out(self, tensors: Mapping[str, Tensor]) -> tuple[tuple[Place, ...], int]:
        """Give all tensors their places: these come first."""
        own = {place.name for place in self.places}
        changing = {name: value for name, value in tensors.items() if name not in own}
        places, size = laid_out(changing, self.size)
        return self.places + places, max(size, ALIGNMENT_BYTES)


def pin(memory: Tensor) -> None:
    """Let a GPU copy into it by itself. Where it may not, copies are slower and no less right."""
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)


def unpin(memory: Tensor) -> None:
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(memory.data_ptr())


# -- reading --------------------------------------------------------------------------------------


def describe(path: Path) -> tuple[Head, Notes]:
    """Read what a file says of itself; Damaged says why it is not whole."""
    with opened(path) as descriptor:
        head = Head.unpacked(os.pread(descriptor, HEAD_SIZE, 0))
        data = os.pread(descriptor, head.notes, BLOCK_BYTES + head.size)
    return head, checked_notes(head, data)


def checked_notes(head: Head, data: bytes) -> Notes:
    if len(data) != head.notes or zlib.crc32(data) != head.crc:
        raise Damaged("its notes are damaged")
    return Notes.unpacked(data)


def read(path: Path) -> State:
    """Map a file's tensors, and read its notes; nothing is compared with its digests yet."""
    with opened(path) as descriptor:
        head = Head.unpacked(os.pread(descriptor, HEAD_SIZE, 0))
        notes = os.pread(descriptor, head.notes, BLOCK_BYTES + head.size)
        if os.fstat(descriptor).st_size < BLOCK_BYTES + head.size:
            raise Damaged("a part of it is missing")
        # A copy on write: torch wants memory that may be written.
        view = mmap.mmap(descriptor, BLOCK_BYTES + head.size, access=mmap.ACCESS_COPY)
    payload = torch.frombuffer(view, dtype=torch.uint8)[BLOCK_BYTES:]
    return State(head, checked_notes(head, notes), payload)


def verified(path: Path) -> State:
    """Read a file, and compare it with its digests; Damaged says what is wrong."""
    state = read(path)
    fixed = state.head.fixed
    digests = hash_of(state.payload[:fixed]), hash_of(state.payload[fixed:])
    if digests != (state.head.fixed_digest, state.head.digest):
        raise Damaged("it is damaged: its digest is another")
    return state


@contextlib.contextmanager
def opened(path: Path) -> Any:
    """Open a file that nobody else could have written."""
    try:
        descriptor = os.open(path, FLAGS | os.O_RDONLY)
    except OSError as error:
        raise Damaged(error.strerror or str(error)) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise Damaged("it is not a plain file of ours")
        yield descriptor
    finally:
        os.close(descriptor)
