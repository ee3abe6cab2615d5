"""The order of the queue: first come, first served."""

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.common.errors import CheckFailed, UsageError
from orchestrator.config.launch import LaunchArguments, Where
from orchestrator.head.start.claims import find_obstacles, is_done, name_holders, wait_for_others
from orchestrator.head.start.request import resolve_request
from orchestrator.protocol.requests.claims import RUNNING, WAITING, ClaimEntry
from orchestrator.protocol.requests.start import LockTableState
from orchestrator.records import experiments
from orchestrator.records.experiment import JobRecord


def waits(id: str, order: float, wants: int = 1) -> ClaimEntry:
    return ClaimEntry(
        id=id, state=WAITING, job=id, user="ada", since=order, order=order, wants=wants
    )


def runs(id: str, count: int) -> ClaimEntry:
    keys = tuple(f"{id}-{i}" for i in range(count))
    return ClaimEntry(id=id, state=RUNNING, job=id, user="bob", since=1.0, keys=keys)


def node(free: int, wants: int, *entries: ClaimEntry) -> LockTableState:
    return LockTableState(entries=entries, free=free, total=8, wants=wants)


@pytest.mark.parametrize(
    ("mine", "page", "why"),
    [
        (waits("m", 9), node(8, 8), ""),
        (waits("m", 9), node(7, 8, runs("x", 1)), "7 of 8 free"),
        # Who came first goes first; of two that came at once, the one with the lower id;
        (waits("m", 9), node(4, 4, waits("x", 3, 8), runs("y", 4)), "ada's x waits before it"),
        (waits("m", 2), node(4, 4, waits("x", 3, 8)), ""),
        (waits("m", 3), node(4, 4, waits("x", 3, 8)), ""),
        (waits("m", 3), node(4, 4, waits("a", 3, 8)), "ada's a waits before it"),
        # but for one that leaves enough.
        (waits("m", 9), node(4, 2, waits("x", 3, 2)), ""),
        (waits("m", 9), node(4, 2, waits("x", 3, 2), waits("y", 4, 1)), "ada's y waits before it"),
    ],
)
def test_obstacles_name_earlier_claims(mine: ClaimEntry, page: LockTableState, why: str) -> None:
    assert find_obstacles(mine, {"a": page}, 1) == ({"a": why} if why else {})


def test_obstacles_are_empty_if_enough_nodes_are_free() -> None:
    there = {"a": node(8, 8), "b": node(7, 8, runs("x", 1)), "c": node(8, 8)}
    assert find_obstacles(waits("m", 9), there, 2) == {}
    assert find_obstacles(waits("m", 9), there, 3) == {"b": "7 of 8 free"}


def test_holders_names_job_with_rest_of_gpus() -> None:
    there = node(4, 8, runs("x", 4), waits("y", 3), waits("z", 99))
    assert name_holders(there) == "; bob's x has the rest"
    assert name_holders(node(8, 8)) == ""


def test_is_done_follows_state_of_other_job(tmp_path: Path) -> None:
    arguments = LaunchArguments(program=("train.py",), where=Where(experiments=tmp_path))
    request = resolve_request(arguments, ["master_launch"])
    experiment = experiments.create_experiment(tmp_path, "first")
    name, record = experiment.name, JobRecord("first-1", "first", "running", ["x"], [], 1.0)
    for state, done in (("running", False), ("restarting", False), ("done", True)):
        experiment.write_signed(replace(record, state=state))
        assert is_done(request, name) == done
    experiment.write_signed(replace(record, state="failed"))
    with pytest.raises(CheckFailed, match=f"{name} has failed; nothing was started"):
        is_done(request, name)
    arguments = replace(arguments, launch={"after": ("first_",)})
    with pytest.raises(UsageError, match=f"no experiment 'first_' in .*did you mean '{name}'"):
        wait_for_others(resolve_request(arguments, ["master_launch"]))
