"""One shard of a training's state in memory: a file that outlives the process that wrote it.

A file is whole, or it is nothing: its first block, which says what is in it, is cleared before
anything else changes and is written last. So a shard has two of them, filled in turn. What stays
the same from state to state is in a third, the constant part, which both name: it is written once.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from orchestrator.engine.ranks.agreement import Copies, hash_of, same_bits
from orchestrator.engine.sharding.mesh import local_tensor

BLOCK = 4096  # what stands before the tensors; they begin on a page
ALIGNMENT = 64  # bytes; each tensor begins at a multiple, whatever its dtype
HEAD = struct.Struct("<8sQQQqI")
MAGIC = b"orchmem1"
FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
LARGEST_NOTES_BYTES = 1 << 28
MOST_SHARDS = 1_000_000
ATTEMPT = re.compile(r"[0-9]{6,12}-[0-9a-f]{8}")
DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


class Damaged(Exception):
    """A file that is not whole, in words."""


@dataclass(frozen=True)
class Head:
    """Hold the first block: how much follows it, and the digests of both parts."""

    turn: int = 0
    size: int = 0  # of the tensors; 0: nothing follows
    notes: int = 0
    digest: int = 0  # of the tensors
    crc: int = 0  # of the notes

    def packed(self) -> bytes:
        head = HEAD.pack(MAGIC, self.turn, self.size, self.notes, self.digest, self.crc)
        return head + zlib.crc32(head).to_bytes(4, "little")

    @classmethod
    def unpacked(cls, data: bytes) -> Head:
        """Read it; one that was cleared, or is not whole, raises Damaged."""
        packed, crc = data[: HEAD.size], data[HEAD.size : HEAD.size + 4]
        if len(crc) < 4 or zlib.crc32(packed) != int.from_bytes(crc, "little"):
            raise Damaged("it was not written to its end")
        magic, *values = HEAD.unpack(packed)
        head = cls(*values)
        if magic != MAGIC or head.notes > LARGEST_NOTES_BYTES or head.size > 1 << 50:
            raise Damaged("it is none of ours")
        return head


HEAD_SIZE = HEAD.size + 4
Content = tuple[Head, bytes, Tensor]  # of a file: its notes, and all bytes of its tensors


@dataclass(frozen=True)
class Place:
    """The place of a tensor in the file, and its part of a tensor that is spread over ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    whole: tuple[int, ...]  # the shape of all of it
    start: tuple[int, ...]  # in each dimension, where this part begins


@dataclass(frozen=True)
class Constant:
    """The tensors of a state that are in its constant part."""

    attempt: str  # that wrote it: the end of the file's name
    tensors: tuple[Place, ...]


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
    constant: Constant | None = None

    @property
    def all_tensors(self) -> tuple[Place, ...]:
        return self.tensors + (self.constant.tensors if self.constant is not None else ())

    def packed(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Notes:
        try:
            values = json.loads(data)
            constant = values.get("constant")
            if constant is not None:
                if not ATTEMPT.fullmatch(constant["attempt"]):
                    raise ValueError("its constant part has no name")
                constant = Constant(constant["attempt"], places_of(constant["tensors"]))
            known = {str(key): str(value) for key, value in values["fingerprint"].items()}
            shards = int(values["shards"])
            if not 0 < shards < MOST_SHARDS:
                raise ValueError(f"{shards} shards")
            return cls(int(values["step"]), str(values["attempt"]), int(values["turn"]), known,
                       str(values["layout"]), shards, places_of(values["tensors"]),
                       str(values["rest"]), constant)  # fmt: skip
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Damaged(f"its notes make no sense ({error})") from None


def places_of(values: Any) -> tuple[Place, ...]:
    return tuple(
        Place(str(value["name"]), str(value["dtype"]), lengths(value["shape"]),
              int(value["offset"]), lengths(value["whole"]), lengths(value["start"]))
        for value in values
    )  # fmt: skip


def lengths(value: Any) -> tuple[int, ...]:
    found = tuple(map(int, value))
    if any(length < 0 for length in found):
        raise ValueError(f"no shape: {found}")
    return found


def laid_out(tensors: Mapping[str, Tensor]) -> tuple[tuple[Place, ...], int]:
    """Give this rank's part of each tensor its place; and the size of all."""
    places, offset = [], 0
    for name, tensor in tensors.items():
        whole = tuple(tensor.shape)
        shape, start = whole, (0,) * len(whole)
        if isinstance(tensor, DTensor):
            mesh, placements = tensor.device_mesh, tensor.placements
            shape, start = compute_local_shape_and_global_offset(whole, mesh, placements)
        places.append(Place(name, str(tensor.dtype), tuple(shape), offset, whole, tuple(start)))
        size = math.prod(shape) * tensor.element_size()
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(places), max(offset, ALIGNMENT)


def size_of(place: Place) -> int:
    return math.prod(place.shape) * DTYPES[place.dtype].itemsize


def end_of(place: Place) -> int:
    """Return where the next tensor may begin."""
    return max(ALIGNMENT, place.offset + -(-size_of(place) // ALIGNMENT) * ALIGNMENT)


def tensor_at(place: Place, payload: Tensor) -> Tensor:
    """Return the part of the bytes that a tensor lies in, as that tensor."""
    dtype = DTYPES.get(place.dtype)
    if dtype is None or any(length < 0 for length in place.shape):
        raise Damaged(f"{place.name!r} is no tensor")
    size = math.prod(place.shape) * dtype.itemsize
    if not 0 <= place.offset <= place.offset + size <= payload.numel() or place.offset % ALIGNMENT:
        raise Damaged(f"{place.name!r} lies outside of it")
    return payload[place.offset : place.offset + size].view(dtype).view(place.shape)


@dataclass(frozen=True)
class State:
    """A shard as it was kept."""

    notes: Notes
    payload: Tensor  # all bytes
    constant: State | None = None  # its constant part

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name, (_, tensor) in self.placed().items()}

    def parts(self) -> list[State]:
        return [self] if self.constant is None else [self, self.constant]

    def placed(self) -> dict[str, tuple[Place, Tensor]]:
        """Return all tensors, and the place of each."""
        tensors = self.notes.tensors
        found = {place.name: (place, tensor_at(place, self.payload)) for place in tensors}
        if self.notes.constant is not None and self.constant is not None:
            payload = self.constant.payload
            for place in self.notes.constant.tensors:
                found[place.name] = place, tensor_at(place, payload)
        return found


class Slot:
    """A file to be written, mapped into this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
            raise OSError(f"{self.path} is no plain file of its own")
        os.posix_fallocate(self.descriptor, 0, BLOCK + size)
        view = mmap.mmap(self.descriptor, BLOCK + size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.mapped, self.room = torch.frombuffer(view, dtype=torch.uint8), size
        pin(self.mapped)

    def begin(self, size: int) -> Tensor:
        """Let the old state go, and return the memory for the tensors of the new one."""
        self.reserve(size)
        os.pwrite(self.descriptor, bytes(HEAD_SIZE), 0)
        assert self.mapped is not None
        return self.mapped[BLOCK : BLOCK + size]

    def finish(self, payload: Tensor, turn: int, notes: bytes) -> Head:
        """Make whole what the tensors were copied into."""
        head = Head(turn, payload.numel(), len(notes), hash_of(payload), zlib.crc32(notes))
        self.publish(head, notes)
        return head

    def publish(self, head: Head, notes: bytes) -> None:
        written = os.pwrite(self.descriptor, notes, BLOCK + head.size)
        if written != len(notes):
            raise OSError(f"{self.path}: no memory is left")
        os.pwrite(self.descriptor, head.packed(), 0)

    def close(self) -> None:
        if self.mapped is not None:
            unpin(self.mapped)
            self.mapped = None
        self.close_file()

    def close_file(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class ConstantPart:
    """Keep those tensors of a shard once that are still as they were."""

    def __init__(self, path: Path, attempt: str, places: Iterable[Place]) -> None:
        self.path, self.attempt = path, attempt
        self.places = {place.name: place for place in places}
        self.size = max((end_of(place) for place in self.places.values()), default=ALIGNMENT)
        self.content: Content | None = None  # once it is whole
        self.slot: Slot | None = None  # while it is not
        self.copies = Copies()

    def begin(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the memory that they are to be copied into."""
        self.slot = Slot(self.path)
        payload = self.slot.begin(self.size)
        self.note(tensors, payload)
        return payload

    def note(self, tensors: Mapping[str, Tensor], payload: Tensor) -> None:
        values = {name: local_tensor(tensors[name]) for name in self.places}
        copies = {name: tensor_at(place, payload) for name, place in self.places.items()}
        self.copies.note(values, copies)

    def finish(self, notes: Notes) -> None:
        """Make it whole, with the notes of the first state: from now on it stays as it is."""
        if self.slot is None or self.slot.mapped is None:
            return
        payload, places = (
            self.slot.mapped[BLOCK : BLOCK + self.size],
            tuple(self.places.values()),
        )
        packed = replace(
            notes, attempt=self.attempt, tensors=places, rest="", constant=None
        ).packed()
        self.content = self.slot.finish(payload, notes.turn, packed), packed, payload
        self.slot.close_file()
        self.slot = None  # its memory stays mapped: later states are compared with it

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with the file that an earlier attempt has written."""
        self.content = read(self.path)
        self.note(tensors, self.content[2])

    def leave_changed(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep only what is as it was; what has changed once is in every state from then on."""
        there = {name: tensors[name] for name in self.places if name in tensors}
        now = {place.name: place for place in laid_out(there)[0]}
        equal = self.copies.equal({name: local_tensor(value) for name, value in there.items()})
        self.places = {
            name: place
            for name, place in self.places.items()
            if name in equal and lies_alike(place, now[name])
        }

    def described(self) -> Constant | None:
        return Constant(self.attempt, tuple(self.places.values())) if self.places else None


def lies_alike(one: Place, other: Place) -> bool:
    return replace(one, offset=0) == replace(other, offset=0)


def unchanged(
    kept: Iterable[Place], copies: Mapping[str, Tensor], now: Mapping[str, Tensor]
) -> list[Place]:
    """Name the tensors that a constant part holds as they are now."""
    places = {place.name: place for place in laid_out(now)[0]}
    return [
        place
        for place in kept
        if place.name in places
        and lies_alike(place, places[place.name])
        and same_bits(local_tensor(now[place.name]), copies[place.name])
    ]


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
        data = os.pread(descriptor, head.notes, BLOCK + head.size)
    return head, checked_notes(head, data)


def checked_notes(head: Head, data: bytes) -> Notes:
    if len(data) != head.notes or zlib.crc32(data) != head.crc:
        raise Damaged("its notes are damaged")
    return Notes.unpacked(data)


def read(path: Path) -> Content:
    """Map a file's tensors, and read its notes; nothing is compared with its digest yet."""
    with opened(path) as descriptor:
        head = Head.unpacked(os.pread(descriptor, HEAD_SIZE, 0))
        notes = os.pread(descriptor, head.notes, BLOCK + head.size)
        if os.fstat(descriptor).st_size < BLOCK + head.size:
            raise Damaged("a part of it is missing")
        # A copy on write: torch wants memory that may be written.
        view = mmap.mmap(descriptor, BLOCK + head.size, access=mmap.ACCESS_COPY)
    return head, notes, torch.frombuffer(view, dtype=torch.uint8)[BLOCK:]


def verified(content: Content, constant: Content | None = None) -> State:
    """Compare a state with its digests; Damaged says what does not fit."""
    for head, _, payload in (content, *([constant] if constant is not None else [])):
        if payload.numel() != head.size or hash_of(payload) != head.digest:
            raise Damaged("it is damaged: its digest is another")
    return assembled(content, constant)


def assembled(content: Content, constant: Content | None = None) -> State:
    """Put a state together from its file, and that of its constant part."""
    head, notes, payload = content
    described = checked_notes(head, notes)
    if described.constant is None:
        return State(described, payload)
    if constant is None:
        raise Damaged("its constant part is missing")
    part = assembled(constant)
    if part.notes.attempt != described.constant.attempt:
        raise Damaged("its constant part is another's")
    return State(described, payload, part)


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
            raise Damaged("it is no plain file of ours")
        yield descriptor
    finally:
        os.close(descriptor)
