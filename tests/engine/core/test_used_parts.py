"""A model that uses random parts of itself in each micro-batch is trained as on one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.engine.worlds import PROGRAMS, Job, run

WORLDS = {1: ([2, 2],), 6: ([2], [1, 1], [2, 2])}  # by the number of cases


def job(directory: Path, nodes: list[int], function: str, **env: str) -> Job:
    return Job(
        str(directory),
        nodes,
        {},
        call=f"{PROGRAMS}.used_parts:{function}",
        env=env,
        timeout=200,
    )


@pytest.mark.parametrize("cases", WORLDS)
def test_random_parts_in_random_micro_batches(tmp_path: Path, cases: int) -> None:
    """Weights equal those of one process, or the step is refused before it is taken."""
    worlds = WORLDS[cases]
    env = {"CASES": str(cases)}
    jobs = [job(tmp_path / f"{nodes}", nodes, "every_case", **env) for nodes in ([1], *worlds)]
    codes = run(*jobs)
    assert codes == [[0] * sum(one.nodes) for one in jobs], [one.output() for one in jobs]
    alone, *found = (torch.load(one.path / "found") for one in jobs)
    refused = 0
    for nodes, kept in zip(worlds, found, strict=True):
        for case, weights in kept.items():
            if isinstance(weights, str):
                assert case[2:4] == ("ddp", False), (nodes, case, weights)
                assert "find_unused_parameters=True" in weights
                refused += 1
                continue
            for name, value in alone[case[:2]].items():
                torch.testing.assert_close(
                    weights[name], value, atol=1e-5, rtol=0, msg=f"{nodes} {case} {name}"
                )
    assert refused == cases * len(worlds)


@pytest.mark.parametrize("inside", ["0", "1"])
def test_ranks_that_use_other_parts_are_refused(tmp_path: Path, inside: str) -> None:
    for nodes, strategy in (([2], "full_shard"), ([1, 1], "hybrid_shard")):
        directory = tmp_path / strategy
        assert run(job(directory, nodes, "ranks_differ", INSIDE=inside, STRATEGY=strategy)) == [
            [0, 0]
        ]
        for rank in range(2):
            words = (directory / f"refused_{rank}").read_text()
            assert "the ranks used other parts of the model" in words
            assert "find_unused_parameters=True" in words


@pytest.mark.parametrize(("nodes", "skips"), [([2], "1"), ([2, 2], "2 3")])
def test_ranks_that_use_fewer_blocks_are_named(
    tmp_path: Path, nodes: list[int], skips: str
) -> None:
    """They would wait for distributed.timeout, which is far longer than that of this job."""
    own = job(tmp_path, nodes, "ranks_use_fewer", SKIPS=skips)
    assert run(own)[0][0] == 1
    assert "the ranks use different blocks of the model" in own.output()
    assert "find_unused_parameters=True" in own.output()
    # Whichever of them had said first where it stands.
    assert re.search(rf"where rank [{skips}] ", own.output())


def test_ranks_that_predict_longer_are_named_or_wait(tmp_path: Path) -> None:
    refused = job(tmp_path / "refused", [2], "predicts_longer", SKIPS="", UNUSED="0")
    gathered = job(tmp_path / "gathered", [2], "predicts_longer", SKIPS="", UNUSED="1")
    assert run(refused, gathered) == [[1, 1], [0, 0]], refused.output() + gathered.output()
    assert "the ranks use different blocks of the model" in refused.output()
    assert "or which they call more often, needs find_unused_parameters" in refused.output()
    assert (gathered.path / "predicted_1").exists()
