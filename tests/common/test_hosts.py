"""Names and addresses of this machine, and what is none."""

from __future__ import annotations

import os

import pytest

from orchestrator.common.hosts import is_this_machine


@pytest.mark.parametrize(
    ("host", "right"),
    [
        ("localhost", True),
        ("LOCALHOST:8321", True),
        ("127.0.0.1:8321", True),
        ("[::1]:8321", True),
        ("10.1.2.3", True),  # no name that somebody else's DNS could hold
        ("head.example.org:1", True),
        (os.uname().nodename, True),
        ("evil.example.com", False),
        ("evil.example.com:8321", False),
        ("localhost.evil.example.com", False),
        ("127.0.0.1.evil.example.com", False),
        ("", False),
        ("[::1", True),
        ("a:b:c", False),
    ],
)
def test_the_names_of_this_machine(host: str, right: bool) -> None:
    assert is_this_machine(host, {"head.example.org"}) is right
