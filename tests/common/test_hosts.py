"""Names and addresses of this machine, and what is none."""

import os
import re

import pytest

from orchestrator.common.hosts import expand_pattern, fold_names, is_this_machine, join_names


@pytest.mark.parametrize(
    ("host", "right"),
    [
        ("localhost", True),
        ("LOCALHOST:8321", True),
        ("127.0.0.1:8321", True),
        ("[::1]:8321", True),
        # An address is no name that a foreign DNS server could resolve.
        ("10.1.2.3", True),
        ("head.example.org:1", True),
        (os.uname().nodename, True),
        ("evil.example.com", False),
        ("evil.example.com:8321", False),
        ("localhost.evil.example.com", False),
        ("127.0.0.1.evil.example.com", False),
        ("", False),
        ("[::1", False),
        ("a:b:c", False),
    ],
)
def test_is_this_machine_recognises_names(host: str, right: bool) -> None:
    assert is_this_machine(host, {"head.example.org"}) is right


@pytest.mark.parametrize(
    "pattern",
    [
        "gpu[001-500].dc2.example",
        "gpu[8-11]",
        "n[09-11,100]",
        "10.0.0.[1-4,7]",
        "node-a,node-b",
        "rack1-gpu[1-4],rack2-gpu[1-3]",
        "0001",
    ],
)
def test_folded_and_expand_are_inverse(pattern: str) -> None:
    names = [
        name for part in re.split(r",(?![^[]*\])", pattern) for name in expand_pattern(part, 1000)
    ]
    assert fold_names(names) == pattern
    assert fold_names([*names, *names]) == pattern


def test_folded_accepts_long_digit_names() -> None:
    names = ["7" * 5000, "7" * 5000 + "8"]
    assert list(expand_pattern(fold_names(names), 1000)) == names


def test_listed_shortens_many_names() -> None:
    names = [f"gpu{number}" for number in range(1, 8)]
    assert join_names(names[:5]) == "gpu1, gpu2, gpu3, gpu4, gpu5"
    assert join_names(names) == "gpu[1-7]"
    words = [chr(97 + number) * 12 for number in range(7)]
    assert join_names(words) == ", ".join(words[:5]) + " and 2 others"
