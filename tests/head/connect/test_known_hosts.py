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
from orchestrator.head.connect import fabric_login
from orchestrator.head.connect.known_hosts import (
    KnownFile,
    accept,
    fingerprint,
    has_changed,
    lines_about,
)
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
    return tmp_path / "ssh" / "known_hosts"


def destination(known_hosts: Path, host: str = "gpu01", port: int = 22) -> Destination:
    return Destination(host, "bob", port, (), user_known_hosts=(known_hosts,))


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


# -- which lines speak of a host --------------------------------------------------------------


def of_openssh(path: Path, name: str) -> set[int]:
    """Return the numbers of the lines that OpenSSH finds for a host."""
    words = ["ssh-keygen", "-F", name, "-f", str(path)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    return {int(found) for found in re.findall(r"^# Host .* found: line (\d+)", done.stdout, re.M)}


def compare(path: Path, host: str, port: int) -> None:
    """Compare ours with OpenSSH's: plain and hashed lines are read alike.

    A line with a pattern or a marker is found wherever OpenSSH finds it, and perhaps elsewhere: it
    sends the host to ssh, which judges it.
    """
    there = destination(path, host, port)
    found = KnownFile(path.read_text(), path).about(there.listed_name)
    ours = {int(line.where.rpartition(":")[2]): line for line in found}
    theirs = of_openssh(path, there.listed_name)
    assert theirs <= ours.keys()
    assert all(ours[number].needs_ssh for number in ours.keys() - theirs)


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
    lines = [line(name) for name in names]
    lines += [f"{marker} {line}" for marker in ("@revoked", "@cert-authority") for line in lines]
    path = write(known_hosts, "".join(lines))
    compare(path, host, port)


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
        compare(path, host, port)


def test_what_is_no_key_is_passed_over(known_hosts: Path) -> None:
    text = "# gpu01 comment\n\n   \ngpu01\ngpu01 ssh-rsa\ngpu01 ssh-rsa !!!\n\t " + line("gpu01")
    text += "@cert-authority " + line("gpu01") + "@revoked " + line("gpu01", OTHER) + "\0\xff\n"
    found = lines_about(destination(write(known_hosts, text)))
    assert [key.blob for key in found] == [OURS.asbytes(), OURS.asbytes(), OTHER.asbytes()]
    assert [key.marker for key in found] == ["", "@cert-authority", "@revoked"]


def test_a_file_is_read_again_where_it_has_changed(known_hosts: Path) -> None:
    there = destination(write(known_hosts, line("other").rstrip("\n")))
    for number in range(3):
        host = replace(there, host=f"gpu{number}", hash_known_hosts=number > 1)
        accept(host, OURS, strict=False)
        assert [known.where for known in lines_about(host)] == [f"{known_hosts}:{number + 2}"]
    with known_hosts.open("a") as file:
        file.write(line("gpu9"))
    assert lines_about(replace(there, host="gpu9"))


@pytest.mark.parametrize(
    "text",
    [
        line("gpu01"),
        line(hashed("gpu01")),
        line("gpu01", ANOTHER_KIND) + line("gpu01"),
        line("gpu01").rstrip("\n"),
    ],
    ids=["plain", "hashed", "two kinds", "no last newline"],
)
def test_paramiko_is_told_the_known_keys(known_hosts: Path, text: str) -> None:
    there = destination(write(known_hosts, text))
    connection = fabric_login.prepared(there, False, strict=False)
    assert connection.client.get_host_keys().check("gpu01", OURS)
    assert known_hosts.read_text() == text


def test_the_keys_of_the_global_file_count(known_hosts: Path, tmp_path: Path) -> None:
    system = write(tmp_path / "system" / "known_hosts", line("gpu01"))
    there = replace(destination(known_hosts), global_known_hosts=(system,))
    assert [known.where for known in lines_about(there)] == [f"{system}:1"]


# -- hosts that have changed ------------------------------------------------------------------


@pytest.mark.parametrize("known", [OTHER, ANOTHER_KIND], ids=["same kind", "another kind"])
def test_a_changed_host(known_hosts: Path, known: paramiko.PKey) -> None:
    """A key of another kind as well: the known kind was asked for, and the host had none."""
    error = has_changed(destination(write(known_hosts, "\n" + line("gpu01", known))), OURS)
    assert error.exit_code == EXIT_NODE
    assert "its host key has changed" in error.what
    assert fingerprint(OURS.asbytes()) in error.what
    assert f"{known_hosts}:2" in error.what
    assert f"{known.get_name()} {fingerprint(known.asbytes())}" in error.what
    assert f"ssh-keygen -R 'gpu01' -f '{known_hosts}'" in error.fix


def test_of_several_known_keys_the_one_of_its_kind_is_told(known_hosts: Path) -> None:
    path = write(known_hosts, line("gpu01", ANOTHER_KIND) + line("gpu01", OTHER))
    assert "known_hosts:2 says ecdsa" in has_changed(destination(path), OURS).what


@needs_openssh
def test_the_fix_for_a_changed_host_works(known_hosts: Path) -> None:
    text = line("[gpu01]:2222", OTHER) + line("gpu01", OTHER) + line(hashed("[gpu01]:2222"), OTHER)
    there = destination(write(known_hosts, text), port=2222)
    command = has_changed(there, OURS).fix.partition(": ")[2].partition(";")[0]
    subprocess.run(["sh", "-c", command], check=True, capture_output=True)
    assert not lines_about(there)
    accept(there, OURS, strict=False)
    assert known_hosts.read_text() == line("gpu01", OTHER) + line("[gpu01]:2222")


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
    accept(there, OURS, strict=False)
    assert known_hosts.read_text() == line(name)
    assert known_hosts.parent.stat().st_mode & 0o777 == 0o700
    assert [known.blob for known in lines_about(there)] == [OURS.asbytes()]
    if shutil.which("ssh-keygen"):
        assert of_openssh(known_hosts, name) == {1}


def test_a_file_without_a_last_newline_is_not_spoilt(known_hosts: Path) -> None:
    text = line("other").rstrip("\n")
    accept(destination(write(known_hosts, text)), OURS, strict=False)
    assert known_hosts.read_text() == f"{text}\n{line('gpu01')}"


def test_a_name_is_recorded_hashed_where_ssh_would(known_hosts: Path) -> None:
    there = replace(destination(known_hosts), hash_known_hosts=True)
    accept(there, OURS, strict=False)
    assert known_hosts.read_text().startswith("|1|")
    assert "gpu01" not in known_hosts.read_text()
    assert [known.blob for known in lines_about(there)] == [OURS.asbytes()]


@pytest.mark.parametrize("port", [22, 2222])
def test_an_alias_is_what_is_known(known_hosts: Path, port: int) -> None:
    """HostKeyAlias: many addresses and ports, one machine."""
    there = replace(destination(known_hosts, port=port), alias="alias")
    accept(there, OURS, strict=False)
    assert known_hosts.read_text() == line("alias")
    assert [known.blob for known in lines_about(there)] == [OURS.asbytes()]


@pytest.mark.parametrize("names", ["gpu01", hashed("gpu01")], ids=["plain", "hashed"])
def test_the_key_of_the_name_without_a_port_is_enough(known_hosts: Path, names: str) -> None:
    """So it is to ssh, which then records nothing; another key there says nothing."""
    there = destination(write(known_hosts, line(names)), port=2222)
    accept(there, OURS, strict=True)
    assert known_hosts.read_text() == line(names)
    accept(there, OTHER, strict=False)
    assert known_hosts.read_text() == line(names) + line("[gpu01]:2222", OTHER)


@pytest.mark.parametrize("marker", ["@revoked", "@cert-authority"])
def test_a_marked_key_of_the_name_without_a_port_is_not(known_hosts: Path, marker: str) -> None:
    there = destination(write(known_hosts, f"{marker} {line('gpu01')}"), port=2222)
    with pytest.raises(NodeError, match="is not known"):
        accept(there, OURS, strict=True)


@pytest.mark.parametrize("whose", ["option", "config"])
def test_strictly_an_unknown_host_is_refused(known_hosts: Path, whose: str) -> None:
    checking = "yes" if whose == "config" else "ask"
    there = replace(destination(known_hosts, port=2222), checking=checking)
    with pytest.raises(NodeError, match="is not known") as refused:
        accept(there, OURS, strict=whose == "option")
    assert fingerprint(OURS.asbytes()) in refused.value.what
    assert "ssh-keyscan -p 2222 gpu01" in refused.value.fix
    assert not known_hosts.exists()


def test_where_nothing_is_to_be_recorded_nothing_is(known_hosts: Path) -> None:
    """UserKnownHostsFile none, or /dev/null."""
    accept(replace(destination(known_hosts), user_known_hosts=()), OURS, strict=False)
    accept(destination(Path("/dev/null")), OURS, strict=False)
    assert not known_hosts.exists()


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NodeError, match="cannot be recorded") as refused:
        accept(destination(tmp_path / "file" / "known_hosts"), OURS, strict=False)
    assert "UserKnownHostsFile" in refused.value.fix


def test_many_hosts_are_recorded_at_once(known_hosts: Path) -> None:
    """A first launch on 50 nodes, each in its thread: no line is torn or lost."""
    nodes = [destination(known_hosts, f"gpu{n}") for n in range(50)]
    threads = [
        threading.Thread(target=accept, args=(node, OURS), kwargs={"strict": False})
        for node in nodes
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
