import contextlib
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.config.launch import Where
from orchestrator.head.commands import stop
from orchestrator.head.connect.transport import Transport
from orchestrator.head.follow.stop import Receipt, receipts_to_text
from orchestrator.head.nodes.node_list import Node, parse_nodes
from orchestrator.head.screen import output
from orchestrator.head.status import status
from orchestrator.protocol.requests.follow import StopReceipt, StopReceipts
from orchestrator.records.experiment import NOT_STARTED, NodeRecord
from tests.records.one_node import NODE


@pytest.mark.parametrize("grace", [math.inf, 1e10, math.nan, -1.0])
def test_stop_refuses_grace_out_of_range(tmp_path: Path, grace: float) -> None:
    """Before anything is asked of a node: there, a timer would overflow, or kill at once."""
    with pytest.raises(UsageError, match=r"--grace is .*; it must be at least 0 and at most"):
        stop.stop_job(Where(experiments=tmp_path), None, grace=grace)


def test_emergency_stop_asks_containers_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From outside their processes are another user's, or a job there is killed without a word."""
    node_list = tmp_path / "list"
    node_list.write_text("a\nb\n")
    order = []

    def end(
        _: Transport, nodes: Sequence[Node], *, all_users: bool, only_show: bool
    ) -> list[Receipt]:
        assert all_users and not only_show
        order.append([node.place for node in nodes])
        return [Receipt(node=nodes[0].name, job="job", took=0.1, error="no node is there")]

    def inside(nodes: Sequence[Node], _: Where, matters: object) -> list[Node]:
        assert matters is status.is_open
        return [replace(nodes[1], wrap="docker exec -i job")]

    monkeypatch.setattr(stop.status, "containers_of", inside)
    monkeypatch.setattr(stop.stopping, "stop_everything", end)
    where = Where(nodes=node_list, experiments=tmp_path)
    assert stop.emergency_stop(where, all_users=True) == 4
    assert order == [["b (docker exec -i job)"], ["a", "b"]]
    assert capsys.readouterr().out.count("NOT ENDED") == 2


@pytest.mark.parametrize(
    ("node", "proved"),
    [
        (replace(NODE, state="lost", runs="here"), True),
        # Its head was killed since.
        (replace(NODE, state="starting", runs="here"), True),
        # By now it belongs to another machine.
        (replace(NODE, state="lost", runs="elsewhere"), False),
        (replace(NODE, state="lost"), False),
        (replace(NODE, state="lost", runs="here", times={"supervisor": 1.0}), False),
        # Its files were removed by another process.
        (replace(NODE, state="running", runs="here"), False),
        (replace(NODE, state=NOT_STARTED), True),
    ],
)
def test_never_began_job_counts_as_proved_stop(node: NodeRecord, *, proved: bool) -> None:
    receipt = Receipt(node="a", job="lm", known=False, runs="here")
    began = not stop.stopping.never_began(receipt, node)
    assert receipt.replace(began=began).proved is proved
    away = receipt.replace(error="it does not answer")
    assert not stop.stopping.never_began(away, node)


def test_to_text_merges_equal_receipts() -> None:
    receipts = [
        Receipt(node=f"gpu{number}", job="lm", took=number / 10, ended={"7": "python"})
        for number in range(1, 41)
    ]
    receipts[6] = Receipt(node="gpu7", job="lm", took=2.0, left=(7, 8))
    assert receipts_to_text(receipts).splitlines() == [
        "gpu[1-6,8-40]: lm: ended 1 process in 4.0 s, nothing left",
        "gpu7: lm: STILL ALIVE: 7, 8",
    ]


def test_to_text_names_shared_memory_that_stays() -> None:
    receipt = Receipt(
        node="a", job="lm", took=1.0, ended={7: "python"}, shared_memory=("/dev/shm/x",)
    )
    assert receipt.proved
    said = "a: lm: ended 1 process in 1.0 s, nothing left; shared memory stays there: /dev/shm/x"
    assert receipts_to_text([receipt]) == said


LIVES = Receipt(node="a", job="lm-1", left=(7, 8), experiment="/home/me/experiments/lm")
OTHER = Receipt(node="b", job="lm-2", left=(9,), experiment="/data/experiments/lm")


@pytest.mark.parametrize(
    ("answer", "options", "shows", "ends", "code"),
    [
        ("y", {}, True, True, 0),
        ("n", {}, True, False, 1),
        ("", {}, True, False, 1),
        (None, {}, False, True, 0),
        ("n", {"yes": True}, False, True, 0),
        ("n", {"as_json": True}, False, True, 0),
        ("y", {"dry_run": True}, True, False, 0),
        (None, {"dry_run": True}, True, False, 0),
    ],
)
def test_emergency_stop_previews_and_asks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str | None,
    options: dict[str, bool],
    shows: bool,
    ends: bool,
    code: int,
) -> None:
    """On a terminal it asks, for a script nothing changes; a dry run ends nothing."""
    node_list, done = tmp_path / "list", list[bool]()
    node_list.write_text("a\nb\n")

    def everything(
        _: object, places: Sequence[Node], *, all_users: bool, only_show: bool
    ) -> list[Receipt]:
        done.append(only_show)
        if not places:
            return []
        return [LIVES, OTHER] if only_show else [LIVES.replace(left=(), ended={7: "python"})]

    monkeypatch.setattr(stop.stopping, "stop_everything", everything)
    monkeypatch.setattr(stop.status, "containers_of", lambda *_: [])
    monkeypatch.setattr("sys.stdin", Typed(answer))
    monkeypatch.setattr("builtins.input", lambda: answer or "")
    where = Where(nodes=node_list, experiments=Path("/home/me/experiments"))
    given = {"all_users": False, **options}
    wanted = output.json_alone() if given.pop("as_json", False) else contextlib.nullcontext()
    with wanted:
        assert stop.emergency_stop(where, **given) == code
    assert (True in done, False in done) == (shows, ends)
    said = capsys.readouterr()
    assert ("lm-1: 2 processes on a, of /home/me/experiments/lm" in said.out) == shows
    assert ("2 jobs on 2 nodes, 1 of these not of /home/me/experiments/" in said.out) == shows
    assert ("end all of these? [y/N]" in said.err) == (shows and "dry_run" not in options)


@pytest.mark.parametrize(
    ("experiment", "elsewhere"),
    [("lm", False), ("other", True), ("", False), ("/data/lm", True), ("HERE/gone", False)],
)
def test_preview_matches_jobs_to_experiments_directory(
    tmp_path: Path, experiment: str, *, elsewhere: bool
) -> None:
    """Nodes that share no disk with the head know only the experiment's name, or not even that."""
    (tmp_path / "lm").mkdir()
    lives = LIVES.replace(experiment=experiment.replace("HERE", str(tmp_path)))
    unknown = lives.replace(experiment="", left=(9,))
    shown = stop.stopping.preview_stop([lives, unknown], tmp_path)
    assert shown.count("lm-1: 3 processes on a") == 1
    assert ("1 of these not of" in shown) is elsewhere


def test_preview_lists_job_once_per_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """127.0.0.2 and 127.0.0.3 are one machine, which tells both times of all that lives on it."""
    proof = StopReceipt(
        job="lm-1",
        part=0,
        ended={},
        killed={},
        left=(7, 8),
        gpu_memory={},
        gpu_unknown="",
        took=0.1,
    )
    answer = StopReceipts(receipts=(proof, proof.replace(part=1, left=(9,))))
    monkeypatch.setattr(stop.stopping, "ask_node", lambda *_: answer)
    nodes = parse_nodes("127.0.0.[2-3]\n", "list")
    # The patched ask_once answers for each node.
    unused = cast(Transport, None)
    alive = stop.stopping.stop_everything(unused, nodes, all_users=False, only_show=True)
    assert stop.stopping.preview_stop(alive, tmp_path).splitlines() == [
        "lm-1: 3 processes on 127.0.0.2",
        "1 job on 1 node",
    ]


class Typed(io.StringIO):
    def __init__(self, answer: str | None) -> None:
        super().__init__(answer or "")
        self.answer = answer

    def isatty(self) -> bool:
        return self.answer is not None
