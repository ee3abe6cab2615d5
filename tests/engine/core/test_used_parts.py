"""Ranks of a sharded model that use other parts of it are seen before the step is taken."""

from pathlib import Path

import pytest

from tests.engine.worlds import PROGRAMS, Job, run

pytestmark = pytest.mark.slow


def job(directory: Path, nodes: list[int], function: str, **env: str) -> Job:
    return Job(
        str(directory),
        nodes,
        {},
        call=f"{PROGRAMS}.used_parts:{function}",
        env=env,
        timeout=200,
    )


@pytest.mark.parametrize("inside", ["0", "1"])
def test_ranks_using_different_parts_are_refused(tmp_path: Path, inside: str) -> None:
    for nodes, strategy in (([2], "full_shard"), ([1, 1], "hybrid_shard")):
        directory = tmp_path / strategy
        assert run(job(directory, nodes, "ranks_differ", INSIDE=inside, STRATEGY=strategy)) == [
            [0, 0]
        ]
        for rank in range(2):
            words = (directory / f"refused_{rank}").read_text()
            assert "the ranks used other parts of the model than each other" in words
            assert "find_unused_parameters=True" in words


def test_unused_parameters_are_refused_under_sharding(tmp_path: Path) -> None:
    one = job(tmp_path, [2], "ranks_differ", INSIDE="0", STRATEGY="full_shard", UNUSED="1")
    assert run(one) == [[0, 0]], one.output()
    words = (tmp_path / "refused_0").read_text()
    assert "find_unused_parameters is for ddp: under full_shard all ranks use the same" in words
