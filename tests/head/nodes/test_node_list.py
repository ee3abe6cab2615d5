# ruff: noqa: RUF001 (look-alikes of '-' and quotes are what some of these tests are about)
from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.common.errors import EXIT_USAGE, UsageError
from orchestrator.head.nodes.node_list import (
    MAX_NODES,
    Node,
    NodeListError,
    parse_nodes,
    read_nodes,
)

ROOT = Path(__file__).resolve().parents[3]


def problems(text: str) -> list[tuple[int, int, str, str]]:
    with pytest.raises(NodeListError) as caught:
        parse_nodes(text, "list")
    return [(p.line, p.column, p.what, p.fix) for p in caught.value.problems]


def hosts(text: str) -> list[str]:
    return [node.host for node in parse_nodes(text, "list")]


# What is accepted


@pytest.mark.parametrize(
    ("line", "node", "name"),
    [
        ("gpu01", Node("gpu01"), "gpu01"),
        ("My_Alias-2.lan", Node("My_Alias-2.lan"), "My_Alias-2.lan"),
        ("bob@gpu01", Node("gpu01", user="bob"), "bob@gpu01"),
        ("bob@corp@gpu01", Node("gpu01", user="bob@corp"), "bob@corp@gpu01"),
        ("10.0.0.1:2222", Node("10.0.0.1", port=2222), "10.0.0.1:2222"),
        ("bob@gpu01:65535", Node("gpu01", user="bob", port=65535), "bob@gpu01:65535"),
        ("gpu01:1", Node("gpu01", port=1), "gpu01:1"),
        ("[fe80::1]:2222", Node("fe80::1", port=2222), "[fe80::1]:2222"),
        ("bob@[fe80::1]:22", Node("fe80::1", user="bob", port=22), "bob@[fe80::1]:22"),
        ("[127.0.0.2]:2222", Node("127.0.0.2", port=2222), "127.0.0.2:2222"),
        ("bob@[gpu01]:22", Node("gpu01", user="bob", port=22), "bob@gpu01:22"),
        ("[::1]", Node("::1"), "::1"),
        ("2001:db8::1", Node("2001:db8::1"), "2001:db8::1"),
        ("fe80::1%eth0", Node("fe80::1%eth0"), "fe80::1%eth0"),
        ("bob@[fe80::1%eth0]:22", Node("fe80::1%eth0", "bob", 22), "bob@[fe80::1%eth0]:22"),
        ("[fe80::1:22]", Node("fe80::1:22"), "fe80::1:22"),
        ("2001:db8:0:0:0:0:1:22", Node("2001:db8:0:0:0:0:1:22"), "2001:db8:0:0:0:0:1:22"),
        ("a slots=8", Node("a", slots=8), "a"),
        ("a\tslots=8\t \tifname=eth0.100", Node("a", slots=8, ifname="eth0.100"), "a"),
        ("a ifname=fifteen-letters", Node("a", ifname="fifteen-letters"), "a"),
        ("a site=rack-7.b", Node("a", site="rack-7.b"), "a"),
        ("a python=python3.11", Node("a", python="python3.11"), "a"),
        ("a python=~/venv/bin/python", Node("a", python="~/venv/bin/python"), "a"),
        ("a workdir=/x=y#z", Node("a", workdir="/x=y#z"), "a"),
        ("a workdir='/my dir'", Node("a", workdir="/my dir"), "a"),
        ("a 'workdir=/my dir'", Node("a", workdir="/my dir"), "a"),
        ('a workdir="/bob\'s # dir"', Node("a", workdir="/bob's # dir"), "a"),
        (r'a workdir="/a \"b\" \n"', Node("a", workdir=r'/a "b" \n'), "a"),
        (r"a workdir=/my\ dir", Node("a", workdir="/my dir"), "a"),
        ("a workdir='/data/été – “x”'", Node("a", workdir="/data/été – “x”"), "a"),
    ],
)
def test_one_line(line: str, node: Node, name: str) -> None:
    (parsed,) = parse_nodes(line, "list")
    assert parsed == dataclasses.replace(node, line=1)
    assert parsed.name == name


@pytest.mark.parametrize(
    ("pattern", "expanded"),
    [
        ("10.0.0.[1-3,7]", ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.7"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[8-11]x", ["gpu8x", "gpu9x", "gpu10x", "gpu11x"]),
        ("gpu[5]", ["gpu5"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
    ],
)
def test_ranges_keep_order_and_zeros(pattern: str, expanded: list[str]) -> None:
    assert hosts(pattern) == expanded


def test_a_range_shares_user_port_and_options() -> None:
    nodes = parse_nodes("\nbob@gpu[01-02]:2222 slots=4 spare\nhead", "list")
    assert nodes[:2] == tuple(
        Node(f"gpu0{i}", "bob", 2222, slots=4, spare=True, line=2) for i in (1, 2)
    )
    assert nodes[2] == Node("head", line=3)


def test_the_largest_list() -> None:
    assert len(hosts(f"gpu[1-{MAX_NODES}]")) == MAX_NODES
    assert len(hosts("\n".join(f"gpu{i}" for i in range(MAX_NODES)))) == MAX_NODES


def test_comments_blank_lines_and_line_ends() -> None:
    text = "\ufeff# head\r\n\r\n  a # don't – care\r\tb\t#\n \t\n\t# c\n#d\ne"
    assert [(n.host, n.line) for n in parse_nodes(text, "list")] == [("a", 3), ("b", 4), ("e", 8)]


def test_not_duplicates() -> None:
    text = "a\na:22\nbob@a\nfe80::1%eth0\nfe80::1%eth1\n"
    assert len(hosts(text)) == 5


# What is refused: where, and what to write


@pytest.mark.parametrize(
    ("marked", "what", "fix"),
    [
        # options
        ("gpu01   ^slot=8", "unknown option 'slot'; did you mean 'slots'?", "slots=8"),
        ("gpu01 ^slot", "did you mean 'slots'?", "slots=8"),
        ("gpu01 ^spar", "did you mean 'spare'", "spare"),
        ("gpu01 ^gpu02", "unknown option 'gpu02'", "own line"),
        ("gpu01 slots=^0", "slots is a whole number", "slots="),
        ("gpu01 slots=^-1", "slots is a whole number", "slots="),
        ("gpu01 slots=^8.5", "slots is a whole number", "slots="),
        ("gpu01 slots=^٣", "slots is a whole number", "slots="),
        ("gpu01 slots=^8,spare", "slots is a whole number", "slots="),
        ("gpu01 python=^bin/python", "python is", "python=~/"),
        ("gpu01 python=^-c", "python is", "python=~/"),
        ("gpu01 python=^'python3 -u'", "python is", "python=~/"),
        ("gpu01 workdir=^data", "workdir is", "workdir=~/"),
        ("gpu01 workdir=^$HOME/x", "workdir is", "workdir=~/"),
        ("gpu01 workdir=^'/a\x1b[2J'", "workdir is", "workdir=~/"),
        ("gpu01 ifname=^sixteen-letters1", "15 characters", "ifname=eth1"),
        ("gpu01 ifname=^eth0:1", "interface name", "ifname=eth1"),
        ("gpu01 ifname=^..", "interface name", "ifname=eth1"),
        ('gpu01 site=^"rack 7"', "a name", "site=rack7"),
        ("gpu01 slots=4 ^slots=4", "'slots' is given twice", "once"),
        ("gpu01 spare ^spare", "'spare' is given twice", "once"),
        ("gpu01 ^spare=yes", "takes no value", "spare"),
        ("gpu01 ^slots=", "needs '=' and a value", "slots=8"),
        ("gpu01 ^slots= spare", "needs '=' and a value", "slots=8"),
        ('gpu01 workdir=^"/my dir', 'closes this "', "in pairs"),
        ("gpu01 workdir=/bob^'s", "closes this '", "in pairs"),
        ("gpu01 workdir=/dir^\\", "follows or closes this \\", "in pairs"),
        # habits from elsewhere
        ("10.0.0.1 ^8", "bare number", "slots=8"),
        ("host ^slots 4", "needs '='", "slots=4"),
        ("host ^slots = 4 spare", "needs '='", "slots=4"),
        ("host ^slots =4", "needs '='", "slots=4"),
        ("host ^slots= 4", "needs '='", "slots=4"),
        ("host^:slots=8", "needs a space", "host slots=8"),
        ("host^,slots=8", "not by commas", "host slots=8"),
        ("host^,slots=8,spare", "not by commas", "host slots=8 spare"),
        ("^slots=8 host", "begins with its host", "gpu01 slots=8"),
        ("host ^max_slots=8", "unknown option 'max_slots'", "slots=8"),
        ("host ^user=bob", "unknown option 'user'", "bob@"),
        ("host ^port=2222", "unknown option 'port'", ":2222"),
        ("^workdir=/x:y host", "begins with its host", "gpu01 workdir=/x:y"),
        ("^,gpu01", "more than one node", "one node per line"),
        ("a^,b,c", "more than one node", "one node per line"),
        ("a[1,2]^,b", "more than one node", "one node per line"),
        ("a^, b, c", "more than one node", "one node per line"),
        ("^ssh://bob@gpu01:22/home", "not a URL", "bob@gpu01:22"),
        ("gpu^{01..04}", "'{' cannot be", "gpu[01-04]"),
        # addresses, ports and names
        ("2001:db8:0:0:0:0:0:1^:2222", "needs brackets", "[2001:db8:0:0:0:0:0:1]:2222"),
        ("fe80::1%eth0^:22", "needs brackets", "[fe80::1%eth0]:22"),
        ("fe80::1^:2222", "needs brackets", "[fe80::1]:2222, or [fe80::1:2222]"),
        ("[^fe80::1::2]:22", "not an IPv6 address", "[fe80::1]:2222"),
        ("[^fe80::1%$(x)]:22", "not an IPv6 address", "[fe80::1]:2222"),
        ("^2001:db8::[1-3]", "ranges are of names", "a line of its own"),
        ("^[fe80::[1-3]%eth0]:22", "ranges are of names", "a line of its own"),
        ("^gpu01:22:23", "neither host:port nor an IPv6", "host:22"),
        ("^10.0.0.256", "not an IPv4 address", "0 to 255"),
        ("^10.0.0.[254-300]", "'10.0.0.256' is not an IPv4", "0 to 255"),
        ("^10.0.0.[01-03]", "'10.0.0.01' is not an IPv4", "leading zeros"),
        ("gpu01:^0", "'0' is not a port", "1 to 65535"),
        ("gpu01:^65536", "'65536' is not a port", "1 to 65535"),
        ("gpu01:^" + "9" * 5000, "is not a port", "1 to 65535"),
        ("[fe80::1]:^ssh", "'ssh' is not a port", "1 to 65535"),
        ("gpu01:^", "'' is not a port", "1 to 65535"),
        ("bob@^", "host is missing", "a name"),
        ("^@gpu01", "'' is not a user name", "user@host"),
        ("^b;b@gpu01", "not a user name", "user@host"),
        ("^-l@gpu01", "not a user name", "user@host"),
        ("^-oProxyCommand=x", "read it as an option", "host first"),
        ("bob@^-oProxyCommand=x", "read it as an option", "host first"),
        ("^.gpu01", "not a host name", "begins with a letter"),
        ("^" + "x" * 254, "not a host name", "begins with a letter"),
        ("gpu^$(reboot)", "'$' cannot be", "letters"),
        ("gpu^`id`", "'`' cannot be", "letters"),
        ("gpu01^;id", "';' cannot be", "letters"),
        ("gpu01^#x", "'#' cannot be", "space in front of '#'"),
        ("bob@gp^ü01", "'ü' cannot be", "xn--"),
        ("gpu^\u200b01", "'\\u200b' cannot be", "letters"),
        # ranges
        ("gpu[^7-1]", "backwards", "1-7"),
        ("gpu[^]", "a number is missing", "[1-3,7]"),
        ("gpu[1,^,2]", "a number is missing", "[1-3,7]"),
        ("gpu[^a-c]", "not a range of numbers", "[1-3,7]"),
        ("gpu[1-3,^4:6]", "'4:6' is not a range", "[1-3,7]"),
        ("gpu^[1-3", "nothing closes", "gpu[1-3,7]"),
        ("gpu^[1-3, 7]", "nothing closes", "without spaces"),
        ("gpu[1-2]x[3-4]^$", "'$' cannot be", "letters"),
        ("gpu1-3^]", "nothing opens", "gpu[1-3,7]"),
        ("gpu[^1-999999999999]", "more than 16384", "16384"),
        ("gpu[^1-16385]", "more than 16384", "16384"),
        ("gpu[1-16000,^17000-17600]", "more than 16384", "16384"),
        ("^gpu" + "[1-1000]" * 5000, "more than 16384", "16384"),
        # pasted from a web page or a chat
        ("gpu[01^–16]", "EN DASH (U+2013)", "a plain -"),
        ("gpu^—01", "EM DASH (U+2014)", "a plain -"),
        ("gpu01^\u00a0slots=8", "NO-BREAK SPACE (U+00A0)", "a plain space"),
        ("gpu01^\u00a0# – fine", "NO-BREAK SPACE (U+00A0)", "a plain space"),
        ("gpu01 workdir=^’/data'", "RIGHT SINGLE QUOTATION", "a plain ' or"),
    ],
)  # fmt: skip
def test_refused_at_its_place(marked: str, what: str, fix: str) -> None:
    """The mark ^ stands in front of what is wrong."""
    line = "  " + marked.replace("^", "")
    first, *others = problems(f"\n{line}")
    assert first[:2] == (2, marked.index("^") + 3)
    assert what in first[2]
    assert fix in first[3]
    assert not others, "one mistake, one problem"


def test_every_bad_line_is_named_with_its_first_mistake() -> None:
    text = "gpu$ slots=0 prot=1\nok\nok[1-2] slots=x workdir=rel\n“q” slots=2 slots=3\n"
    assert [(line, column) for line, column, _, _ in problems(text)] == [(1, 4), (3, 15), (4, 1)]


@pytest.mark.parametrize(
    ("first", "second", "at"),
    [
        ("gpu01", "GPU01", 1),
        ("bob@gpu01:22", "bob@gpu01:22 slots=2", 5),
        ("::1", "0:0:0:0:0:0:0:1", 1),
        ("[fe80::A%eth0]:22", "[fe80:0::a%eth0]:22", 2),
        ("gpu[01-03]", "gpu[03-05]", 1),
    ],
)
def test_duplicates_name_both_lines(first: str, second: str, at: int) -> None:
    ((line, column, what, _),) = problems(f"{first}\n#\n{second}")
    assert (line, column) == (3, at)
    assert "already on line 1" in what


def test_a_range_that_repeats_itself() -> None:
    ((_, column, what, _),) = problems("  gpu[1-3,2]")
    assert column == 3
    assert "'gpu2' is already on line 1" in what


def test_too_many_nodes_is_one_problem_where_the_limit_is_passed() -> None:
    text = "\n".join(f"gpu{i}" for i in range(MAX_NODES + 500)) + "\ngpu0\na slot=1\n"
    over, dup, option = problems(text)
    assert over[0] == MAX_NODES + 1
    assert "more than 16384 nodes" in over[2]
    assert "already on line 1" in dup[2]
    assert "slot" in option[2]


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("", (1, 1), "names no node"),
        ("# only\n\n  # comments", (3, 1), "names no node"),
        ("# x\nspare1 spare\nb slots=1 spare", (2, 8), "every node is a spare"),
        ("a sp'are'", (1, 1), "every node is a spare"),
    ],
)
def test_a_list_without_a_master(text: str, place: tuple[int, int], what: str) -> None:
    ((line, column, told, _),) = problems(text)
    assert (line, column) == place
    assert what in told


def test_what_the_user_sees() -> None:
    with pytest.raises(NodeListError) as caught:
        parse_nodes("# list\na\ngpu01\tslot=8\ngpu[7-1]\n", "node_ip_list.txt")
    assert str(caught.value) == (
        "node_ip_list.txt has 2 problems:\n"
        "  line 3, column 7: unknown option 'slot'; did you mean 'slots'?\n"
        "      gpu01 slot=8\n"
        "            ^\n"
        "    write: slots=8\n"
        "  line 4, column 5: this range runs backwards\n"
        "      gpu[7-1]\n"
        "          ^\n"
        "    write: 1-7"
    )
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(("count", "end"), [(20, "'-' only"), (21, "\n  and 1 more")])
def test_twenty_are_shown_and_the_rest_counted(count: int, end: str) -> None:
    with pytest.raises(NodeListError) as caught:
        parse_nodes("a$\n" * count, "list")
    assert len(caught.value.problems) == count
    assert str(caught.value).count("write:") == 20
    assert str(caught.value).endswith(end)


def test_a_long_line_is_shown_around_its_column() -> None:
    with pytest.raises(NodeListError) as caught:
        parse_nodes(f"a workdir=/{'x' * 5000} slot=1 # {'y' * 5000}", "list")
    title, _, excerpt, mark, *_ = str(caught.value).splitlines()
    assert title == "list has 1 problem:"
    assert excerpt[mark.index("^") :].startswith("slot=1")
    assert len(excerpt) < 130


def test_control_characters_do_not_reach_the_terminal() -> None:
    with pytest.raises(NodeListError) as caught:
        parse_nodes("ssh://a\x1b[2J x\x9b=1\ngpu\udc80", "list")
    assert all(c.isprintable() or c == "\n" for c in str(caught.value))


@pytest.mark.parametrize("line", ["gpu01 slot=8 prot=1", "gpu01", "[[", "a\u00a0b"])
def test_ten_thousand_bad_lines_answer_at_once(line: str) -> None:
    start = time.process_time()
    found = problems(f"{line}\n" * 10_000)
    assert len(found) >= 9_999
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "text",
    ["[" * 400_000 + "]", "[" + ":" * 400_000 + "]x", 'a "' + '\\"' * 200_000, "a" + "@" * 400_000],
)
def test_no_line_takes_quadratic_time(text: str) -> None:
    start = time.process_time()
    problems(text)
    assert time.process_time() - start < 10


# The file


def test_the_example_in_the_repository() -> None:
    nodes = read_nodes(ROOT / "node_ip_list.txt")
    assert [(node.name, node.slots) for node in nodes] == [
        ("127.0.0.2:2222", 2),
        ("127.0.0.3:2222", 2),
    ]


def test_a_file_with_bom_crlf_and_utf8(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_bytes("\ufeffa\r\n# é\r\nb workdir='/é'".encode())
    assert read_nodes(path) == (Node("a", line=1), Node("b", workdir="/é", line=3))


@pytest.mark.parametrize(
    ("data", "line", "column"),
    [
        (b"gpu01\r\n# caf\xe9\n", 2, 6),
        (b"\xef\xbb\xbfab\xff", 1, 3),
        ("é\n".encode() + b"# \xff", 2, 3),
        (b"gpu01\ngpu\x0002", 2, 4),
        ("gpu01\n".encode("utf-16"), 1, 1),
    ],
)
def test_a_file_that_is_not_text(tmp_path: Path, data: bytes, line: int, column: int) -> None:
    path = tmp_path / "list"
    path.write_bytes(data)
    with pytest.raises(NodeListError, match="not text in UTF-8") as caught:
        read_nodes(path)
    assert [(p.line, p.column) for p in caught.value.problems] == [(line, column)]


def test_a_missing_file_says_what_to_create(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no node list") as caught:
        read_nodes(tmp_path / "node_ip_list.txt")
    example = caught.value.fix.splitlines()[1:]
    assert len(hosts("\n".join(example))) == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("directory", "is a directory"),
        ("fifo", "not a regular file"),
        ("link to fifo", "not a regular file"),
        ("device", "not a regular file"),
        ("socket", "not a regular file"),
        ("link to itself", "cannot read"),
        ("below a file", "cannot read"),
        ("impossible name", "cannot read"),
        ("huge", "larger than 1 MiB"),
    ],
)
def test_what_is_not_a_readable_file(tmp_path: Path, kind: str, reason: str) -> None:
    path = tmp_path / "list"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link to fifo":
        os.mkfifo(tmp_path / "fifo")
        path.symlink_to("fifo")
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "link to itself":
        path.symlink_to("list")
    elif kind == "below a file":
        path.write_text("a\n")
        path = path / "list"
    elif kind == "impossible name":
        path = Path("a\0b")
    else:
        path.write_text("# x\n" * 300_000)
    with pytest.raises(UsageError, match=reason) as caught:
        read_nodes(path)
    assert caught.value.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_text("a\n")
    path.chmod(0)
    with pytest.raises(UsageError, match="Permission denied"):
        read_nodes(path)


def test_a_piped_list_can_be_read() -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from orchestrator.head.nodes.node_list import read_nodes;"
        "print(*(n.host for n in read_nodes(Path('/dev/stdin'))));"
        "print([m for m in ('torch', 'paramiko') if m in sys.modules])"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, input="a\nb\n", capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "a b\n[]\n"


# Whatever is written

NOISY = st.text(alphabet="gpu019.:@[]-,%#\"'\\ =\t\n\r$–’”\u00a0\ufeffé/~slotspare", max_size=60)
NAME = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,8}", fullmatch=True)
PATH = st.builds(
    lambda root, rest: root + "".join(c for c in rest if c.isprintable()),
    st.sampled_from(["/", "~", "~/"]),
    st.text(max_size=12),
)
NODES = st.builds(
    Node,
    host=NAME | st.ip_addresses().map(str),
    user=st.none() | NAME,
    port=st.none() | st.integers(1, 65535),
    slots=st.none() | st.integers(1, 9999),
    python=st.none() | PATH,
    workdir=st.none() | PATH,
    ifname=st.none() | st.from_regex(r"[a-z][a-z0-9._-]{0,14}", fullmatch=True),
    site=st.none() | NAME,
    spare=st.booleans(),
)


@given(st.text() | NOISY)
@example("a '")
@example("'")
@example("\\")
@example("a slots ==")
@example("[")
@example("::")
@example("a sp\\are")
def test_any_text_is_nodes_or_problems_in_the_text(text: str) -> None:
    try:
        nodes = parse_nodes(text, "list")
    except NodeListError as error:
        assert error.problems
        lines = re.split("\r\n|\r|\n", text.removeprefix("\ufeff"))
        for problem in error.problems:
            assert 1 <= problem.column <= len(lines[problem.line - 1]) + 1
            assert problem.what
            assert problem.fix
    else:
        assert any(not node.spare for node in nodes)


def rendered(node: Node) -> str:
    """The line that means this node."""
    words = [f"{node.user}@" if node.user else ""]
    words[0] += f"[{node.host}]" if ":" in node.host else node.host
    words[0] += f":{node.port}" if node.port else ""
    for option in ("slots", "python", "workdir", "ifname", "site"):
        if (value := getattr(node, option)) is not None:
            words.append(f"{option}={shlex.quote(str(value))}")
    return " ".join(words + ["spare"] * node.spare)


def same(node: Node) -> object:
    host = ipaddress.ip_address(node.host) if node.host[0] in "0123456789:" else node.host.lower()
    return node.user, host, node.port


@given(st.lists(NODES, min_size=1, max_size=6, unique_by=same))
def test_what_is_rendered_is_read_back(nodes: list[Node]) -> None:
    nodes[0] = dataclasses.replace(nodes[0], spare=False)
    text = "\n".join(rendered(node) + "  # end" for node in nodes)
    expected = tuple(dataclasses.replace(node, line=i) for i, node in enumerate(nodes, 1))
    assert parse_nodes(text, "list") == expected


@given(st.lists(st.sampled_from(["a0", "b@a1:22", "# – x", ""]), unique=True), NODES, st.data())
def test_a_bad_option_is_found_wherever_it_stands(
    before: list[str], node: Node, data: st.DataObject
) -> None:
    words = rendered(dataclasses.replace(node, host="bad", workdir=None, python=None)).split()
    at = data.draw(st.integers(1, len(words)))
    gap = data.draw(st.sampled_from([" ", "\t", "   "]))
    head = gap + gap.join(words[:at]) + gap
    text = "\n".join([*before, head + gap.join(["nonsense=1", *words[at:]])])
    ((line, column, what, _),) = problems(text)
    assert (line, column) == (len(before) + 1, len(head) + 1)
    assert "unknown option 'nonsense'" in what
