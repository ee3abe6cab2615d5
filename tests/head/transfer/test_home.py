"""Messages about files that a program wrote beside its code."""

from pathlib import Path

import pytest

from orchestrator.head.transfer.home import CodeOutputs, where_files_are
from orchestrator.protocol.requests.transfer import OutputFile

OUTPUTS = Path("/e/train_1/outputs")


NEXT = "; for the next launch to find a directory there: --set sync.outputs=[DIRECTORY]"


def wrote(*paths: str, place: str = "/s/x-0/u/proj") -> CodeOutputs:
    files = [OutputFile(path=path, size=1000, place=place) for path in paths]
    return CodeOutputs(files, "/s/x-0/u/proj")


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({0: wrote("model.pt")}, "wrote model.pt beside its code on node 0 (1 file, 1 kB)"),
        (
            {rank: wrote("runs/a", f"{rank}.txt") for rank in range(64)},
            "wrote 0.txt, 1.txt, 10.txt and 62 more beside its code on 64 nodes (128 files,"
            " 128 kB)",
        ),
        (
            {0: wrote("u/outputs/run1/model.pt", "log.txt", place="/s/x-0")},
            "wrote ../../log.txt, ../outputs beside its code on node 0 (2 files, 2 kB)",
        ),
        (
            {0: wrote("a/x", "b c/y"), 3: wrote("out/z")},
            "wrote a, b c, out beside its code on 2 nodes (3 files, 3 kB)",
        ),
    ],
)
def test_where_it_is_reports_directory_once(found: dict[int, CodeOutputs], sentence: str) -> None:
    said = [f"the program {sentence}: now in /e/train_1/outputs{NEXT}"]
    assert where_files_are(found, OUTPUTS) == said
    assert where_files_are({}, OUTPUTS) == []
