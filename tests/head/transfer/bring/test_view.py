"""What a node says of its files is not trusted."""

from __future__ import annotations

import pytest

from orchestrator.head.transfer.bring.decide import Key
from orchestrator.head.transfer.bring.saved import view
from orchestrator.protocol.requests.transfer import Saved, SavedFile


@pytest.mark.parametrize(
    ("place", "path", "known"),
    [
        ("work", "a/b.pt", True),
        ("work", "../b.pt", False),
        ("work", "/etc/b.pt", False),
        ("elsewhere", "b.pt", False),
    ],
)
def test_only_files_inside_a_place_are_known(place: str, path: str, *, known: bool) -> None:
    saved = Saved(files=(SavedFile(path=path, place=place),), roots={"work": "/work"})
    assert list(view("a", saved).files) == [Key(place, path)] * known
