"""Requirements of a test on the machine: without them it is skipped, or fails under CI."""

import functools
import os
import subprocess
from typing import NoReturn

import pytest

from orchestrator.common.errors import CheckFailed
from orchestrator.local_cluster.cluster import sshd_program

TOOLS = "apt-get install openssh-server openssh-client iproute2 util-linux"
NAMESPACES = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--fork"]


def lacking(reason: str) -> NoReturn:
    """Skip; or fail if ORCHESTRATOR_TESTS_NO_SKIP=1 promises a machine that lacks nothing."""
    if os.environ.get("ORCHESTRATOR_TESTS_NO_SKIP") == "1":
        pytest.fail(f"this machine must not lack anything, but: {reason}")
    pytest.skip(reason)


def require_sshd() -> None:
    """An sshd to start, by anybody."""
    try:
        sshd_program()
    except CheckFailed as missing:
        lacking(str(missing))


def require_namespaces() -> None:
    """Root, and a kernel that gives it namespaces."""
    require_sshd()
    reason = _no_namespaces()
    if reason:
        lacking(reason)


@functools.lru_cache
def _no_namespaces() -> str:
    if os.geteuid() != 0:
        return "hosts in network namespaces need root"
    try:
        made = subprocess.run(
            [*NAMESPACES, "ip", "link", "add", "br0", "type", "bridge"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as missing:
        return f"{missing.filename} is not installed: {TOOLS}"
    return f"no network namespace or bridge: {made.stderr.strip()}" if made.returncode else ""
