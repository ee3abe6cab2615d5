"""Parts of a checkpoint go from node to node: sessions of nodes, all on this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.transfer.bring import exchange
from orchestrator.head.transfer.bring.checkpoint import Missing
from orchestrator.head.transfer.bring.partner import Partner
from orchestrator.head.transfer.bring.room import Room
from orchestrator.node.server.visit import Visit
from orchestrator.node.transfer import give
from orchestrator.protocol.requests.request import Request
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
        self.visit = Visit()

    def ask(self, request: Request[Any], timeout: float) -> Any:
        return self.visit.answer(request)


@pytest.fixture
def partners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Partner]:
    """Nine nodes, of which the first has all."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    return [
        Partner(f"n{at}", Node(f"n{at}"), "127.0.0.1", cast(Any, Channel()), (JOB, at),
               manifests={SUM: MANIFEST})
        for at in range(9)
    ]  # fmt: skip


def missing(partners: list[Partner], place: Path, size: int) -> Missing:
    """Bring each of the other nodes a file that the first one has."""
    records = {}
    place.mkdir()
    (place / checkpoint_manifest.NAME).write_bytes(MANIFEST)
    for at in range(1, len(partners)):
        data = os.urandom(size)
        (place / f"{at}.bin").write_bytes(data)
        records[f"{at}.bin"] = FileRecord(size, hashlib.sha256(data).hexdigest())
    here = Holding(0, 5, "x", 1.0, SUM, records, frozenset(records), {}, str(place))
    deliveries = [
        Delivery(0, at, SUM, f"{at}.bin", records[f"{at}.bin"]) for at in range(1, len(partners))
    ]
    version, room = Version(records, {}, (here,)), Room(place.parent / "here")
    return Missing(partners, deliveries, 5, version, room, lambda: None)


def test_a_node_is_not_called_by_more_at_once_than_it_hears(
    partners: list[Partner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it refuses would get their files through the head's machine."""
    assert exchange.CALLERS < give.CALLERS
    monkeypatch.setattr(exchange, "CALLERS", 2)
    monkeypatch.setattr(give, "CALLERS", 4)
    work = missing(partners, tmp_path / "step_5", 4 << 20)
    work.bring("")
    assert work.through_here == []
    came = sorted(path.name for path in (tmp_path / "home").rglob("*.bin"))
    assert came == [f"{at}.bin" for at in range(1, 9)]


@pytest.fixture
def through_here(
    partners: list[Partner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Missing:
    """Nobody can take files directly: what the second node lacks comes through this machine."""
    monkeypatch.setattr(give, "CALLERS", 0)
    return missing(partners[:2], tmp_path / "step_5", 10)


def test_a_head_without_a_place_for_files_on_their_way_says_so(
    through_here: Missing, tmp_path: Path
) -> None:
    (tmp_path / "here").write_text("something else")
    with pytest.raises(NodeError, match=r"n1: files cannot come .*here: File exists") as error:
        through_here.bring("")
    assert "make room there" in error.value.fix


def test_a_disk_without_room_is_not_filled(
    through_here: Missing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 9)
    with pytest.raises(NodeError, match=r"n1: 1.bin has 10 B and .*here has 9 B free"):
        through_here.bring("")
    assert list((tmp_path / "here").iterdir()) == []


def test_files_wait_for_the_room_that_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, 15)
    room, waits, over = Room(tmp_path), threading.Event(), threading.Event()
    monkeypatch.setattr(sys.modules[Room.__module__], "LOOK_SECONDS", 0.01)

    def second() -> None:
        with room.of("b", 10, waits.set):
            over.set()

    with room.of("a", 10, lambda: None) as place:
        (place / "a").write_text("a")
        other = threading.Thread(target=second, daemon=True)
        other.start()
        assert waits.wait(60) and not over.is_set()
    other.join(60)
    assert over.is_set()
    room = Room(tmp_path)
    with room.of("a", 15, lambda: None):
        pass
    assert list(tmp_path.iterdir()) == []


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Leave so many bytes on the disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=count))
