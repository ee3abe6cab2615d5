"""All tests of this folder start hosts, so that each is marked `cluster`."""

from pathlib import Path
from typing import Any

import pytest

from tests.launching import Head


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("cluster")


@pytest.fixture
def apart(netns_cluster: Any, tmp_path: Path) -> Head:
    """Every host has a directory of its own where the head has its experiments."""
    return Head(netns_cluster(2, tmpfs=[str(tmp_path)]), tmp_path)


@pytest.fixture
def lonely(netns_cluster: Any, tmp_path: Path) -> Head:
    """A head with a cluster of its own, whose links may be cut."""
    return Head(netns_cluster(2), tmp_path)
