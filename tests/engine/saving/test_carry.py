"""The plan of transfers: sender, file, receiver, how many run at once; disks that none shares."""

from pathlib import Path

import pytest

from orchestrator.common.files import is_local
from orchestrator.engine.saving.nodes import deliveries_of
from orchestrator.records.checkpoint_manifest import FileRecord

pytestmark = pytest.mark.slow

FILE = FileRecord(1, "0" * 64)
NODES = [(0, "a"), (0, "a"), (1, "b"), (2, "c")]


def sent(names: list[str], copies: int) -> list[str]:
    return [
        f"{each.name} {each.source}>{each.target}"
        for each in deliveries_of(dict.fromkeys(names, FILE), NODES, copies)
    ]


def test_transfers_send_each_part_to_next_node() -> None:
    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp"]
    assert sent(names, 1) == []
    ring = ["__0_0.distcp 0>2", "__1_0.distcp 1>2", "__2_0.distcp 2>3", "__3_0.distcp 3>0"]
    assert sent(names, 2) == ring
    # No node stores a file twice.
    assert len(sent(names, 3)) == len(sent(names, 9)) == 8
    assert sent(["__0_alike_0.distcp"], 1) == ["__0_alike_0.distcp 0>2", "__0_alike_0.distcp 0>3"]


# A kind of file system that is not known may be shared with other machines.
@pytest.mark.parametrize(("place", "local"), [("/dev/shm", True), ("/proc", False)])
def test_memory_is_local_and_unknown_disks_are_not(place: str, local: bool) -> None:
    assert is_local(Path(place)) is local
