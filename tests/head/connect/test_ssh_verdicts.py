"""Cases of ssh_config, each tried by `ssh` and by us against one sshd: the verdict is the same.

Node 0 has three kinds of host key, each with a certificate that is good, over, or for another host.
"""

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from orchestrator.common.errors import NodeError, OrchestratorError
from orchestrator.head.connect import fabric_login
from orchestrator.head.connect.fabric_login import FabricConnection
from orchestrator.head.connect.fleet import map_parallel
from orchestrator.head.connect.reach import open_channel
from orchestrator.head.connect.ssh import SshTransport
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.nodes.node_list import Node
from tests.clusters.loopback import FaultyLoopback
from tests.clusters.require import require_sshd
from tests.head.connect.reading import keygen

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh to compare with"),
]

KINDS = ("ed25519", "ecdsa", "rsa")


@dataclass
class Site:
    """Three sshd, an authority, and files that speak of their keys."""

    cluster: FaultyLoopback
    directory: Path

    def public(self, name: str) -> str:
        return " ".join((self.directory / f"{name}.pub").read_text().split()[:2])

    def values(self) -> dict[str, str]:
        """Return the names that the text of a case may use in braces."""
        node = self.cluster.nodes[0]
        keys = {name: self.public(name) for name in (*KINDS, "authority", "wrong")}
        return {
            **keys,
            "dir": str(self.directory),
            "host": node.address,
            "port": str(node.port),
            "name": f"[{node.address}]:{node.port}",
            "jump1": f"{self.cluster.nodes[1].address}:{node.port}",
            "jump2": f"{self.cluster.nodes[2].address}:{node.port}",
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require_sshd()
    directory = tmp_path_factory.mktemp("site")
    for name in ("authority", "wrong", "stranger"):
        keygen("-t", "ed25519", "-N", "", "-f", directory / name)
    certified = {"ed25519": ("127.0.0.2", "+1d"), "ecdsa": ("127.0.0.2", "20200101:20200102")}
    certified["rsa"] = ("elsewhere,big-cluster", "+1d")
    lines = []
    for kind in KINDS:
        keygen("-t", kind, "-N", "", "-f", directory / kind)
        principals, validity = certified[kind]
        keygen(
            *("-s", directory / "authority", "-I", kind, "-h", "-n", principals),
            *("-V", validity, directory / f"{kind}.pub"),
        )
        lines += [f"HostKey {directory / kind}", f"HostCertificate {directory / kind}-cert.pub"]
    write_lists(directory)
    with FaultyLoopback(3, directory / "cluster") as cluster:
        there = cluster.nodes[0].directory / "sshd_config"
        own = [line for line in there.read_text().splitlines() if not line.startswith("HostKey")]
        there.write_text("\n".join([*lines, *own, "MaxStartups 100", ""]))
        cluster.kill_sshd(0)
        cluster.start_sshd(0)
        yield Site(cluster, directory)


def write_lists(directory: Path) -> None:
    """Write what the cases name: lists of revoked keys, and commands that print known hosts."""
    for name in ("ed25519", "authority", "stranger"):
        shutil.copy(directory / f"{name}.pub", directory / f"revoked_{name}")
        keygen("-k", "-f", directory / f"krl_{name}", directory / f"{name}.pub")
    (directory / "commented").write_text("# none\n\n")
    scripts = {
        "right": f"echo \"$1 $(cut -d' ' -f1,2 {directory}/ed25519.pub)\"",
        "wrong": f"echo \"$1 $(cut -d' ' -f1,2 {directory}/wrong.pub)\"",
        "echo": 'test "$2" = HOSTNAME || exit 0\necho "$1 $3 $4"',
        "fails": "exit 3",
    }
    for name, text in scripts.items():
        (directory / f"print_{name}").write_text(f"#!/bin/sh\n{text}\n")
        (directory / f"print_{name}").chmod(0o755)


@dataclass(frozen=True)
class Case:
    config: str
    # This is the known_hosts file before the connection.
    known: str
    # This is the text of our refusal; if empty, the host is trusted.
    words: str = ""

    def __str__(self) -> str:
        return self.config.partition("\n")[0][:40] or self.known[:40]


ONLY = "HostKeyAlgorithms "
STRICT = "StrictHostKeyChecking yes\n"
CERT = "-cert-v01@openssh.com"
CERTIFIED = "@cert-authority * {authority}\n"
CASES = [
    # known, unknown, changed, in each strictness
    Case("", "{name} {ed25519}\n"),
    Case("", "{host} {ed25519}\n"),
    Case("", ""),
    Case("", "{name} {wrong}\n", "host key has changed"),
    Case("", "{host} {wrong}\n"),
    Case("", "@revoked * {ed25519}\n", "is revoked in"),
    Case("StrictHostKeyChecking yes", "", "is not known"),
    Case("StrictHostKeyChecking yes", "{host} {ed25519}\n"),
    Case("StrictHostKeyChecking yes", "{host} {wrong}\n", "is not known"),
    Case("StrictHostKeyChecking yes", "@revoked {host} {ed25519}\n", "is revoked"),
    Case("StrictHostKeyChecking yes", "127.0.?.2 {ed25519}\n"),
    # an alias has no port
    Case("HostKeyAlias big-cluster", "big-cluster {ed25519}\n"),
    Case("HostKeyAlias big-cluster", "big-cluster {wrong}\n", "host key has changed"),
    Case("HostKeyAlias big-cluster", "{name} {wrong}\n"),
    # revoked keys
    Case("RevokedHostKeys {dir}/revoked_ed25519", "{name} {ed25519}\n", "is revoked in"),
    Case("RevokedHostKeys {dir}/krl_ed25519", "{name} {ed25519}\n", "is revoked in"),
    Case("RevokedHostKeys {dir}/revoked_authority", CERTIFIED, "is revoked in"),
    Case("RevokedHostKeys {dir}/krl_authority", CERTIFIED, "is revoked in"),
    Case("RevokedHostKeys {dir}/revoked_ed25519\nStrictHostKeyChecking no", "", "is revoked in"),
    # a command that knows the hosts
    Case("StrictHostKeyChecking yes\nKnownHostsCommand {dir}/print_right %H", ""),
    Case("KnownHostsCommand {dir}/print_wrong %H", "", "host key has changed"),
    Case("KnownHostsCommand {dir}/print_wrong %H", "{name} {ed25519}\n"),
    Case("KnownHostsCommand {dir}/print_fails", "{name} {ed25519}\n", "KnownHostsCommand failed"),
    # certificates
    Case("StrictHostKeyChecking yes", CERTIFIED),
    Case("StrictHostKeyChecking yes", "@cert-authority {name} {authority}\n"),
    Case("StrictHostKeyChecking yes", "@cert-authority {host} {authority}\n"),
    Case("StrictHostKeyChecking yes", "@cert-authority * {wrong}\n", "is not known"),
    Case(
        f"{STRICT}{ONLY}ecdsa-sha2-nistp256{CERT}",
        CERTIFIED,
        "Certificate invalid: expired",
    ),
    Case(
        f"{STRICT}{ONLY}rsa-sha2-512{CERT}",
        CERTIFIED,
        "not a listed principal",
    ),
    Case(
        f"{STRICT}HostKeyAlias big-cluster\n{ONLY}rsa-sha2-256{CERT}",
        CERTIFIED,
    ),
    Case("StrictHostKeyChecking yes\nHostKeyAlias other", CERTIFIED, "not a listed principal"),
    Case("", CERTIFIED + "@revoked * {authority}\n", "is revoked in"),
    Case("", CERTIFIED + "@revoked * {ed25519}\n", "is revoked in"),
    # what may be negotiated
    Case("Ciphers chacha20-poly1305@openssh.com", ""),
    # the login
    Case("IdentityFile {dir}/lax_key", "", "chmod 600"),
    # ways there; each also goes by the keys of the jump hosts
    Case("ProxyJump {jump1}", "{name} {ed25519}\n"),
    Case("ProxyJump {jump1}", "{name} {wrong}\n", "host key has changed"),
    Case("ProxyJump {jump1}", "{jump1_name} {wrong}\n", "host key has changed"),
    Case("ProxyJump {jump1},{jump2}", ""),
    Case("ProxyJump {jump1},{host}:{port}", "", "leads back to the same machine"),
    Case("ProxyJump {jump1}\nHost 127.0.0.3\nProxyJump {jump2}", ""),
    Case("ProxyJump {host}:{port}", "", "leads back to the same machine"),
    Case("Host *\nProxyJump {jump1}", "", "leads back to the same machine"),
    Case("ProxyCommand ssh -F {config} -W %h:%p {jump1_host}", "{name} {ed25519}\n"),
    Case("ProxyCommand sh -c 'echo no route to %n >&2; exit 3'", "", "no route to 127"),
]


def write_case(site: Site, directory: Path, case: Case) -> Path:
    """Write the ssh_config and known_hosts of a case; return the config."""
    directory.mkdir()
    config, known = directory / "config", directory / "known_hosts"
    values = {**site.values(), "config": str(config)}
    values["jump1_host"] = values["jump1"].partition(":")[0]
    values["jump1_name"] = f"[{values['jump1_host']}]:{values['port']}"
    lines = f"Host {values['host']}\n{case.config}".format(**values)
    key = "" if "IdentityFile" in case.config else f"IdentityFile {site.cluster.key}\n"
    config.write_text(
        f"{lines}\nHost *\nPort {values['port']}\n{key}IdentitiesOnly yes\nConnectTimeout 20\n"
        f"UserKnownHostsFile {known}\nGlobalKnownHostsFile /dev/null\nUpdateHostKeys no\n"
        "StrictHostKeyChecking accept-new\n"
    )
    known.write_text(case.known.format(**values))
    return config


def by_ssh(config: Path) -> tuple[bool, str]:
    words = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "127.0.0.2", "true"]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return done.returncode == 0, done.stderr


def by_us(config: Path) -> tuple[bool, str]:
    fabric_login.load_key.cache_clear()
    own = SshConfig(config)
    node = Node("127.0.0.2")
    try:
        connection = SshTransport(own, timeout=20).connect(node)
        open_channel(connection, node, 20).connection.close()
    except OrchestratorError as error:
        return False, str(error)
    return True, ""


def kinds_and_names(known: Path) -> list[list[str]]:
    """Return the entries of a known_hosts file without the salt of hashed names."""
    lines = [line.split() for line in known.read_text().splitlines()]
    return sorted([line[0] if line[0][0] != "|" else "|", *line[1:]] for line in lines)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict_agrees_with_ssh(site: Site, tmp_path: Path, case: Case) -> None:
    compare(site, tmp_path, case)


def compare(site: Site, tmp_path: Path, case: Case, *, hashed: bool = False) -> None:
    lax = site.directory / "lax_key"
    shutil.copy(site.cluster.key, lax)
    lax.chmod(0o644)
    theirs, ours = (write_case(site, tmp_path / who, case) for who in ("theirs", "ours"))
    for config in (theirs, ours) if hashed else ():
        keygen("-H", "-f", config.with_name("known_hosts"))
    trusted, said = by_us(ours)
    accepted, complaint = by_ssh(theirs)
    assert accepted == trusted, f"ssh: {complaint}\nwe: {said}"
    if case.words:
        assert not trusted
        with pytest.raises(NodeError, match=f"(?s){case.words}"):
            raise NodeError(said)
    else:
        assert trusted, said
        recorded = [kinds_and_names(config.with_name("known_hosts")) for config in (theirs, ours)]
        assert recorded[0] == recorded[1]


# What is said of the host is hashed, after lines of others, most of them with RSA keys.
HASHED = [
    Case("", "{name} {rsa}\n"),
    Case("", "{name} {wrong}\n", "host key has changed"),
    Case("", "{name} {wrong}\n{name} {ed25519}\n"),
    Case("", "@revoked {name} {rsa}\n{name} {rsa}\n", "host key (has changed|is revoked)"),
    Case("", ""),
    Case("StrictHostKeyChecking yes", "{host} {ed25519}\n"),
    Case("StrictHostKeyChecking yes", "", "is not known"),
    Case("HostKeyAlias big-cluster", "big-cluster {ecdsa}\n"),
]


@pytest.mark.parametrize("case", HASHED, ids=lambda case: f"{case}: {case.known}")
def test_verdict_agrees_with_ssh_for_hashed_names(site: Site, tmp_path: Path, case: Case) -> None:
    others = "".join(f"other{n} {{{kind}}}\n" for n, kind in enumerate(("rsa", "rsa", "ecdsa")))
    compare(site, tmp_path, replace(case, known=others + case.known), hashed=True)


# -- several jump hosts at once ---------------------------------------------------------------


def test_dead_jump_host_does_not_delay_others(site: Site, tmp_path: Path) -> None:
    """One jump host accepts and stays silent; at that time another one leads to its node."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        place = f"127.0.0.1:{dead.getsockname()[1]}"
        config = write_case(site, tmp_path / "case", Case("ProxyJump {jump1}", ""))
        # Fabric knows the hosts from then on.
        assert by_ssh(config)[0]
        with config.with_name("known_hosts").open("a") as known:
            for name in (
                f"[127.0.0.1]:{dead.getsockname()[1]}",
                f"[behind-dead]:{site.cluster.nodes[0].port}",
            ):
                known.write(f"{name} {site.public('wrong')}\n")
        config.write_text(f"Host behind-dead\nProxyJump {place}\n" + config.read_text())
        own = SshConfig(config)
        transport = SshTransport(own, timeout=60)
        refused: list[str] = []

        def wait_in_vain() -> None:
            try:
                transport.connect_to(own.destination("behind-dead"), 60)
            except OrchestratorError as error:
                refused.append(error.what)

        waiting = [threading.Thread(target=wait_in_vain) for _ in range(2)]
        for thread in waiting:
            thread.start()
        held = dead.accept()[0]
        transport.connect_to(own.destination("127.0.0.2"), 60).close()
        assert [thread.is_alive() for thread in waiting] == [True, True] and not refused
        dead.close()
        held.close()
        for thread in waiting:
            thread.join()
    assert len(refused) == 2 and all("its jump host 127.0.0.1: it" in what for what in refused)


def test_jump_host_connection_is_shared(site: Site, tmp_path: Path) -> None:
    own = SshConfig(write_case(site, tmp_path / "case", Case("ProxyJump {jump1}", "")))
    # Fabric knows the hosts from then on.
    assert own.file is not None and by_ssh(own.file)[0]
    transport = SshTransport(own, timeout=60)
    nodes = [own.destination("127.0.0.2", port=site.cluster.nodes[0].port) for _ in range(4)]
    connections = [
        connection
        for connection in map_parallel(nodes, lambda node: transport.connect_to(node, 60))
        if isinstance(connection, FabricConnection)
    ]
    (through,) = {connection.through for connection in connections}
    assert len(connections) == 4 and through is not None and through.alive
    through.close()
    again = transport.connect_to(nodes[0], 60)
    assert isinstance(again, FabricConnection)
    assert again.through is not through, "an ended connection is replaced"
    again.close()
