"""The safetensors format, written without the package of that name.

8 bytes with the length of the header, the header (JSON: dtype, shape and place of each tensor),
then the bytes of the tensors without a gap.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from orchestrator.common import files

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNED = 8  # bytes: the largest element; the data begins there


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """Put the widest elements first, so that every tensor is aligned."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Write everything before the data."""
    described: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    begin = 0
    for entry in entries:
        end = begin + entry.size
        described[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": [*entry.shape],
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def write(out: Path, head: bytes, tensors: Iterable[Tensor]) -> None:
    """Write the file whole or not at all, of contiguous tensors in the order of the header."""
    with files.replacing(out, files.AS_USUAL) as file:
        file.write(head)
        for value in tensors:
            file.write(memory(value))
            del value  # before the next one needs the place


def memory(value: Tensor) -> ctypes.Array[ctypes.c_char]:
    """Give the bytes of a tensor where they lie; without numpy, since torch does without, too."""
    return (ctypes.c_char * value.nbytes).from_address(value.data_ptr())
