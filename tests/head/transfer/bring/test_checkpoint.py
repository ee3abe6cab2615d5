"""Parts of a checkpoint go from node to node: sessions of nodes, all on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.transfer import peer
from orchestrator.head.transfer.bring.checkpoint import Missing, Partner
from orchestrator.node.transfer import give
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import Checkpoints, Output
from orchestrator.records import checkpoint_manifest
from orchestrator.records.checkpoint_manifest import FileRecord
from orchestrator.records.checkpoint_parts import Delivery, Holding, Version
from tests.head.transfer.bring.nodes import Channel

MANIFEST = b"{}"
said: list[str] = []
SUM = hashlib.sha256(MANIFEST).hexdigest()
JOB = "run_20260101_000000-abcdef"


@pytest.fixture
def partners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Partner]:
    """Nine nodes, of which the first has all."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    return [
        Partner(
            f"n{at}",
            cast(Any, Channel()),
            address="127.0.0.1",
            job=(JOB, at),
            manifests={SUM: MANIFEST},
        )
        for at in range(9)
    ]


def missing(partners: list[Partner], place: Path, size: int) -> Missing:
    """Bring each of the other nodes a file that the first one has."""
    records = {}
    place.mkdir(mode=0o700)
    (place / checkpoint_manifest.NAME).write_bytes(MANIFEST)
    for at in range(1, len(partners)):
        data = os.urandom(size)
        (place / f"{at}.bin").write_bytes(data)
        records[f"{at}.bin"] = FileRecord(size, hashlib.sha256(data).hexdigest())
    here = Holding(0, 5, "x", 1.0, SUM, records, frozenset(records), {}, str(place))
    deliveries = [
        Delivery(0, at, SUM, f"{at}.bin", records[f"{at}.bin"]) for at in range(1, len(partners))
    ]
    listing = partners[0].ask(Checkpoints(directory=str(place.parent)), 1.0)
    partners[0].place = listing.place
    said.clear()
    version = Version(records, {}, (here,))
    return Missing(partners, deliveries, 5, version, "", said.append, lambda: None)


def test_a_node_is_not_called_by_more_at_once_than_it_hears(
    partners: list[Partner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that it refuses would get their files through the head's machine."""
    assert peer.MOST_CALLERS < give.CALLERS
    partners[0].callers = threading.Semaphore(2)
    monkeypatch.setattr(give, "CALLERS", 4)
    work = missing(partners, tmp_path / "step_5", 4 << 20)
    work.bring()
    assert said == []
    came = sorted(path.name for path in (tmp_path / "home").rglob("*.bin"))
    assert came == [f"{at}.bin" for at in range(1, 9)]


def test_what_nodes_cannot_take_from_each_other_comes_through_this_machine(
    partners: list[Partner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(give, "CALLERS", 0)
    work = missing(partners[:4], tmp_path / "step_5", 3_000_000)
    work.bring()
    assert len(said) == 2 and "n1" in said[0] + said[1]
    assert "cannot take files from n0" in said[0] and "come through this machine" in said[0]
    assert re.match(r"files were sent from here to 5 other nodes, too: ", said[1])
    for at in (1, 2, 3):
        (came,) = (tmp_path / "home").rglob(f"{at}.bin")
        assert came.read_bytes() == (tmp_path / f"step_5/{at}.bin").read_bytes()
        assert came.stat().st_mode & 0o777 == 0o600
        assert (came.parent / checkpoint_manifest.NAME).read_bytes() == MANIFEST


def test_a_file_that_is_not_what_its_manifest_says_does_not_come(
    partners: list[Partner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from node to node nor through this machine; and no manifest says that it is there."""
    work = missing(partners[:2], tmp_path / "step_5", 10)
    (tmp_path / "step_5/1.bin").write_bytes(b"0123456789")
    with pytest.raises(NodeError, match=r"n1: 1\.bin.* came with another content"):
        work.bring()
    found = [path.name for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert found == []


class Pruning(Channel):
    """A node on which somebody removes the oldest checkpoint just now."""

    def __init__(self, oldest: Path) -> None:
        super().__init__()
        self.oldest = oldest

    def ask(self, request: Request[Any], timeout: float) -> Any:
        if isinstance(request, Output):
            self.oldest.unlink(missing_ok=True)
        return super().ask(request, timeout)


def test_one_that_is_pruned_meanwhile_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that could not be heard counts as one that has nothing."""
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "home"))
    for step in (1, 2):
        place = tmp_path / f"step_{step:08d}"
        place.mkdir(mode=0o700)
        (place / "x.bin").write_bytes(b"x")
        files = {"x.bin": {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}}
        manifest = {"format": 1, "step": step, "created": 1.0, "world": 1, "files": files}
        (place / "manifest.json").write_text(json.dumps({**manifest, "progress": None}))
    channel = Pruning(tmp_path / "step_00000001/manifest.json")
    partner = Partner("n", cast(Any, channel))
    held = partner.checkpoints(Checkpoints(directory=str(tmp_path)), 0)
    assert [holding.step for holding in held] == [2]
