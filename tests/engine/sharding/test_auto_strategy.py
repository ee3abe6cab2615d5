"""The Trainer's own choice of a strategy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from orchestrator.engine.core import settings
from orchestrator.engine.ranks.ranks import Ranks
from tests.engine.programs import trainings as trained
from tests.engine.worlds import Job, run

pytestmark = pytest.mark.slow

RANKS = Ranks(0, 2, 0, torch.device("cpu"), ((0, "a"), (0, "a")))


def test_ddp_where_the_model_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank with the least memory decides for all."""
    monkeypatch.setattr(settings, "memory_of", lambda ranks: 1 << 40)
    model = nn.Linear(1000, 1000, bias=False)  # of 4 MB, so that training takes 16
    for least, expected in ((33_000_000, "ddp"), (31_000_000, "hybrid_shard")):
        monkeypatch.setattr(settings, "gather", lambda own, other=least: [own, other])
        strategy, reason = settings.choose(model, RANKS, {}, averages=False)
        assert strategy == expected
        assert reason.startswith(f"strategy: {expected}, ")
    model.requires_grad_(False)
    assert settings.choose(model, RANKS, {}, averages=False)[0] == "ddp", (
        "frozen weights are held once"
    )
    assert (
        settings.choose(model, RANKS, {"fsdp": {"shard_size": 1}}, averages=False)[0]
        == "hybrid_shard"
    )


def test_memory_of_a_host_is_shared_by_its_ranks() -> None:
    alone = Ranks(0, 1, 0, torch.device("cpu"), ((0, "a"),))
    assert settings.memory_of(RANKS) < settings.memory_of(alone)


def begins(directory: Path) -> None:
    trained.trainer().train(trained.loader(), epochs=1)
    trained.trainer(config={"fsdp": {"shard_size": 1}})


def test_it_is_said_first(tmp_path: Path) -> None:
    job = Job(str(tmp_path), [2], {}, call="tests.engine.sharding.test_auto_strategy:begins")
    assert run(job) == [[0, 0]], job.output()
    assert "find_unused_parameters" not in job.output()  # torch's warning that it found none
    first, second, *others = job.output().splitlines()
    assert first.startswith("strategy: ddp, the fastest for a model that fits: ")
    assert second.startswith("ddp: a whole copy of the parameters on each of 2 ranks")
    assert "strategy: hybrid_shard, because config= has keys of fsdp" in others
    assert "hybrid_shard: 2 copies of the parameters, each in 1 shard" in others
