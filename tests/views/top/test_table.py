"""A look at all nodes in words."""

from __future__ import annotations

import json

import pytest

from orchestrator.views.top import table
from tests.views.top.samples import gpu, job, sample


def test_each_node_has_a_row() -> None:
    one, two, gone = table.node_rows(sample())
    assert one == [
        "one", "██       1.0 of 4", "██       4 GiB", "████     2 x 50 % (3 to 97), 61 °C",
        "████     80 GiB", "1 MB/s", "-", "ada, bob",
    ]  # fmt: skip
    assert two[3:] == ["none", "-", "0 B/s", "2 GB/s", "free"]
    assert gone == ["gone", *["-"] * 6, "it does not answer"]


def test_each_job_has_a_row() -> None:
    whole = job("train", slowest="rank 3 +40%", nodes=("one", "two", "three"))
    second = job("gan", step=7, steps=None, left=None, trainer=2)
    assert table.job_rows(sample(second))[0][:2] == ["gan", "7 (Trainer 2)"]
    diverged = job("y", loss=None, lost=True)
    assert table.job_rows(sample(diverged))[0][2] == "NaN"
    foreign = job("x", experiment="", step=None, steps=None, loss=None, rate=None, left=None)
    assert table.job_rows(sample(whole, foreign)) == [
        [
            "train", "10 of 40", "2.5", "1 min 30 s", "rank 3 +40%", "1.5 k/s", "1 min 30 s",
            "ada", "one, two and 1 more",
        ],
        ["x-1f", *["-"] * 5, "1 min 30 s", "ada", "one, two"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0.0, ""), (0.5, "████"), (1.0, "████████"), (7.0, "████████"), (0.14, "█▏"), (-1, "")],
)
def test_bars_have_one_width(share: float, drawn: str) -> None:
    assert table.bar(share) == drawn.ljust(8)


def test_sick_gpus_are_counted() -> None:
    assert table.gpu_words([gpu(0, 5), gpu(1, 5, "it is lost")]).endswith(", 1 sick")


def test_json_has_all_of_it() -> None:
    data = json.loads(json.dumps(table.to_json(sample(job("train")))))
    assert [node["reached"] for node in data["nodes"]] == [True, True, False]
    assert data["nodes"][0]["gpus"][1]["busy"] == 3 and data["nodes"][2]["problem"]
    assert data["jobs"][0]["step"] == 10
