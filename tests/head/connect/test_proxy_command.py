from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.common.errors import NodeError
from orchestrator.head.connect import ssh
from orchestrator.head.connect.ssh import ProxyCommand, SshTransport
from orchestrator.head.connect.ssh_config import Destination, SshConfig

SILENT = "sh -c 'echo $$ > {pid}; echo complaint >&2; exec sleep 7654'"


def test_a_silent_one_is_hung_up(tmp_path: Path) -> None:
    """It neither speaks nor reads, so that it would not see the end of its streams."""
    command = SILENT.format(pid=tmp_path / "pid")
    there = Destination("gpu01", "bob", 22, (), proxy_command=command)
    with pytest.raises(NodeError, match="its ProxyCommand leads to no SSH server, and") as refused:
        SshTransport(SshConfig()).connect(there, timeout=0.5)
    assert command in refused.value.fix


def test_it_ends_with_its_connection(capfd: pytest.CaptureFixture[str]) -> None:
    """What it writes on standard error is not written to ours."""
    proxy = ProxyCommand("sh -c 'echo complaint >&2; echo ready; exec sleep 7654'")
    assert proxy.recv(100) == b"ready\n"
    assert proxy.last_words == "complaint"
    proxy.close()
    assert proxy.process.wait() == -signal.SIGHUP
    assert capfd.readouterr() == ("", "")


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Its pipes are ours no longer: a reader of our output sees the end."""
    code = (
        "import sys; from orchestrator.common import interrupt\n"
        "from orchestrator.head.connect.ssh import ProxyCommand\n"
        "proxy = ProxyCommand(\"sh -c 'echo $$; exec sleep 7654'\")\n"
        "print(proxy.recv(100).decode(), flush=True)\n"
        "interrupt.leave(7)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 7
    try:
        left = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    assert select.select([left], [], [], 60)[0], "it stayed behind"


def test_one_that_fails_is_named(tmp_path: Path) -> None:
    proxy = ProxyCommand("sh -c 'echo no  route >&2; exit 3'")
    assert proxy.recv(100) == b""
    with pytest.raises(NodeError, match="ends with exit code 3: no route"):
        proxy.refuse_failed()


def test_one_that_takes_nothing_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "LINK_SECONDS", 0.3)
    proxy = ProxyCommand("sleep 7654")
    proxy.settimeout(0.1)
    with pytest.raises(ConnectionError, match="takes no more bytes"):
        while True:
            with contextlib.suppress(TimeoutError):
                proxy.send(bytes(1 << 16))
    proxy.close()
