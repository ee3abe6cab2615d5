"""What a node tells of the checkpoints that it has, and the room it makes for those of others."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from orchestrator.node.transfer import outputs
from orchestrator.protocol.requests.transfer import Checkpoints, Output, SumOutput

PLACE = "experiment/outputs/checkpoints"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path))
    return tmp_path / "runs"


def step(place: Path, name: str = "step_00000004") -> Path:
    (place / name).mkdir(parents=True, mode=0o700)
    (place / name / "manifest.json").write_text("{}")
    (place / name / "manifest.json").chmod(0o600)
    return place / name


def listed(**question: str) -> list[str]:
    return [file.path for file in outputs.of_checkpoints(Checkpoints(**question)).files]


def test_those_of_an_experiment_whatever_node_it_was(runs: Path) -> None:
    step(runs / "train_1-ab/0" / PLACE)
    step(runs / "train_1-ab/0" / PLACE, ".step_00000006.t.partial")  # described, not published
    step(runs / "train_1-ab/0" / PLACE, ".step_00000002.t.gone")
    step(runs / "train_10-cd/1" / PLACE)
    (runs / "train_1-ab.2/0").mkdir(parents=True)
    (runs / "train_1-ab.2/0/experiment").symlink_to(runs / "train_1-ab/0/experiment")
    base = f"train_1-ab/0/{PLACE}"
    names = [".step_00000006.t.partial", "step_00000004"]
    assert listed(experiment="train_1") == [f"{base}/{name}/manifest.json" for name in names]
    assert listed(experiment="*") == []


def test_what_others_may_have_written_is_not_passed_on(runs: Path, tmp_path: Path) -> None:
    place = runs / "train_1-ab/0" / PLACE
    mine, theirs, other = (step(place, f"step_0000000{number}") for number in (1, 2, 3))
    theirs.chmod(0o777)
    (other / "manifest.json").chmod(0o666)
    assert listed(experiment="train_1") == [f"train_1-ab/0/{PLACE}/{mine.name}/manifest.json"]
    step(tmp_path / "own")
    assert listed(directory=f"{tmp_path}/own") == ["step_00000004/manifest.json"]
    assert listed(directory=f"{tmp_path}/nothing") == []
    with pytest.raises(ValueError, match="absolute"):
        listed(directory="own")


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
