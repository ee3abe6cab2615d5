"""What a node says it has of checkpoints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.head.transfer.bring.checkpoint import Partner
from orchestrator.protocol.requests.request import Request
from orchestrator.protocol.requests.transfer import Checkpoints, Output
from tests.head.transfer.bring.nodes import Channel


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
