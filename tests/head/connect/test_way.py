"""Hosts that fabric reaches, and those only ssh does: a table of configs as `ssh -G` reads them.

test_ssh_verdicts.py tries many of them against a real sshd.
"""

import shutil
from pathlib import Path

import pytest

from orchestrator.head.connect import ssh_config
from orchestrator.head.connect.known_hosts import KnownFile
from orchestrator.head.connect.ssh_config import SshConfig
from orchestrator.head.connect.way import Here, Way, choose_way

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh to ask")

ED25519 = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 42 + "A="
OTHER = ED25519.replace("IA", "IB")


PLAIN = f"gpu01 ssh-ed25519 {ED25519}"


def way_to(tmp_path: Path, text: str, known: str = PLAIN, here: Here | None = None) -> Way:
    """Return the way to gpu01 with this ssh_config and this known_hosts."""
    (tmp_path / "config").write_text(text)
    config = SshConfig(tmp_path / "config")
    settings = ssh_config.ask_ssh(config.file, "gpu01")
    lines = KnownFile(known, Path("known_hosts")).about("gpu01")
    return choose_way(settings, config.defaults(), lines, here or Here())


@pytest.mark.parametrize(
    ("text", "keyword"),
    [
        ("ProxyCommand nc %h %p", "proxycommand"),
        ("ProxyCommand nc %h %p\nProxyUseFdpass yes", "proxycommand"),
        ("RevokedHostKeys /keys/revoked", "revokedhostkeys"),
        ("KnownHostsCommand /bin/x %H", "knownhostscommand"),
        ("CertificateFile /keys/id-cert.pub", "certificatefile"),
        ("PKCS11Provider /usr/lib/x.so", "pkcs11provider"),
        ("SecurityKeyProvider /usr/lib/x.so", "securitykeyprovider"),
        ("IdentityAgent /run/agent", "identityagent"),
        ("IdentityAgent none", "identityagent"),
        ("CheckHostIP yes", "checkhostip"),
        ("VerifyHostKeyDNS yes", "verifyhostkeydns"),
        ("NoHostAuthenticationForLocalhost yes", "nohostauthenticationforlocalhost"),
        ("StrictHostKeyChecking no", "stricthostkeychecking"),
        ("StrictHostKeyChecking off", "stricthostkeychecking"),
        ("PubkeyAuthentication no", "pubkeyauthentication"),
        ("BindInterface lo", "bindinterface"),
        ("HostKeyAlgorithms ecdsa-sha2-nistp256", "hostkeyalgorithms"),
        ("Ciphers chacha20-poly1305@openssh.com", "ciphers"),
        ("MACs umac-64@openssh.com", "macs"),
        ("KexAlgorithms sntrup761x25519-sha512@openssh.com", "kexalgorithms"),
        ("PubkeyAcceptedAlgorithms sk-ssh-ed25519@openssh.com", "pubkeyacceptedalgorithms"),
        ("Ciphers -aes128-ctr", "ciphers"),
        ("RequiredRSASize 3072", "requiredrsasize"),
        ("AddressFamily inet", "addressfamily"),
        ("BindAddress 10.0.0.9", "bindaddress"),
    ],
)
@pytest.mark.parametrize("block", ["", "Host gpu01\n  "])
def test_ssh_only_option_chooses_ssh(tmp_path: Path, block: str, text: str, keyword: str) -> None:
    found = way_to(tmp_path, f"{block}{text}\n")
    assert found == Way("ssh", f"{keyword} is set in your ssh_config")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "HostName 10.0.0.7\nUser bob\nPort 2222\nHostKeyAlias one",
        "IdentityFile /keys/id\nIdentitiesOnly yes",
        "UserKnownHostsFile /known /other\nGlobalKnownHostsFile none\nHashKnownHosts yes",
        "Match host gpu01\n  User bob\n  Port 2222",
        "Match exec true\n  User bob",
        "ProxyJump bob@jump:2222,other",
        "ProxyJump none",
        "ProxyCommand none",
        "StrictHostKeyChecking ask",
        "StrictHostKeyChecking accept-new",
        "StrictHostKeyChecking yes",
        "SendEnv LANG LC_*\nSetEnv A=b\nRequestTTY force\nRemoteCommand tmux\nSessionType none",
        "GSSAPIAuthentication yes\nHostbasedAuthentication yes\nPreferredAuthentications publickey",
        "ServerAliveInterval 5\nServerAliveCountMax 2\nTCPKeepAlive no\nConnectTimeout 7",
        "ForwardAgent yes\nForwardX11 yes\nLocalForward 1 a:2\nRemoteForward 1 a:2\nTunnel yes",
        "ControlMaster auto\nControlPath ~/%C\nControlPersist 5m",
        "Compression yes\nVisualHostKey yes\nLogLevel DEBUG\nUpdateHostKeys no\nIPQoS none",
        "AddKeysToAgent yes\nBatchMode yes\nNumberOfPasswordPrompts 1\nEscapeChar none",
        "CanonicalizeHostname yes\nCanonicalizeFallbackLocal yes",
    ],
)
def test_harmless_option_chooses_fabric(tmp_path: Path, text: str) -> None:
    assert way_to(tmp_path, text + "\n") == Way("fabric", "nothing asks for ssh itself")


def test_written_out_defaults_choose_fabric(tmp_path: Path) -> None:
    defaults = SshConfig().defaults()
    assert len(defaults) > 50
    lines = [f"{key} {value}" for key in defaults for value in defaults[key]]
    # ssh prints these, and does not read them.
    lines = [line for line in lines if not line.startswith(("host ", "canonicaldomains none"))]
    assert way_to(tmp_path, "\n".join([*lines, ""])).program == "fabric"


def test_unknown_newer_option_chooses_ssh() -> None:
    assert choose_way({"new": ("yes",)}, {"new": ("no",)}, [], Here()).by_ssh
    assert choose_way({}, {"new": ("no",)}, [], Here()).by_ssh
    known = KnownFile(PLAIN, Path("known_hosts")).about("gpu01")
    assert not choose_way({"new": ("no",)}, {"new": ("no",)}, known, Here()).by_ssh


@pytest.mark.parametrize(
    ("known", "why"),
    [
        (f"gpu01 ssh-ed25519 {ED25519}", ""),
        (f"gpu01,10.0.0.1 ssh-ed25519 {ED25519} comment", ""),
        (f"gpu01 ssh-ed25519 {ED25519}\ngpu01 ssh-rsa {OTHER}", ""),
        (f"gpu01 ssh-ed25519 {ED25519}\ngpu01 ssh-ed25519 {ED25519}", ""),
        (f"gpu01 ssh-ed25519 {ED25519}\ngpu* ssh-ed25519 {ED25519}", ":2 has a pattern"),
        (f"@revoked other ssh-ed25519 {ED25519}\n{PLAIN}", ""),
        (f"@revoked * ssh-ed25519 {ED25519}", ":1 has @revoked"),
        (f"@cert-authority gpu01 ssh-ed25519 {ED25519}", ":1 has @cert-authority"),
        (f"gpu? ssh-ed25519 {ED25519}\n*1 ssh-ed25519 {ED25519}", ":2 has a pattern"),
        (f"*,!gpu02 ssh-ed25519 {ED25519}", ":1 has a pattern"),
        (f"gpu01 sk-ssh-ed25519@openssh.com {ED25519}", ":1 has sk-ssh-ed25519@openssh.com"),
        (f"gpu01 ssh-dss {ED25519}", ":1 has ssh-dss"),
        (f"gpu01 ssh-ed25519 {ED25519}\ngpu01 ssh-ed25519 {OTHER}",
         ":2 is a second ssh-ed25519 key of it"),
    ],
)  # fmt: skip
def test_known_hosts_lines_for_ssh_choose_ssh(tmp_path: Path, known: str, why: str) -> None:
    found = way_to(tmp_path, "", known)
    expected = Way("ssh", f"known_hosts{why}") if why else Way("fabric", found.why)
    assert found == expected


@pytest.mark.parametrize(
    "text", ["IdentityFile ~/.ssh/%h", "IdentityFile ${KEY}", "ProxyJump %r-jump"]
)
def test_token_chooses_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("KEY", "/keys/id")
    assert "has a token of ssh's" in way_to(tmp_path, text + "\n").why


def test_unknown_host_chooses_ssh(tmp_path: Path) -> None:
    for known in ("", f"other ssh-ed25519 {ED25519}", "gpu01 ssh-ed25519 !!!"):
        assert way_to(tmp_path, "", known) == Way("ssh", "known_hosts does not have it yet")


def test_control_master_and_certificate_choose_ssh(tmp_path: Path) -> None:
    assert way_to(tmp_path, "", here=Here(master=True)) == Way(
        "ssh", "your ssh holds a connection to it"
    )
    assert way_to(tmp_path, "", here=Here(certificate="/id-cert.pub")) == Way(
        "ssh", "/id-cert.pub is a certificate"
    )
    only_ssh = "ProxyCommand nc %h %p\n"
    assert way_to(tmp_path, only_ssh, here=Here(has_ssh=False, master=True)) == Way(
        "fabric", "no ssh program is installed here"
    )
