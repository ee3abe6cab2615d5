"""Parts of a checkpoint go from node to node: sessions of nodes, all on this machine."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.errors import NodeError
from orchestrator.head.inventory.node_list import Node
from orchestrator.head.resume import bring
from orchestrator.head.resume.bring import Bringing
from orchestrator.head.resume.holder import Holder
from orchestrator.node.forward import give
from orchestrator.node.server.session import Session
from orchestrator.protocol.messages import Request
from orchestrator.records import checkpoint_manifest
from orchestrator.records.checkpoint_manifest import FileRecord
from orchestrator.records.checkpoint_parts import Delivery, Holding, Version

MANIFEST = b"{}"
SUM = hashlib.sha256(MANIFEST).hexdigest()
JOB = "run_20260101_000000-abcdef"


class Channel:
    """A channel to a session in this process."""

    connection = SimpleNamespace(address="127.0.0.1")

    def __init__(self) -> None:
        self.session = Session()

    def ask(self, request: Request[Any], timeout: float) -> Any:
        return self.session.answer(request)


@pytest.fixture
def holders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Holder]:
    """Nine nodes, of which the first has all."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    return [
        Holder(f"n{at}", Node(f"n{at}"), "127.0.0.1", cast(Any, Channel()), (JOB, at),
               manifests={SUM: MANIFEST})
        for at in range(9)
    ]  # fmt: skip


def bringing(holders: list[Holder], place: Path, size: int) -> Bringing:
    """Bring each of the other nodes a file that the first one has."""
    records = {}
    place.mkdir()
    (place / checkpoint_manifest.NAME).write_bytes(MANIFEST)
    for at in range(1, len(holders)):
        data = os.urandom(size)
        (place / f"{at}.bin").write_bytes(data)
        records[f"{at}.bin"] = FileRecord(size, hashlib.sha256(data).hexdigest())
    here = Holding(0, 5, "x", 1.0, SUM, records, frozenset(records), {}, str(place))
    deliveries = [
        Delivery(0, at, SUM, f"{at}.bin", records[f"{at}.bin"]) for at in range(1, len(holders))
    ]
    return Bringing(holders, deliveries, 5, Version(records, {}, (here,)))


def test_a_node_is_not_called_by_more_at_once_than_it_hears(
    holders: list[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it refuses would get their files through the head's machine."""
    assert bring.AT_ONCE < give.CALLERS
    monkeypatch.setattr(bring, "AT_ONCE", 2)
    monkeypatch.setattr(give, "CALLERS", 4)
    work = bringing(holders, tmp_path / "step_5", 4 << 20)
    work.go("", lambda: None)
    assert work.through_here == []
    came = sorted(path.name for path in (tmp_path / "home").rglob("*.bin"))
    assert came == [f"{at}.bin" for at in range(1, 9)]


def test_a_head_without_a_place_for_files_on_their_way_says_so(
    holders: list[Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(give, "CALLERS", 0)  # nobody can take them directly
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    work = bringing(holders[:2], tmp_path / "step_5", 10)
    with pytest.raises(NodeError, match=r"n1: .*No such file") as error:
        work.go("", lambda: None)
    assert "TMPDIR" in error.value.fix
