"""A look at all nodes in words."""

import json
from dataclasses import replace

import pytest

from orchestrator.protocol.facts import Checkup
from orchestrator.protocol.requests.claims import ClaimEntry
from orchestrator.records.metrics.progress import RankProgress
from orchestrator.views.top import table
from orchestrator.views.top.sample import CONNECTING, NodeSample, TopSample
from tests.views.top.samples import gpu, job, load, sample
from tests.views.top.test_sample import CLAIM


def test_node_row_has_every_column() -> None:
    one, two, gone = map(table.NODES.words, sample().nodes)
    assert dict(zip(table.NODES.headings, one, strict=True)) == {
        "NODE": "one",
        "CPU": "██       1.0 of 4",
        "MEMORY": "██       4 GiB",
        "DISK FREE": "3 GB",
        "GPU": "████     2 x 50 % (3 to 97), 61 °C",
        "GPU MEMORY": "████     80 GiB",
        "IN": "1 MB/s",
        "OUT": "-",
        "WHO": "ada, bob",
    }
    assert two[4:] == ["none", "-", "0 B/s", "2 GB/s", "free"]
    assert gone == ["gone", *["-"] * 7, "it does not answer"]


def test_users_that_a_login_cannot_see_are_told_with_reason() -> None:
    hidden = NodeSample("x", Checkup(gpus=(), holders=(), load=load("a", 3.0).replace(unseen=2.0)))
    assert table.NODES.words(hidden)[-1] == "ada, ?"
    assert table.rows_of_node(hidden)[1:] == [
        table.DetailRow("others", "in another container, or hidden", "2.0 cores")
    ]


def test_totals_count_nodes_gpus_and_jobs() -> None:
    waits = ClaimEntry(id="b", state="waiting", job="next", since=2.0, wants=2)
    seen = sample(job("train"))
    one, two, gone = seen.nodes
    nodes = replace(one, claims=(CLAIM, waits)), replace(two, claims=(waits,)), gone
    words = ["2 of 3 nodes", "2 of 2 GPUs used, 1 held", "1 job running, 1 queued"]
    for width, shown in ((None, words), (60, words[1:]), (30, words[2:])):
        assert table.totals_line(replace(seen, nodes=nodes), width) == " · ".join(shown)
    first = NodeSample("one", problem=CONNECTING)
    assert table.totals_line(TopSample(0.0, (first,), ()), None) == "connecting to 1 node ..."


def test_job_row_has_every_column() -> None:
    whole = job("train", slowest="rank 3 +40%", nodes=("one", "two", "three"), command="a.py")
    foreign = job("x", experiment="", step=None, steps=None, loss=None, rate=None, left=None)
    jobs = table.job_table(sample().time)
    stalled = job("train", stalled="no step for 45 s")
    assert jobs.cells(stalled)[1] == ("10 of 40, no step for 45 s", "yellow")
    assert dict(zip(jobs.headings, jobs.words(whole), strict=True)) == {
        "JOB": "train",
        "STEP": "10 of 40",
        "LOSS": "2.5",
        "LEFT": "1 min 30 s",
        "SLOWEST": "rank 3 +40%",
        "SPEED": "1.5k tokens/s",
        "FOR": "1 min 30 s",
        "USER": "ada",
        "NODES": "one, two and 1 more",
        "COMMAND": "a.py",
    }
    assert jobs.words(foreign) == ["x-1f", *["-"] * 5, "1 min 30 s", "ada", "one, two", "-"]
    # Node lists use this notation.
    assert jobs.words(job("z", nodes=tuple(f"n{i}" for i in range(1, 65))))[-2] == "n[1-64]"
    assert jobs.words(job("y", loss=None, lost=True))[2] == "NaN"


def test_rank_row_has_every_column() -> None:
    rank = RankProgress(3, "two", 1, "running", 10, 250.0, 200.0, 8 << 30, 0.4, "slow compute")
    assert dict(zip(table.RANKS.headings, table.RANKS.words(rank), strict=True)) == {
        "RANK": "rank 3",
        "NODE": "two",
        "STATE": "running",
        "STEP": "10",
        "STEP TIME": "250 ms",
        "OWN TIME": "200 ms",
        "MEMORY": "8 GiB",
        "": "slow compute: +40% of a step",
    }


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0.0, ""), (0.5, "████"), (1.0, "████████"), (7.0, "████████"), (0.14, "█▏"), (-1, "")],
)
def test_bars_have_one_width(share: float, drawn: str) -> None:
    assert table.share_bar(share) == drawn.ljust(8)


def test_sick_gpus_are_counted() -> None:
    assert table.gpu_words([gpu(0, 5), gpu(1, 5, "it is lost")]).endswith(", 1 sick")


def test_json_has_every_node_and_job() -> None:
    data = json.loads(json.dumps(table.sample_to_json(sample(job("train")))))
    assert [node["reached"] for node in data["nodes"]] == [True, True, False]
    assert data["nodes"][0]["gpus"][1]["busy"] == 3 and data["nodes"][2]["problem"]
    assert data["jobs"][0]["step"] == 10
