"""Paths in the output of a job in a snapshot appear as the user's own paths."""

from dataclasses import replace

import pytest

from orchestrator.head.screen.tracebacks import own_paths_in_text, own_paths_in_verdict
from orchestrator.records.outcome import JobVerdict

THERE = "/root/.orchestrator/code/snapshots/0a1b2c3d-1/home/me/my project"
TREE = "/home/me/my project"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f'  File "{THERE}/a/b.py", line 3, in f', f'  File "{TREE}/a/b.py", line 3, in f'),
        (f"{THERE}/train.py:7 in main", f"{TREE}/train.py:7 in main"),
        (f"no such file: '{THERE}/x'", f"no such file: '{TREE}/x'"),
        (f"cd {THERE}", f"cd {TREE}"),
        (f"{THERE}: {THERE}/x", f"{TREE}: {TREE}/x"),
        (f"of {THERE}, and so on", f"of {TREE}, and so on"),
        (f"data={THERE}/d (in {THERE}/e)", f"data={TREE}/d (in {TREE}/e)"),
        ("/data/set and " + THERE + "/x", "/data/set and " + TREE + "/x"),
        ("/opt/o/code/snapshots/01234567-0/home/me/my project/x", f"{TREE}/x"),
    ],
)
def test_snapshot_path_becomes_tree_path(text: str, shown: str) -> None:
    assert own_paths_in_text(text, TREE) == shown


@pytest.mark.parametrize(
    "text",
    [
        "nothing of ours: /usr/lib/python3/x.py",
        "/root/.orchestrator/code/snapshots/0a1b2c3d-1/another/x.py",
        "/root/.orchestrator/code/snapshots/0a1b2c3d-1/home/me/my projects/x.py",
        "/root/code/snapshots/mine/my project/x.py",
        "relative/code/snapshots/0a1b2c3d-1/my project/x.py",
        "https://host/code/snapshots/0a1b2c3d-1x/my project",
    ],
)
def test_other_paths_are_kept(text: str) -> None:
    assert own_paths_in_text(text, TREE) == text


def test_tree_name_is_matched_literally() -> None:
    there = "/h/code/snapshots/0a1b2c3d-0/w/a+(b)\\1/x"
    assert own_paths_in_text(there, "/w/a+(b)\\1") == "/w/a+(b)\\1/x"
    assert own_paths_in_text("/h/code/snapshots/0a1b2c3d-0/root/x", "/") == "/x"
    assert own_paths_in_text(there, "") == there


def test_in_verdict_changes_displayed_paths_alone() -> None:
    verdict = JobVerdict(where=f"{THERE}/x.py:1", message="m", rank=3)
    assert own_paths_in_verdict(verdict, TREE) == replace(verdict, where=f"{TREE}/x.py:1")
