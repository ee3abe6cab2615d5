"""Files of a node are read once, for their contents and their checksums."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from orchestrator.node.transfer import outputs
from orchestrator.protocol.requests.transfer import Output, SumOutput


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

    def sum_of(size: int, offset: int = 0) -> tuple[str, int]:
        answer = reader.sum(SumOutput(**where, offset=offset, size=size))
        return answer.sum, answer.size

    for first in (0, 4):
        if first:
            assert sum_of(first) == (hashlib.sha256(b"0123").hexdigest(), 4)
        for offset in range(first, 10, 4):
            reader.piece(Output(**where, offset=offset))
        assert sum_of(10) == (hashlib.sha256(b"0123456789").hexdigest(), 10)
        assert read == [0, 4, 8]
        read.clear()
    for offset in (0, 4, 8):
        reader.piece(Output(**where, offset=offset))
    file.write_bytes(b"another")
    assert sum_of(10) == (hashlib.sha256(b"another").hexdigest(), 7)
    assert sum_of(3, 4) == (hashlib.sha256(b"her").hexdigest(), 3)
