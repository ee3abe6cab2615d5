"""Nodes that cannot be reached: each named with its own cause, in time, and nothing is started."""

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.clusters.netns import NetnsCluster
from tests.conftest import Cluster
from tests.launching import Head

TIMEOUT = 3.0


def launch_in_vain(head: Head, *words: str, timeout: float = TIMEOUT) -> list[str]:
    began = time.monotonic()
    command = head.launch("--connect-timeout", str(timeout), *words, head.script("x.py", ""))
    assert command.finish(patience=3 * timeout + 20) == 4, command.text
    took = time.monotonic() - began
    assert took < 2 * timeout + 5, f"{took:.1f} s: the timeouts add up"
    assert "Traceback" not in command.text
    assert "nothing was started" in command.text
    assert not list((head.directory / "experiments").glob("[!.]*"))
    assert head.nothing_left()
    return command.lines


def cause_of(lines: list[str], address: str) -> str:
    (line,) = [line for line in lines if line.strip().startswith(address + " ")]
    return line


def test_table_lists_every_cause_of_failure(
    netns_cluster: Callable[..., NetnsCluster], tmp_path: Path
) -> None:
    cluster = netns_cluster(7)
    head = Head(cluster, tmp_path)
    cluster.kill_sshd(1)
    cluster.cut(2)
    cluster.hang_handshake(3)
    cluster.hang_handshake(4, "SSH-2.0-OpenSSH_9.2\r\n")
    cluster.change_host_key(5)
    cluster.deny_keys(6)
    head.node_list = cluster.write_list([*cluster.addresses, "no-such-host.invalid"])
    lines = launch_in_vain(head)
    assert lines[0].startswith("error: 7 of 8 nodes")
    addresses = cluster.addresses
    assert "refuses connections on port 22" in cause_of(lines, addresses[1])
    assert "does not answer" in cause_of(lines, addresses[2])
    for hung in (3, 4):
        assert "hangs in the SSH handshake" in cause_of(lines, addresses[hung])
    changed = cause_of(lines, addresses[5])
    assert "host key has changed" in changed and "known_hosts:" in changed
    assert "denies" in cause_of(lines, addresses[6])
    assert "cannot be resolved" in cause_of(lines, "no-such-host.invalid")
    assert not any(line.strip().startswith(addresses[0] + " ") for line in lines)


def test_login_that_hangs_is_named(lonely: Head) -> None:
    (lonely.cluster.home(1) / ".bashrc").write_text("sleep 1000\n")
    line = cause_of(launch_in_vain(lonely), lonely.cluster.addresses[1])
    assert "login shell" in line


def test_noise_of_login_is_harmless(two_nodes: Cluster, tmp_path: Path) -> None:
    head = Head(two_nodes, tmp_path)
    words = ["Welcome to {host}!", '{"id": 1, "ok": {}}', "orchestrator-", "no-python-here"]
    noise = "\n".join(words)
    try:
        two_nodes.noisy_rc(0, noise + "\x00\xff" * 100)
        two_nodes.noisy_rc(1, "x" * 100_000)
        both = head.run("--dry-run", head.script("hi.py", "print('hello')"))
        command = head.run("--nnodes", "1", "--no-torchrun", "hi.py")
        assert "# 2 nodes, 2 ranks" in both.text and "node0 rank0 | hello" in command.lines
        assert "Welcome" not in both.text + command.text
    finally:
        for node in (0, 1):
            two_nodes.quiet_rc(node)


def test_unknown_hosts_are_recorded_once_or_refused(two_nodes: Cluster, tmp_path: Path) -> None:
    head = Head(two_nodes, tmp_path)
    known = tmp_path / "known hosts"
    config = two_nodes.ssh_config.read_text()
    lines = [line for line in config.splitlines() if "KnownHostsFile" not in line]
    own = tmp_path / "ssh_config"
    own.write_text("\n".join([*lines, f'  UserKnownHostsFile "{known}"', ""]))
    script = head.script("x.py", "")
    words = ("--ssh-config", str(own), script)
    strict = head.launch("--strict-host-keys", *words).ends(4)
    assert "host key is not known" in strict.text and not known.exists()
    head.run("--dry-run", *words)
    first = known.read_text()
    assert len(first.splitlines()) == 2
    head.run("--dry-run", "--strict-host-keys", *words)
    assert known.read_text() == first


def test_launch_works_through_jump_host(
    netns_cluster: Callable[..., NetnsCluster], tmp_path: Path
) -> None:
    cluster = netns_cluster(3)
    head = Head(cluster, tmp_path)
    own = tmp_path / "ssh_config"
    jump, first, second = cluster.addresses
    own.write_text(
        f"Host a\n  HostName {first}\n  ProxyJump {jump}\n"
        f"Host b\n  HostName {second}\n"
        f"  ProxyCommand ssh -F {cluster.ssh_config} -W %h:%p {jump}\n"
        "Host *\n" + cluster.ssh_config.read_text()
    )
    head.node_list = cluster.write_list(["a", "b"])
    both = head.run("--ssh-config", str(own), "--dry-run", head.script("hi.py", "print('hello')"))
    command = head.run("--ssh-config", str(own), "--nnodes", "1", "--no-torchrun", "hi.py")
    assert "# 2 nodes, 2 ranks" in both.text and "node0 rank0 | hello" in command.lines
    # The head cannot see this address, which is the node's own.
    assert f"master {first}:" in both.text


def test_launch_uses_open_control_masters(two_nodes: Cluster, tmp_path: Path) -> None:
    """As where each login needs a second factor: no key is enough for any other."""
    head = Head(two_nodes, tmp_path)
    # Names of sockets are limited to 107 bytes.
    with tempfile.TemporaryDirectory() as sockets:
        own = tmp_path / "ssh_config"
        own.write_text(f"ControlPath {sockets}/%C\n{two_nodes.ssh_config.read_text()}")
        null = subprocess.DEVNULL
        ssh = ["ssh", "-F", str(own)]
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), null)
        try:
            for node, address in enumerate(two_nodes.addresses):
                subprocess.run([*ssh, "-fNM", address], check=True, **streams)
                two_nodes.deny_keys(node)
            script = head.script("hi.py", "print('hello')")
            command = head.run("--ssh-config", str(own), "--no-torchrun", script)
            assert {"node0 rank0 | hello", "node1 rank1 | hello"} <= set(command.lines)
        finally:
            for node, address in enumerate(two_nodes.addresses):
                subprocess.run([*ssh, "-O", "exit", address], check=False, **streams)
                two_nodes.allow_keys(node)
    assert head.nothing_left()
