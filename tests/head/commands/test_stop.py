from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Where
from orchestrator.head.commands import stop
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.stop import Receipt
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.status import containers


@pytest.mark.parametrize("grace", [math.inf, 1e10, math.nan, -1.0])
def test_a_grace_that_nobody_can_wait_for_is_refused(tmp_path: Path, grace: float) -> None:
    """Before anything is asked of a node: there, a timer would overflow, or kill at once."""
    with pytest.raises(UsageError, match="--grace is"):
        stop.stop(Where(experiments=tmp_path), None, grace=grace, as_json=False)


def test_an_emergency_stop_looks_into_containers_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From outside their processes are another user's, or a job there is killed without a word."""
    node_list = tmp_path / "list"
    node_list.write_text("a\nb\n")
    order = []

    def end(_: Transport, nodes: Sequence[Node], *, all_users: bool) -> list[Receipt]:
        assert all_users
        order.append([node.place for node in nodes])
        return [Receipt(nodes[0].name, "job", 0.1, error="nobody is there")]

    def inside(nodes: Sequence[Node], _: Where, matters: object) -> list[Node]:
        assert matters is containers.runs
        return [replace(nodes[1], wrap="docker exec -i job")]

    monkeypatch.setattr(stop.containers, "of_nodes", inside)
    monkeypatch.setattr(stop.stopping, "stop_everything", end)
    where = Where(nodes=node_list, experiments=tmp_path)
    assert stop.emergency_stop(where, all_users=True, as_json=False) == 4
    assert order == [["b (docker exec -i job)"], ["a", "b"]]
    assert capsys.readouterr().out.count("NOT ENDED") == 2


def test_what_nobody_can_tell_is_no_proof(capsys: pytest.CaptureFixture[str]) -> None:
    receipt = Receipt("a", "job", ended={"7": "python"}, doubtful={"9": "sh"})
    assert stop.show_receipts([receipt], as_json=False) == 1
    assert "CANNOT BE TOLD" in (said := capsys.readouterr().out) and "9 (sh)" in said
    assert stop.show_receipts([replace(receipt, doubtful={})], as_json=False) == 0
