"""The plan of transfers: sender, file, receiver, and how many run at once."""

import pytest

from orchestrator.engine.saving.nodes import deliveries_of
from orchestrator.records.checkpoint_manifest import FileRecord

pytestmark = pytest.mark.slow

FILE = FileRecord(1, "0" * 64)
NODES = [(0, "a"), (0, "a"), (1, "b"), (2, "c")]


def sent(names: list[str], copies: int) -> list[str]:
    deliverys = deliveries_of(dict.fromkeys(names, FILE), NODES, copies)
    return [f"{each.name} {each.source}>{each.target}" for each in deliverys]


def test_transfers_send_each_part_to_next_node() -> None:
    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp"]
    assert sent(names, 1) == []
    ring = ["__0_0.distcp 0>2", "__1_0.distcp 1>2", "__2_0.distcp 2>3", "__3_0.distcp 3>0"]
    assert sent(names, 2) == ring
    # No node stores a file twice.
    assert len(sent(names, 3)) == len(sent(names, 9)) == 8
    assert sent(["__0_alike_0.distcp"], 1) == ["__0_alike_0.distcp 0>2", "__0_alike_0.distcp 0>3"]
