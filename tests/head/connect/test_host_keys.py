"""ssh-keygen -F says which lines of a known_hosts file OpenSSH itself reads for a host."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from orchestrator.common.errors import EXIT_NODE, NodeError
from orchestrator.head.connect import host_keys
from orchestrator.head.connect.host_keys import check, fingerprint, known_keys, listed_name
from orchestrator.head.connect.ssh_config import Destination
from tests.gears import examples

OURS, OTHER = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()
ANOTHER_KIND = paramiko.RSAKey.generate(2048)


def line(names: str, key: paramiko.PKey = OURS) -> str:
    return f"{names} {key.get_name()} {key.get_base64()}\n"


def hashed(name: str) -> str:
    return paramiko.HostKeys.hash_host(name)


@pytest.fixture
def known_hosts(tmp_path: Path) -> Path:
    host_keys.FILES.read.clear()
    return tmp_path / "ssh" / "known_hosts"


def destination(known_hosts: Path, host: str = "gpu01", port: int = 22) -> Destination:
    return Destination(host, "bob", port, (), user_known_hosts=(known_hosts,))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    host_keys.FILES.read.clear()
    return path


# -- which lines speak of a host --------------------------------------------------------------


def of_openssh(path: Path, name: str) -> list[int]:
    """The lines of a file that OpenSSH finds for a host."""
    words = ["ssh-keygen", "-F", name, "-f", str(path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    return [int(found) for found in re.findall(r"^# Host .* found: line (\d+)", done.stdout, re.M)]


def of_ours(path: Path, host: str, port: int) -> list[int]:
    host_keys.FILES.read.clear()
    found = known_keys(destination(path, host, port))
    return [int(key.where.rpartition(":")[2]) for key in found]


PATTERNS = [
    *("gpu01", "GPU01", "gpu02", "gpu01,10.0.0.1", "10.0.0.1,gpu01", "gpu0", "gpu011", "*"),
    *("gpu*", "gpu0?", "gpu0[12]", "?????", "*.lan", "g*1", "*,!gpu01", "!gpu01,*", "!gpu02,*"),
    *("!GPU*,*", "!gpu01", "[gpu01]:2222", "[gpu01]:22", "[gpu*]:2222", "[*]:*", "[gpu01]:*"),
    *("*,![gpu01]:2222", "![GPU01]:2222,*", "2001:db8::1", "[2001:db8::1]:2222", "fe80::1%eth0"),
    *("|1|", "|1|x|y", "|2|aaaa|bbbb", f"|1|{'A' * 27}=|{'B' * 27}=", "gpu01,", ",gpu01"),
]  # fmt: skip
HOSTS = [("gpu01", 22), ("gpu01", 2222), ("GPU01", 22), ("2001:db8::1", 22), ("2001:db8::1", 2222)]

needs_openssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen")


@needs_openssh
@pytest.mark.parametrize(("host", "port"), HOSTS)
def test_lines_are_read_as_openssh_reads_them(known_hosts: Path, host: str, port: int) -> None:
    names = [*PATTERNS, hashed("gpu01"), hashed("[gpu01]:2222"), hashed("other")]
    path = write(known_hosts, "".join(map(line, names)))
    name = listed_name(destination(path, host, port))
    assert of_ours(path, host, port) == of_openssh(path, name)


patterns = st.lists(st.text("ab*?!.[]:2", min_size=1, max_size=6), min_size=1, max_size=3)


@needs_openssh
@given(st.lists(patterns, min_size=1, max_size=20), st.sampled_from(["ab", "a.b", "b2"]))
@example([["!ab", "*"], ["*", "!a*"], ["[ab]:2"]], "ab")
@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_pattern_is_read_as_openssh_reads_it(
    known_hosts: Path, lists: list[list[str]], host: str
) -> None:
    path = write(known_hosts, "".join(line(",".join(names)) for names in lists))
    for port in (22, 2):
        name = listed_name(destination(path, host, port))
        assert of_ours(path, host, port) == of_openssh(path, name)


@needs_openssh
def test_what_is_no_key_is_passed_over(known_hosts: Path) -> None:
    text = "# gpu01 comment\n\n   \ngpu01\ngpu01 ssh-rsa\ngpu01 ssh-rsa !!!\n\t " + line("gpu01")
    text += "@cert-authority " + line("gpu01") + "@revoked " + line("gpu01", OTHER) + "\0\xff\n"
    path = write(known_hosts, text)
    found = known_keys(destination(path))
    blobs = [OURS.asbytes(), OURS.asbytes(), OTHER.asbytes()]
    assert [key.blob for key in found if key.blob] == blobs
    assert [key.marker for key in found if key.blob] == ["", "@cert-authority", "@revoked"]


def test_a_known_host_costs_few_of_many_hashed_lines(
    known_hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs 2 us for each host: 20,000 of them had cost 512 hosts 18 s."""
    looked, digest = [], host_keys.hmac.digest

    def counted(key: bytes, msg: bytes, name: str) -> bytes:
        looked.append(msg)
        return digest(key, msg, name)

    others = [line(hashed(f"other{n}"), OTHER) for n in range(host_keys.MOST_HASHED)]
    text = "".join([*others, line(hashed("gpu01"), OURS), "@revoked " + line(hashed("a"), OTHER)])
    there = destination(write(known_hosts, text))
    monkeypatch.setattr(host_keys.hmac, "digest", counted)
    assert host_keys.is_guessed(there)
    kinds = host_keys.preferred_algorithms(there, ("ssh-rsa", OURS.get_name()), guess=True)
    assert kinds[0] == OURS.get_name()
    check(there, OURS, strict=True, guess=True)
    assert len(looked) <= 4
    with pytest.raises(host_keys.Guessed):
        check(there, ANOTHER_KIND, strict=False, guess=True)
    assert len(looked) > host_keys.MOST_HASHED


def test_a_file_is_read_once_while_hosts_are_added_to_it(
    known_hosts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And anew where somebody else has changed it."""
    write(known_hosts, line("other").rstrip("\n"))
    read, known = [], host_keys.KnownHosts

    def counted(text: str, source: str) -> host_keys.KnownHosts:
        read.append(source)
        return known(text, source)

    monkeypatch.setattr(host_keys, "KnownHosts", counted)
    for number in range(5):
        there = replace(destination(known_hosts, f"gpu{number}"), hash_known_hosts=number > 2)
        check(there, OURS, strict=False)
        check(there, OURS, strict=True)
    assert read.count(str(known_hosts)) == 1
    places = [
        key.where for n in range(5) for key in known_keys(destination(known_hosts, f"gpu{n}"))
    ]
    assert places == [f"{known_hosts}:{number}" for number in range(2, 7)]
    with known_hosts.open("a") as file:
        file.write(line("gpu9"))
    check(destination(known_hosts, "gpu9"), OURS, strict=True)
    assert read.count(str(known_hosts)) == 2


# -- who may be trusted -----------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        line("gpu01"),
        line(hashed("gpu01")),
        line("gpu01", OTHER) + line("gpu01"),  # two keys of a kind: either will do
        line("gpu01", ANOTHER_KIND) + line("gpu01"),
        line("*"),
        "@revoked " + line("gpu01", OTHER) + line("gpu01"),
        line("gpu01").rstrip("\n"),
    ],
)
def test_a_known_host(known_hosts: Path, text: str, strict: bool) -> None:
    check(destination(write(known_hosts, text)), OURS, strict=strict)
    assert known_hosts.read_text() == text


@pytest.mark.parametrize("known", [OTHER, ANOTHER_KIND], ids=["same kind", "another kind"])
def test_a_changed_host_is_refused(known_hosts: Path, known: paramiko.PKey) -> None:
    """A key of another kind as well: we asked for the known kind, and it had none to show."""
    text = "\n" + line("gpu01", known)
    with pytest.raises(NodeError) as refused:
        check(destination(write(known_hosts, text)), OURS, strict=False)
    assert refused.value.exit_code == EXIT_NODE
    assert "its host key has changed" in refused.value.what
    assert fingerprint(OURS.asbytes()) in refused.value.what
    assert f"{known_hosts}:2" in refused.value.what
    assert f"{known.get_name()} {fingerprint(known.asbytes())}" in refused.value.what
    assert f"ssh-keygen -R 'gpu01' -f '{known_hosts}'" in refused.value.fix
    assert known_hosts.read_text() == text


def test_of_several_known_keys_the_one_of_its_kind_is_told(known_hosts: Path) -> None:
    path = write(known_hosts, line("gpu01", ANOTHER_KIND) + line("gpu01", OTHER))
    with pytest.raises(NodeError, match=r"known_hosts:2 says ecdsa"):
        check(destination(path), OURS, strict=False)


@needs_openssh
def test_the_fix_for_a_changed_host_works(known_hosts: Path) -> None:
    text = line("[gpu01]:2222", OTHER) + line("gpu01", OTHER) + line(hashed("[gpu01]:2222"), OTHER)
    there = destination(write(known_hosts, text), port=2222)
    with pytest.raises(NodeError) as refused:
        check(there, OURS, strict=False)
    command = refused.value.fix.partition(": ")[2].partition(";")[0]
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    host_keys.FILES.read.clear()
    check(there, OURS, strict=False)
    assert known_hosts.read_text() == line("gpu01", OTHER) + line("[gpu01]:2222")


@pytest.mark.parametrize("names", ["gpu01", "*", "gpu01,10.0.0.1"])
def test_a_revoked_key_is_refused(known_hosts: Path, names: str) -> None:
    """Also where another line says that it is good."""
    text = line("gpu01") + "@revoked " + line(names)
    with pytest.raises(NodeError, match=r"revoked in .*known_hosts:2"):
        check(destination(write(known_hosts, text)), OURS, strict=False)


def test_a_host_with_nothing_but_revoked_keys_is_unknown(known_hosts: Path) -> None:
    path = write(known_hosts, "@revoked " + line("gpu01", OTHER))
    check(destination(path), OURS, strict=False)
    assert path.read_text().endswith(line("gpu01"))


# -- hosts seen for the first time ------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "port", "name"),
    [
        ("gpu01", 22, "gpu01"),
        ("GPU01", 22, "gpu01"),
        ("gpu01", 2222, "[gpu01]:2222"),
        ("2001:db8::1", 22, "2001:db8::1"),
        ("2001:db8::1", 2222, "[2001:db8::1]:2222"),
    ],
)
def test_an_unknown_host_is_recorded(known_hosts: Path, host: str, port: int, name: str) -> None:
    there = destination(known_hosts, host, port)
    check(there, OURS, strict=False)
    assert known_hosts.read_text() == line(name)
    assert known_hosts.parent.stat().st_mode & 0o777 == 0o700
    check(there, OURS, strict=True)
    with pytest.raises(NodeError, match="changed"):
        check(there, OTHER, strict=False)
    if shutil.which("ssh-keygen"):
        assert of_openssh(known_hosts, name) == [1]


def test_a_file_without_a_last_newline_is_not_spoilt(known_hosts: Path) -> None:
    text = line("other").rstrip("\n")
    check(destination(write(known_hosts, text)), OURS, strict=False)
    assert known_hosts.read_text() == f"{text}\n{line('gpu01')}"


def test_a_name_is_recorded_hashed_where_ssh_would(known_hosts: Path) -> None:
    there = replace(destination(known_hosts), hash_known_hosts=True)
    check(there, OURS, strict=False)
    assert known_hosts.read_text().startswith("|1|")
    assert "gpu01" not in known_hosts.read_text()
    host_keys.FILES.read.clear()
    check(there, OURS, strict=True)


@pytest.mark.parametrize("port", [22, 2222])
def test_an_alias_is_what_is_known(known_hosts: Path, port: int) -> None:
    """HostKeyAlias: many addresses and ports, one machine."""
    there = replace(destination(known_hosts, port=port), alias="alias")
    check(there, OURS, strict=False)
    assert known_hosts.read_text() == line("alias")
    with pytest.raises(NodeError, match="changed"):
        check(there, OTHER, strict=False)


def test_the_key_of_the_name_without_a_port_is_enough(known_hosts: Path) -> None:
    """It is to ssh, too, which then records nothing; another key there says nothing."""
    there = destination(write(known_hosts, line("gpu01")), port=2222)
    check(there, OURS, strict=True)
    assert known_hosts.read_text() == line("gpu01")
    check(there, OTHER, strict=False)
    assert known_hosts.read_text() == line("gpu01") + line("[gpu01]:2222", OTHER)


def test_the_key_of_the_address_counts_where_it_is_asked_for(known_hosts: Path) -> None:
    """CheckHostIP, which ssh leaves out for an address of this machine."""
    there = destination(write(known_hosts, line("gpu01") + line("10.0.0.7", OTHER)))
    check(there, OURS, strict=False, address="10.0.0.7")
    wary = replace(there, check_address=True)
    with pytest.raises(NodeError, match=r"changed.*known_hosts:2"):
        check(wary, OURS, strict=False, address="10.0.0.7")
    check(wary, OURS, strict=False, address="10.0.0.8")
    check(replace(wary, lax=True), OURS, strict=False, address="10.0.0.7")


@pytest.mark.parametrize("whose", ["option", "config"])
def test_strictly_an_unknown_host_is_refused(known_hosts: Path, whose: str) -> None:
    there = replace(destination(known_hosts, port=2222), strict=whose == "config")
    with pytest.raises(NodeError, match="is not known") as refused:
        check(there, OURS, strict=whose == "option")
    assert fingerprint(OURS.asbytes()) in refused.value.what
    assert "ssh-keyscan -p 2222 gpu01" in refused.value.fix
    assert not known_hosts.exists()


def test_the_global_file_counts_and_is_not_written(known_hosts: Path, tmp_path: Path) -> None:
    system = write(tmp_path / "system" / "known_hosts", line("gpu01"))
    there = replace(destination(known_hosts), global_known_hosts=(system,))
    check(there, OURS, strict=True)
    assert not known_hosts.exists()
    with pytest.raises(NodeError, match="changed"):
        check(there, OTHER, strict=False)


def test_where_nothing_is_to_be_recorded_nothing_is(known_hosts: Path) -> None:
    """UserKnownHostsFile none, or /dev/null."""
    check(replace(destination(known_hosts), user_known_hosts=()), OURS, strict=False)
    check(destination(Path("/dev/null")), OURS, strict=False)
    assert not known_hosts.exists()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NodeError, match="cannot be recorded") as refused:
        check(destination(tmp_path / "file" / "known_hosts"), OURS, strict=False)
    assert "UserKnownHostsFile" in refused.value.fix


def test_many_hosts_are_recorded_at_once(known_hosts: Path) -> None:
    """A first launch on 50 nodes, each in its thread: no line is torn or lost."""
    threads = [
        threading.Thread(
            target=check, args=(destination(known_hosts, f"gpu{n}"), OURS), kwargs={"strict": False}
        )
        for n in range(50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(known_hosts.read_text().splitlines(keepends=True)) == sorted(
        line(f"gpu{n}") for n in range(50)
    )


@needs_openssh
def test_the_fingerprint_is_the_one_ssh_shows(tmp_path: Path) -> None:
    public = tmp_path / "key.pub"
    public.write_text(f"{OURS.get_name()} {OURS.get_base64()}\n")
    shown = subprocess.check_output(["ssh-keygen", "-lf", str(public)], text=True)
    assert fingerprint(OURS.asbytes()) in shown.split()
