"""Messages about files that a program wrote beside its code."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.head.transfer.home import CodeOutputs, is_much, where_it_is
from orchestrator.protocol.requests.transfer import OutputFile

OUTPUTS = Path("/e/train_1/outputs")


def wrote(*paths: str, place: str = "/s/x-0/u/proj", has_come: bool = True) -> CodeOutputs:
    files = [OutputFile(path=path, size=1000, place=place) for path in paths]
    return CodeOutputs(files, "/s/x-0/u/proj", has_come)


@pytest.mark.parametrize(
    ("found", "sentences"),
    [
        ({}, []),
        (
            {0: wrote("model.pt")},
            [
                "the program wrote model.pt beside its code on node 0 (1 file, 1 kB): now in"
                " /e/train_1/outputs"
            ],
        ),
        (
            {rank: wrote("runs/a", f"{rank}.txt") for rank in range(64)},
            [
                "the program wrote 0.txt, 1.txt, 10.txt and 62 more beside its code on 64 nodes"
                " (128 files, 128 kB): now in /e/train_1/outputs;"
                " for the next launch to find it there: --set 'sync.outputs=[runs]'"
            ],
        ),
        (
            {0: wrote("u/outputs/run1/model.pt", "log.txt", place="/s/x-0")},
            [
                "the program wrote ../../log.txt, ../outputs beside its code on node 0 (2 files,"
                " 2 kB): now in /e/train_1/outputs;"
                " for the next launch to find it there: --set 'sync.outputs=[../outputs]'"
            ],
        ),
        (
            {0: wrote("a/x", "b c/y"), 3: wrote("out/z", has_come=False)},
            [
                "the program wrote a, b c beside its code on node 0 (2 files, 2 kB): now in"
                " /e/train_1/outputs; for the next launch to find it there:"
                " --set 'sync.outputs=[a,b c]'",
                "the program wrote out beside its code on node 3 (1 file, 1 kB), which is left"
                " there: orchestrator pull train_1 fetches it; for the next launch to find it"
                " there: --set 'sync.outputs=[out]'",
            ],
        ),
    ],
)
def test_it_is_said_once_for_all_nodes(found: dict[int, CodeOutputs], sentences: list[str]) -> None:
    assert where_it_is(found, OUTPUTS) == sentences


def test_what_nobody_would_wait_for() -> None:
    assert not is_much([OutputFile(path=f"{number}", size=1 << 10) for number in range(1000)])
    assert is_much([OutputFile(path=f"{number}") for number in range(1001)])
    assert is_much([OutputFile(path="x", size=(64 << 20) + 1)])
