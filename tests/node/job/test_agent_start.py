from __future__ import annotations

import resource

import pytest

from orchestrator.node.job.ranks.agent_start import with_room

FILES, MEMORY = resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK
ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("nodes", "nproc", "soft", "hard", "then"),
    [
        (2, 8, 1024, 524288, 1024),  # 50 connections: as the login has it
        (10, 8, 1024, 524288, 1024),
        (11, 8, 1024, 524288, 1024 + 275),
        (1024, 8, 1024, 524288, 1024 + 25600),
        (1024, 8, 1024, 4096, 4096),  # no more than the login may have
        (1024, 8, 1024, ENDLESS, 1024 + 25600),
        (1024, 8, ENDLESS, ENDLESS, ENDLESS),
        (1024, 8, 1048576, 1048576, 1048576),
    ],
)
def test_node_0_has_room_for_all_who_ask_its_store(
    nodes: int, nproc: int, soft: int, hard: int, then: int
) -> None:
    known = [(MEMORY, 64, 64), (FILES, soft, hard)]
    assert with_room(known, nodes, nproc) == [(MEMORY, 64, 64), (FILES, then, hard)]
