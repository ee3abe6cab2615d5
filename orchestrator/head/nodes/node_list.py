"""node_ip_list.txt -> nodes: every node in rank order, or one error with every line that is wrong.

A line is `[user@]host[:port] [option ...]  # comment`. A host reaches the command lines of ssh and
of the shell, so its letters are strict; habits from other tools get an answer of their own.
"""

from __future__ import annotations

import codecs
import functools
import ipaddress
import re
import stat
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.common import hosts as host_ranges
from orchestrator.common.errors import OrchestratorError, UsageError, nearest, nearest_file
from orchestrator.common.hosts import BadRange
from orchestrator.common.text import plural
from orchestrator.head.nodes.environment import ACTIVATION_FORMS, ACTIVATIONS, chosen

MAX_NODES = 16384  # a range with a digit too many makes more; all are asked at once
MAX_BYTES = 1 << 20
MAX_SHOWN = 20

# The form of a value, that in words, and an example. `spare` takes no value.
OPTIONS = {
    "slots": (r"0*[1-9][0-9]{0,3}", "a whole number from 1 to 9999", "8"),
    "python": (r"[/~].*|\w[\w.+-]*", "/absolute, ~/... or a bare command", "~/venv/bin/python"),
    "workdir": (r"[/~].*", "/absolute or ~/...", "~/project"),
    "activate": (ACTIVATIONS, ACTIVATION_FORMS, "venv:~/venv"),
    "wrap": (r".*\S.*", "a command in front of ours", '"docker exec -i NAME"'),
    "ifname": (r"\w[\w.-]{0,14}", "an interface name, 15 characters at most", "eth1"),
    "site": (r"\w[\w.-]{0,62}", "a name of letters, digits, . _ and -", "rack7"),
    "spare": ("", "", ""),
}
# The names that other launchers use, and what belongs to the host here.
FOREIGN = {
    **dict.fromkeys(("max_slots", "max-slots"), "slots={}, once: it is number and limit"),
    **dict.fromkeys(("gpus", "ngpus", "nproc", "nproc_per_node"), "slots={}"),
    **dict.fromkeys(("iface", "interface"), "ifname={}"),
    **dict.fromkeys(("rack", "switch", "zone"), "site={}"),
    "user": "{}@ in front of the host",
    "port": ":{} after the host",
}
# Chats, web pages and word processors put characters of these kinds in place of what was typed.
PASTED = {"Pd": "a plain -", "Zs": "a plain space"}
PASTED |= dict.fromkeys(("Pi", "Pf"), "a plain ' or \"")

_LINE_END = re.compile("\r\n|\r|\n")
_QUOTED = r"""\\.|"(?:\\.|[^"\\])*"|'[^']*'"""
_WORD = re.compile(rf"""(?P<comment>#.*)|(?P<word>(?:{_QUOTED}|[^ \t"'\\]+)+)|(?P<open>["'\\].*)""")
_UNQUOTE = re.compile(r"""\\(.)|"((?:\\.|[^"\\])*)"|'([^']*)'""")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_V6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")


@dataclass(frozen=True)
class Node:
    """One machine, as its line says it. The first that is not a spare is the master."""

    host: str  # as written: name, ssh_config alias, IPv4 or IPv6 (no brackets)
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    python: str | None = None
    workdir: str | None = None
    ifname: str | None = None
    activate: str | None = None
    wrap: str | None = None
    site: str | None = None  # nodes of one are near each other
    spare: bool = False
    line: int = 0  # its line in the file

    @property
    def name(self) -> str:
        """Show the node as host, user@host, host:port or [v6]:port."""
        user = f"{self.user}@" if self.user else ""
        if self.port is None:
            return f"{user}{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{user}{host}:{self.port}"

    @property
    def place(self) -> str:
        """Show the node, and how it is entered where that is a container of it."""
        wrap = chosen(self.wrap)
        return f"{self.name} ({wrap})" if wrap else self.name


@dataclass(frozen=True)
class Problem:
    """One mistake, its place (line and column from 1), and what to write instead."""

    line: int
    column: int
    what: str
    fix: str


class NodeListError(UsageError):
    """Every problem of one node list, shown with the lines they are on."""

    def __init__(self, source: str, problems: Iterable[Problem], lines: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        shown = [f"{source} has {plural(len(self.problems), 'problem')}:"]
        for problem in self.problems[:MAX_SHOWN]:
            where = f"line {problem.line}, column {problem.column}"
            shown.append(f"  {where}: {_printable(problem.what)}")
            shown += _excerpt(lines[problem.line - 1] if lines else "", problem.column)
            shown.append(f"    write: {_printable(problem.fix)}")
        if len(self.problems) > MAX_SHOWN:
            shown.append(f"  and {len(self.problems) - MAX_SHOWN} more")
        super().__init__("\n".join(shown))


class Mistake(Exception):
    """A mistake in a line, and the position from which on the line is not read."""

    def __init__(self, column: int, what: str, fix: str) -> None:
        super().__init__(what)
        self.column, self.what, self.fix = column, what, fix


@dataclass(frozen=True)
class Word:
    """A part of a line, and the column that it begins in, from 1."""

    text: str
    column: int


def _printable(text: str) -> str:
    """Return at most a screen line, without characters that a terminal would act on."""
    return "".join(c if c.isprintable() else " " if c == "\t" else "?" for c in text[:120])


def _excerpt(line: str, column: int) -> list[str]:
    """Return the line with a mark under the column, cut around it if it is long."""
    start = max(0, column - 60)
    shown = _printable(line[start:]).rstrip()
    return [f"      {shown}", f"      {' ' * (column - 1 - start)}^"] if shown else []


def _cut(text: str) -> str:
    """Return a text in quotes, short enough for one line of an error."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


# -- the file ---------------------------------------------------------------------------------


def read_nodes(path: Path) -> tuple[Node, ...]:
    """Read the nodes of a file; NodeListError and UsageError say why that cannot be."""
    data = _read_bytes(path).removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode()
        bad = data.find(0)  # NUL decodes, but only UTF-16 and binaries hold it
    except UnicodeDecodeError as error:
        bad = error.start
    if bad >= 0:
        before = _LINE_END.split(data[:bad].decode())
        what, fix = "this is not text in UTF-8", "a plain text file, saved as UTF-8"
        raise NodeListError(str(path), [Problem(len(before), len(before[-1]) + 1, what, fix)])
    return parse_nodes(text, str(path))


def _read_bytes(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        # Reading a FIFO or a terminal would hang; <(...) and a piped /dev/stdin are FIFOs in /dev.
        pipe = stat.S_ISFIFO(mode) and path.parts[:2] == ("/", "dev")
        if not (stat.S_ISREG(mode) or pipe):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            raise UsageError(f"{path} is {kind}", "name a text file that lists the nodes")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        fix = (
            "create it with one node per line, the master first:\n    10.0.0.1\n    bob@gpu02:2222"
        )
        near = nearest_file(path, (".txt", ".list", "hosts"))
        raise UsageError(f"there is no node list {path}{near}", fix) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        fix = "name a text file that you may read"
        raise UsageError(f"cannot read the node list {path}: {reason}", fix) from None
    if len(data) > MAX_BYTES:
        fix = "name a text file with one node per line"
        raise UsageError(f"{path} is larger than {MAX_BYTES >> 20} MiB: not a node list", fix)
    return data


def parse_nodes(text: str, source: str) -> tuple[Node, ...]:
    """Return the nodes of a list in file order; `source` is its name in errors."""
    lines = _LINE_END.split(text.removeprefix("\ufeff"))
    nodes: dict[object, Node] = {}
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        try:
            _add_line(nodes, line, number)
        except Mistake as error:
            problems.append(Problem(number, error.column, error.what, error.fix))
    if not problems:
        problems = _without_master(tuple(nodes.values()), lines)
    if problems:
        raise NodeListError(source, problems, lines)
    return tuple(nodes.values())


def _add_line(nodes: dict[object, Node], line: str, number: int) -> None:
    """Add a line's nodes to the list, each machine once, whatever its case or IPv6 spelling."""
    fields = _words(line)
    if not fields:
        return
    user, host, port = _split_host(fields[0])
    try:
        names = iter([host.text]) if _v6(host.text) else host_ranges.expand(host.text, MAX_NODES)
    except BadRange as error:
        raise Mistake(host.column + error.position, error.what, error.fix) from None
    shared = replace(_options(fields[1:]), user=user, port=port, line=number)
    for name in names:
        node = replace(shared, host=name)
        key = (user, _canonical(name, host.column), port)
        if key in nodes:
            what = f"{_cut(node.name)} is already on line {nodes[key].line}"
            raise Mistake(host.column, what, "each node once; slots=2 starts two processes on it")
        if len(nodes) > MAX_NODES:
            return  # reported where the limit was passed
        nodes[key] = node
        if len(nodes) > MAX_NODES:
            what, fix = f"this makes more than {MAX_NODES} nodes", f"{MAX_NODES} nodes at most"
            raise Mistake(host.column, what, fix)


def _without_master(nodes: tuple[Node, ...], lines: list[str]) -> list[Problem]:
    if not nodes:
        fix = "one node per line, for example 10.0.0.1 slots=8"
        return [Problem(len(lines), 1, "the list names no node", fix)]
    if not all(node.spare for node in nodes):
        return []
    first = nodes[0].line
    word = re.search(r"[ \t]\W*spare", lines[first - 1])
    fix = "the master without 'spare'"
    return [Problem(first, word.end() - 4 if word else 1, "every node is a spare", fix)]


# -- words and options ------------------------------------------------------------------------


def _words(line: str) -> list[Word]:
    """Return the words of a line, still quoted, without the comment."""
    if not line.isascii():
        _refuse_pasted(line)
    fields: list[Word] = []
    for match in _WORD.finditer(line):
        column = match.start() + 1
        if match["word"]:
            fields.append(Word(match["word"], column))
        elif match["open"]:
            what = f"nothing follows or closes this {line[column - 1]}"
            raise Mistake(column, what, 'quotes in pairs, as in workdir="/data/bob\'s"')
    return fields


def _refuse_pasted(line: str) -> None:
    """Point at a dash, space or quote that looks like the plain one; quotes and comments may."""
    bare = re.sub(rf"{_QUOTED}|(?<!\S)#.*", lambda match: " " * len(match[0]), line)
    for column, letter in enumerate(bare, 1):
        if not letter.isascii() and (fix := PASTED.get(unicodedata.category(letter))):
            what = f"{unicodedata.name(letter)} (U+{ord(letter):04X}) was pasted in"
            raise Mistake(column, what, fix)


def _options(fields: Sequence[Word]) -> Node:
    """Return a node with these options, and nothing else."""
    values: dict[str, str] = {}
    for number, field in enumerate(fields):
        key, value = _option(field, fields[number + 1 :])
        if key in values:
            raise Mistake(field.column, f"{key!r} is given twice", f"{key!r} once")
        values[key] = value
    return Node(
        host="",
        slots=int(values["slots"]) if "slots" in values else None,
        python=values.get("python"),
        workdir=values.get("workdir"),
        ifname=values.get("ifname"),
        activate=values.get("activate"),
        wrap=values.get("wrap"),
        site=values.get("site"),
        spare="spare" in values,
    )


def _option(word: Word, after: Sequence[Word]) -> tuple[str, str]:
    """Return one option, checked; in `slots = 8` its value is in the words after it."""
    key, equals, value = _UNQUOTE.sub(_unquoted, word.text).partition("=")
    if key not in OPTIONS:
        raise _unknown(key, value, word.column)
    if key == "spare":
        if equals:
            raise Mistake(word.column, "'spare' takes no value", "spare")
        return key, ""
    pattern, wanted, example = OPTIONS[key]
    if not value:
        torn = next((other.text.lstrip("=") for other in after if other.text != "="), "")
        if torn and torn.partition("=")[0] not in OPTIONS:
            example = torn
        raise Mistake(word.column, f"{key!r} needs '=' and a value, no spaces", f"{key}={example}")
    if not re.fullmatch(pattern, value, re.ASCII) or not value.isprintable():
        column = word.column + word.text.index("=") + 1
        raise Mistake(column, f"{key} is {wanted}, not {_cut(value)}", f"{key}={example}")
    return key, value


def _unquoted(match: re.Match[str]) -> str:
    escaped, double, single = match.groups()
    if double is not None:
        return re.sub(r'\\([\\"$`])', r"\1", double)
    return single if escaped is None else escaped


@functools.lru_cache  # the same slip on 10,000 lines: 0.5 s without it
def _hint(key: str) -> str:
    return nearest(key, OPTIONS)


def _unknown(key: str, value: str, column: int) -> Mistake:
    if key.isdigit() and not value:
        return Mistake(column, f"a bare number: {_cut(key)}", f"slots={key}")
    what = f"unknown option {_cut(key)}"
    if key in FOREIGN:
        return Mistake(column, what, FOREIGN[key].format(value or "..."))
    hint = _hint(key[:20])
    meant = next((name for name in OPTIONS if f"{name!r}" in hint), "")
    if not meant:
        fix = f"{', '.join(OPTIONS)}; another node goes on its own line"
    else:
        fix = meant if meant == "spare" else f"{meant}={value or OPTIONS[meant][2]}"
    return Mistake(column, what + hint, fix)


# -- the host ---------------------------------------------------------------------------------


def _split_host(word: Word) -> tuple[str | None, Word, int | None]:
    """Return user, host and port; the host keeps its ranges and loses the brackets of IPv6."""
    user, at, rest = word.text.rpartition("@")
    host, port = Word(rest, word.column + len(user + at)), None
    if rest.startswith("-"):
        what = "a host cannot begin with '-': ssh would read it as an option"
        raise Mistake(host.column, what, "the host first, options of the node after it")
    _refuse_foreign(word)
    if at and not _USER.fullmatch(user):
        raise Mistake(word.column, f"{_cut(user)} is not a user name", "user@host")
    boxed = re.fullmatch(r"\[([^]]*)\](?::(.*))?", rest)
    before, colon, last = rest.rpartition(":")
    if boxed and ":" in boxed[1]:
        host, port = Word(boxed[1], host.column + 1), boxed[2]
        if not _v6(host.text):
            what = f"{_cut(host.text)} is not an IPv6 address"
            raise Mistake(host.column, what, "[fe80::1]:2222")
    elif boxed and boxed[2] and re.search("[A-Za-z.]", boxed[1]):  # as known_hosts writes a port
        host, port = Word(boxed[1], host.column + 1), boxed[2]
    elif _outside_brackets(rest).count(":") > 1:
        _check_unboxed(host)
    elif colon and "]" not in last:
        host, port = Word(before, host.column), last
    if not _v6(host.text):
        _check_letters(host)
    if port is None:
        return user or None, host, None
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        column = word.column + len(word.text) - len(port)
        what = f"{_cut(port)} is not a port"
        raise Mistake(column, what, "host:22, with a port from 1 to 65535")
    return user or None, host, int(port)


def _refuse_foreign(word: Word) -> None:
    """Refuse what other tools write in the place of a host, with an answer of its own."""
    text, column = word.text, word.column
    if "://" in text:
        host = text.partition("://")[2].partition("/")[0]
        raise Mistake(column, "a node is a host, not a URL", host or "user@host:22")
    if "=" in text:
        host, colon, option = text.partition(":")
        if colon and "=" not in host:
            what, fix = "an option needs a space before it", f"{host} {option}"
            raise Mistake(column + len(host), what, fix)
        host = text.partition(",")[0]
        if host not in ("", text) and "=" not in host:
            what, fix = "options are separated by spaces, not by commas", text.replace(",", " ")
            raise Mistake(column + len(host), what, fix)
        raise Mistake(column, "a line begins with its host", f"gpu01 {text}")
    comma = _outside_brackets(text).find(",")
    if comma >= 0 and text.rfind("[") <= text.rfind("]"):
        what, fix = "more than one node on a line", "one node per line, no commas"
        raise Mistake(column + comma, what, fix)


def _outside_brackets(text: str) -> str:
    """Replace each [...] by letters, so that the columns stay."""
    return re.sub(r"\[[^][]*\]", lambda match: "x" * len(match[0]), text)


def _check_letters(host: Word) -> None:
    odd = re.search(r"[^A-Za-z0-9_.[\]-]", _outside_brackets(host.text))
    if not odd or "[" in host.text[: odd.start()].rpartition("]")[2]:
        return  # a bracket that nothing closes is the mistake
    fix = "letters a-z, digits, '.', '_' and '-' only"
    if odd[0] == "#":
        fix = "a space in front of '#' to begin a comment"
    elif odd[0] == "{":
        fix = "a range in square brackets: gpu[01-04]"
    elif odd[0].isalpha():
        fix = "the ASCII form of the name (xn--...) or an alias from ssh_config"
    raise Mistake(host.column + odd.start(), f"{odd[0]!r} cannot be in a host name", fix)


def _check_unboxed(host: Word) -> None:
    """Check two or more ':' without brackets: an IPv6 address, unless its end may be a port."""
    address, _, port = host.text.rpartition(":")
    whole = _v6(host.text)
    if _v6(address) and port.isdigit() and (not whole or port in ("22", "2222")):
        what = "an IPv6 address with a port needs brackets"
        also = f", or [{host.text}] if {port} belongs to the address" if whole else ""
        raise Mistake(host.column + len(address), what, f"[{address}]:{port}{also}")
    if not whole:
        if re.search(r"::?\[|\[[0-9-,]+\].*:", host.text):
            what = "ranges are of names; an IPv6 address has none"
            raise Mistake(host.column, what, "each address on a line of its own")
        what = f"{_cut(host.text)} is neither host:port nor an IPv6 address"
        raise Mistake(host.column, what, "host:22, fe80::1 or [fe80::1]:22")


def _v6(text: str) -> str | None:
    """Return the canonical spelling of an IPv6 address; None for anything else."""
    try:
        return str(ipaddress.IPv6Address(text)) if _V6.fullmatch(text) else None
    except ValueError:
        return None


def _canonical(name: str, column: int) -> str:
    """Return the canonical spelling of a name or address, checked."""
    if v6 := _v6(name):
        return v6
    if not _NAME.fullmatch(name):
        what = f"{_cut(name)} is not a host name" if name else "the host is missing"
        raise Mistake(column, what, "an address, or a name that begins with a letter or digit")
    if re.fullmatch(r"[0-9]+\.[0-9.]*", name):
        try:
            ipaddress.IPv4Address(name)
        except ValueError:
            fix = "four numbers from 0 to 255, without leading zeros"
            raise Mistake(column, f"{_cut(name)} is not an IPv4 address", fix) from None
    return name.lower()


# -- numbered node ------------------------------------------------------------------------------
# Number the nodes of a list as a job does, and choose some of them by number or name.


@dataclass(frozen=True)
class NumberedNode:
    """A node of the list and its number: that of the job's node, and the spares last."""

    index: int
    node: Node

    @property
    def label(self) -> str:
        return f"node{self.index}"


def numbered(nodes: Sequence[Node]) -> list[NumberedNode]:
    active = [node for node in nodes if not node.spare]
    spares = [node for node in nodes if node.spare]
    return [NumberedNode(index, node) for index, node in enumerate([*active, *spares])]


def choose(nodes: Sequence[Node], wanted: Sequence[str]) -> list[NumberedNode]:
    """Return the nodes with these numbers or names, in the list's order; all where none is named.

    The host alone names a node, too, and then every node of the list on that host.
    """
    known = numbered(nodes)
    if not wanted:
        return known
    chosen: set[int] = set()
    for word in wanted:
        exact = [each for each in known if each.node.name == word]
        matches = exact or [each for each in known if each.node.host == word]
        if not matches and word.isascii() and word.isdigit():
            matches = [each for each in known if each.index == int(word)]
        if not matches:
            hint = nearest(word, [each.node.name for each in known])
            raise UsageError(
                f"{word}: the list has no such node{hint}",
                f"its nodes are 0 to {known[-1].index}; orchestrator nodes lists their names",
            )
        chosen |= {each.index for each in matches}
    return [each for each in known if each.index in chosen]


def names(path: Path) -> list[str]:
    """Return the names in a node list, for completion; none where it cannot be read."""
    try:
        return [node.name for node in read_nodes(path)]
    except OrchestratorError:
        return []


def in_words(indices: Sequence[int], noun: str = "node") -> str:
    """Write numbers of nodes, or of what the noun says: node 3, nodes 0-2, 5."""
    numbers = host_ranges.ranges(indices).replace(",", ", ")
    return f"{noun}{'s' if len(indices) > 1 else ''} {numbers}"
