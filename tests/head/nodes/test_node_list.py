import dataclasses
from pathlib import Path

import pytest

from orchestrator.common.errors import UsageError
from orchestrator.head.nodes.node_list import (
    MAX_NODES,
    Node,
    NodeListError,
    parse_nodes,
    read_nodes,
)


def problems(text: str) -> list[tuple[int, str]]:
    with pytest.raises(NodeListError) as caught:
        parse_nodes(text, "list")
    return list(caught.value.problems)


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
        (r'a workdir="/a \"b\" \n"', Node("a", workdir=r'/a "b" \n'), "a"),
        (r"a workdir=/my\ dir", Node("a", workdir="/my dir"), "a"),
        ("a workdir='/data/été'", Node("a", workdir="/data/été"), "a"),
    ],
)
def test_line_is_parsed(line: str, node: Node, name: str) -> None:
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


def test_range_shares_user_port_and_options() -> None:
    nodes = parse_nodes("\nbob@gpu[01-02]:2222 slots=4 spare\nhead", "list")
    assert nodes[:2] == tuple(
        Node(f"gpu0{i}", "bob", 2222, slots=4, spare=True, line=2) for i in (1, 2)
    )
    assert nodes[2] == Node("head", line=3)


def test_largest_list_is_accepted() -> None:
    assert len(hosts(f"gpu[1-{MAX_NODES}]")) == MAX_NODES
    assert len(hosts("\n".join(f"gpu{i}" for i in range(MAX_NODES)))) == MAX_NODES


def test_comments_blank_lines_and_line_ends_are_skipped() -> None:
    text = "# head\r\n\r\n  a # don't care\r\tb\t#\n \t\n\t# c\n#d\ne"
    assert [(n.host, n.line) for n in parse_nodes(text, "list")] == [("a", 3), ("b", 4), ("e", 8)]


def test_similar_lines_are_not_duplicates() -> None:
    text = "a\na:22\nbob@a\nfe80::1%eth0\nfe80::1%eth1\n"
    assert len(hosts(text)) == 5


# What is refused


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("gpu01 slot=8", "unknown option 'slot=8'; did you mean 'slots'?"),
        ("gpu01 gpu02", "another node goes on its own line"),
        ("gpu01 slots=0", "slots is a whole number"),
        ("gpu01 slots=\u0663", "slots is a whole number"),
        ("gpu01 slots=", "slots is a whole number"),
        ("gpu01 slots 4", "slots is a whole number"),
        ("gpu01 python='python3 -u'", "python is"),
        ("gpu01 workdir=$HOME/x", "workdir is"),
        ("gpu01 workdir='/a\x1b[2J'", "workdir is"),
        ("gpu01 ifname=sixteen-letters1", "15 characters"),
        ('gpu01 site="rack 7"', "a name"),
        ("gpu01 slots=4 slots=4", "'slots' is given twice"),
        ("gpu01 spare=yes", "spare is nothing"),
        ('gpu01 workdir="/my dir', "No closing quotation"),
        ("slots=8", "'slots=8' is not a host name"),
        ("a,b,c", "'a,b,c' is not a host name"),
        ("ssh://bob@gpu01:22/home", "'ssh://bob' is not a user name"),
        ("fe80::1%eth0:22", "not a host with a port"),
        ("[fe80::1::2]:22", "not an IPv6 address"),
        ("[fe80::1%$(x)]:22", "is not a host with a port"),
        ("gpu01:22:23", "is not a host with a port"),
        ("10.0.0.256", "10.0.0.256"),
        ("10.0.0.[254-300]", "10.0.0.256"),
        ("10.0.0.[01-03]", "Leading zeros"),
        ("gpu01:0", "is not a host with a port"),
        ("gpu01:" + "9" * 5000, "is not a host with a port"),
        ("gpu01:", "has no port"),
        ("bob@", "'' is not a host name"),
        ("@gpu01", "'' is not a user name"),
        ("b;b@gpu01", "not a user name"),
        ("-oProxyCommand=x", "not a host name"),
        ("bob@-oProxyCommand=x", "not a host name"),
        ("x" * 254, "not a host name"),
        ("gpu$(reboot)", "not a host name"),
        ("gpu01;id", "not a host name"),
        ("b\u00fcro", "not a host name"),
        ("gpu[01\u201316]", "not a range"),
        ("gpu[7-1]", "backwards"),
        ("gpu[1-3", "nothing closes"),
        ("gpu[1-999999999999]", "more than 16384"),
        ("gpu[1-3,2]", "gpu2 is already on line 1"),
    ],
)
def test_invalid_line_is_refused(line: str, what: str) -> None:
    ((number, said),) = problems(line)
    assert number == 1 and what in said


def test_every_bad_line_is_named_with_first_mistake() -> None:
    assert [line for line, _ in problems("gpu$ slots=0 prot=1\nok\nok2 slots=x workdir=rel\n")] == [
        1,
        3,
    ]


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        *(
            (f"{first}\n#\n{second}", 3, "already on line 1")
            for first, second in [
                ("gpu01", "GPU01"),
                ("bob@gpu01:22", "bob@gpu01:22 slots=2"),
                ("::1", "0:0:0:0:0:0:0:1"),
                ("[fe80::A%eth0]:22", "[fe80:0::a%eth0]:22"),
                ("gpu[01-03]", "gpu[03-05]"),
            ]
        ),
        ("# only\n\n  # comments", 1, "names no node"),
        ("# x\nspare1 spare\nb slots=1 spare", 2, "every node is a spare"),
    ],
)
def test_list_with_duplicate_or_without_master_is_refused(text: str, place: int, what: str) -> None:
    ((line, told),) = problems(text)
    assert line == place and what in told


def test_error_lists_problems_up_to_limit() -> None:
    with pytest.raises(NodeListError) as caught:
        parse_nodes("# list\na\ngpu01\tslot=8\ngpu[7-1]\n" + "a$\n" * 30, "node_ip_list.txt")
    lines = str(caught.value).splitlines()
    assert lines[:3] == [
        "node_ip_list.txt has 32 problems:",
        "  line 3: unknown option 'slot=8'; did you mean 'slots'?",
        "  line 4: this range runs backwards; write 1-7",
    ]
    assert len(lines) == 22 and lines[-1] == "  and 12 more"


def test_error_has_no_control_characters() -> None:
    with pytest.raises(NodeListError) as caught:
        parse_nodes("a\x1b[2J x\x9b=1\nb\x1b=1\ngpu\udc80", "list")
    assert all(c.isprintable() or c == "\n" for c in str(caught.value))


# The file


def test_bom_crlf_and_utf8_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_bytes("\ufeffa\r\n# \u00e9\r\nb workdir='/\u00e9'".encode())
    assert read_nodes(path) == (Node("a", line=1), Node("b", workdir="/\u00e9", line=3))


def test_missing_file_shows_example(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no node list") as caught:
        read_nodes(tmp_path / "node_ip_list.txt")
    example = caught.value.fix.splitlines()[1:]
    assert len(hosts("\n".join(example))) == 2


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"gpu\xff")
    (tmp_path / "huge").write_bytes(b"#" * ((1 << 20) + 1))
    for name, reason in (("", "directory"), ("binary", "UTF-8"), ("huge", "larger than 1 MiB")):
        with pytest.raises(UsageError, match=reason):
            read_nodes(tmp_path / name)
