"""The file of tokens that scripts/make_tokens.py writes and sources.py maps into memory.

It begins with a line of JSON, padded to 512 bytes, that describes the rest: little-endian numbers
without gaps.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from orchestrator.common.errors import CheckFailed

HEADER = 512
FORMAT = "orchestrator tokens 1"
WIDTHS = {"uint16": 2, "uint32": 4}
FIX = "make such a file: python scripts/make_tokens.py OUT.bin FILES"


@dataclass(frozen=True)
class Header:
    # One of uint16 and uint32.
    dtype: str
    # All tokens are less than this.
    vocab_size: int
    # The number of tokens in the file.
    count: int


def dtype_for(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_header(file: BinaryIO, header: Header) -> None:
    """Write the header at the start of the file. Call it again once the count is known."""
    text = json.dumps({"format": FORMAT, **asdict(header)}).encode("ascii")
    file.seek(0)
    file.write(text.ljust(HEADER - 1) + b"\n")


def read_header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            text = file.read(HEADER)
        size = path.stat().st_size
    except OSError as error:
        raise CheckFailed(f"{path} cannot be read: {error.strerror}", FIX) from None
    try:
        described = json.loads(text)
        header = Header(described["dtype"], int(described["vocab_size"]), int(described["count"]))
        known = described["format"] == FORMAT and header.dtype in WIDTHS and len(text) == HEADER
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise CheckFailed(f"{path} is not a file of tokens: it does not begin with a header", FIX)
    expected = HEADER + header.count * WIDTHS[header.dtype]
    if size != expected:
        raise CheckFailed(
            f"{path} has {size:,} bytes, but its header promises {expected:,}: it was truncated, or"
            " something was appended",
            "copy it again, or " + FIX,
        )
    return header
