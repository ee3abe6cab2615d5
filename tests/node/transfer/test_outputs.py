"""Files of a node are read once, for their contents and their checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from orchestrator.node.transfer import outputs
from orchestrator.protocol.requests.transfer import ReadFile


def test_a_file_that_was_sent_is_not_read_again_for_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it has changed meanwhile; one that is continued is read from where it was compared."""
    monkeypatch.setattr(outputs, "PIECE_BYTES", 4)
    file, read = tmp_path / "file", list[int]()
    file.write_bytes(b"0123456789")
    pread = os.pread

    def counted(descriptor: int, size: int, at: int) -> bytes:
        read.extend([at] * bool(size))
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", counted)
    reader, where = outputs.Reader(), {"place": str(tmp_path), "path": "file"}

    def sum_of(size: int) -> str:
        request = ReadFile(**where, offset=size, size=0, with_sum=True)
        return reader.read(request).sum

    for first in (0, 4):
        if first:
            assert sum_of(first) == hashlib.sha256(b"0123").hexdigest()
        for offset in range(first, 10, 4):
            reader.read(ReadFile(**where, offset=offset))
        assert sum_of(10) == hashlib.sha256(b"0123456789").hexdigest()
        assert read == [0, 4, 8]
        read.clear()
    for offset in (0, 4, 8):
        reader.read(ReadFile(**where, offset=offset))
    file.write_bytes(b"another")
    assert sum_of(10) == hashlib.sha256(b"another").hexdigest()
    file.write_bytes(b"0123456789")
    last = reader.read(ReadFile(**where, offset=8, size=2, with_sum=True))
    assert (last.data, last.sum) == (b"89", hashlib.sha256(b"0123456789").hexdigest())
