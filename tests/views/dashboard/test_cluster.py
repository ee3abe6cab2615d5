"""The page of the cluster: the rows of `top`, and what is the matter with each node."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from orchestrator.config.launch import Where
from orchestrator.head.doctor import last_look
from orchestrator.head.doctor.findings import Finding
from orchestrator.head.nodes.node_list import Node
from orchestrator.records import cordons
from orchestrator.views.dashboard import cluster
from orchestrator.views.dashboard.cluster import Cluster
from orchestrator.views.top import table
from tests.views.dashboard.client import Got, Site
from tests.views.top.samples import job, sample

NODES = [Node(host=name) for name in ("one", "two", "gone")]


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORCHESTRATOR_HOME", str(tmp_path / "own"))


def test_each_node_has_its_row_of_top_and_its_health() -> None:
    full = Finding("disk", "warn", ("two",), "/ has 1 GB left", "rm something")
    clock = Finding("clock", "bad", ("one", "two"), "its clock is 9 s ahead", "chronyc makestep")
    last_look.note(NODES[1:2], [clock])  # an earlier one, which no longer counts
    last_look.note(NODES[:2], [full])
    cordons.add(["gone"], "new cables")
    shown = json.loads(json.dumps(cluster.data(sample(job("train")), NODES)))
    assert shown["summary"] == "2 of 3 nodes, 1 job, 1 of 2 GPUs in use"
    one, two, gone = shown["nodes"]["rows"]
    headings = shown["nodes"]["headings"]
    assert sorted(headings) == sorted(["HEALTH", *table.NODES.headings])
    cells = [dict(zip(headings, map(tuple, row["cells"]), strict=True)) for row in (one, two, gone)]
    assert cells[0]["WHO"] == ("ada, bob", "") and cells[0]["GPU"][1] == "good"
    assert [row["HEALTH"] for row in cells] == [
        ("well", "good"),
        ("doctor: / has 1 GB left", "warn"),
        ("it does not answer", "warn"),
    ]
    assert [each["what"] for each in gone["health"]][1].startswith("cordoned (new cables, since")
    assert two["health"][0]["fix"] == "rm something" and two["looked"] and gone["looked"] is None
    assert [mark["share"] for mark in one["marks"]] == [0.97, 0.03] and gone["marks"][0] == {
        "share": None, "sick": False,
    }  # fmt: skip
    assert [part[0][0] for part in one["parts"]] == ["GPU 0", "  71", "GPU 1", "  72", "9"]
    assert shown["jobs"]["rows"][0]["experiment"] == "train"


def test_a_memory_that_does_not_count_is_said(tmp_path: Path) -> None:
    last_look.note(NODES, [])
    (tmp_path / "own" / last_look.FILE).write_text("{")
    assert "is not a file of ours" in cluster.data(sample(), NODES)["problems"][0]


def test_its_connections_last_as_long_as_somebody_looks(tmp_path: Path) -> None:
    (tmp_path / "nodes.txt").write_text("127.0.0.1:1\n")  # where nobody listens
    root = tmp_path / "experiments"
    root.mkdir(mode=0o700)
    site = Site(root)
    site.board.nodes.every = 0.05
    looked = Cluster(Where(experiments=root, nodes=tmp_path / "none.txt"))
    site.board.nodes.render, site.board.nodes.rest = looked.render, looked.close

    async def look() -> None:
        def refused(got: Got) -> object:
            return any("connect" in row["cells"][1][0] for row in rows(got))

        missing = await site.ask("/api/cluster/events", until=lambda got: got.events("problem"))
        assert "there is no node list" in missing.events("problem")[0]
        looked.where = Where(experiments=root, nodes=tmp_path / "nodes.txt")
        await site.ask("/api/cluster/events", until=refused)
        while looked.watch is not None:
            await asyncio.sleep(0.01)

    def rows(got: Got) -> list[dict[str, list[list[str]]]]:
        return [row for each in got.events("cluster") for row in each["nodes"]["rows"]]

    asyncio.run(asyncio.wait_for(look(), 60))
