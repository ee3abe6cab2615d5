"""The first word of a line of node_ip_list.txt: `[user@]host[:port]`, ranges expanded.

node_line.py calls it. A host reaches ssh's and the shell's command lines, so its letters are
strict; habits from other tools get an answer of their own.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_NODES = 1024

_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_V6 = re.compile(r"[0-9A-Fa-f:.]+(%[A-Za-z0-9_.-]+)?")
_NUMBERS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


class Wrong(Exception):
    """One mistake on a line: where, what, and what to write."""

    def __init__(self, column: int, what: str, fix: str) -> None:
        super().__init__(what)
        self.column, self.what, self.fix = column, what, fix


@dataclass(frozen=True)
class Word:
    """A part of a line and the column that it begins in, from 1."""

    text: str
    column: int


def split_host(word: Word) -> tuple[str | None, Word, int | None]:
    """user, host and port; the host keeps its ranges and loses the brackets of IPv6."""
    user, at, rest = word.text.rpartition("@")
    host, port = Word(rest, word.column + len(user + at)), None
    if rest.startswith("-"):
        what = "a host cannot begin with '-': ssh would read it as an option"
        raise Wrong(host.column, what, "the host first, options of the node behind it")
    _refuse_foreign(word)
    if at and not _USER.fullmatch(user):
        raise Wrong(word.column, f"{cut(user)} is not a user name", "user@host")
    boxed = re.fullmatch(r"\[([^]]*)\](?::(.*))?", rest)
    before, colon, behind = rest.rpartition(":")
    if boxed and ":" in boxed[1]:
        host, port = Word(boxed[1], host.column + 1), boxed[2]
        if not v6_spelling(host.text):
            raise Wrong(host.column, f"{cut(host.text)} is not an IPv6 address", "[fe80::1]:2222")
    elif _outside_brackets(rest).count(":") > 1:
        _check_unboxed(host)
    elif colon and "]" not in behind:
        host, port = Word(before, host.column), behind
    if port is None:
        return user or None, host, None
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        column = word.column + len(word.text) - len(port)
        raise Wrong(column, f"{cut(port)} is not a port", "host:22, with a port from 1 to 65535")
    return user or None, host, int(port)


def _refuse_foreign(word: Word) -> None:
    """What other tools put in the place of a host."""
    text, column = word.text, word.column
    if "://" in text:
        host = text.partition("://")[2].partition("/")[0]
        raise Wrong(column, "a node is a host, not a URL", host or "user@host:22")
    if "=" in text:
        host, colon, option = text.partition(":")
        if colon and "=" not in host:
            raise Wrong(column + len(host), "an option needs a space before it", f"{host} {option}")
        raise Wrong(column, "a line begins with its host", f"gpu01 {text}")
    if text.rfind("[") > text.rfind("]"):
        fix = "gpu[1-3,7], closed and without spaces"
        raise Wrong(column + text.rfind("["), "nothing closes this '['", fix)
    comma = _outside_brackets(text).find(",")
    if comma >= 0:
        raise Wrong(column + comma, "more than one node on a line", "one node per line, no commas")


def _outside_brackets(text: str) -> str:
    """The text with [...] blanked, so that columns stay."""
    return re.sub(r"\[[^]]*\]", lambda match: " " * len(match[0]), text)


def _check_unboxed(host: Word) -> None:
    """Two or more ':' and no brackets: an IPv6 address, unless its end may be meant as a port."""
    address, _, port = host.text.rpartition(":")
    whole = v6_spelling(host.text)
    if v6_spelling(address) and port.isdigit() and (not whole or port in ("22", "2222")):
        what = "an IPv6 address with a port needs brackets"
        also = f", or [{host.text}] if {port} belongs to the address" if whole else ""
        raise Wrong(host.column + len(address), what, f"[{address}]:{port}{also}")
    if not whole:
        what = f"{cut(host.text)} is neither host:port nor an IPv6 address"
        raise Wrong(host.column, what, "host:22, fe80::1 or [fe80::1]:22")


def v6_spelling(text: str) -> str | None:
    """The one spelling of an IPv6 address; None where it is not one."""
    try:
        return str(ipaddress.IPv6Address(text)) if _V6.fullmatch(text) else None
    except ValueError:
        return None


def expand(host: Word) -> Iterator[str]:
    """gpu[01-02] -> gpu01, gpu02. Counted before any of them is made."""
    if v6_spelling(host.text):
        return iter([host.text])
    pieces: list[list[str]] = []
    count, column = 1, host.column
    for index, piece in enumerate(re.split(r"\[([^][]*)\]", host.text)):
        if index % 2:  # the inside of a bracket
            pieces.append(_numbers(piece, column + 1))
            column += len(piece) + 2
        else:
            _check_letters(Word(piece, column))
            pieces.append([piece])
            column += len(piece)
        count *= len(pieces[-1])
        if count > MAX_NODES:
            raise too_many(host.column)
    return map("".join, itertools.product(*pieces))


def _numbers(text: str, column: int) -> list[str]:
    """01-03,7 -> 01 02 03 7."""
    names: list[str] = []
    for part in text.split(","):
        match = _NUMBERS.fullmatch(part)
        if not match:
            what = f"{cut(part)} is not a range of numbers" if part else "a number is missing here"
            raise Wrong(column, what, "a range such as [1-3,7] or [01-16]")
        low, high = match[1], match[2] or match[1]
        if int(low) > int(high):
            raise Wrong(column, "this range runs backwards", f"{high}-{low}")
        if int(high) - int(low) >= MAX_NODES - len(names):
            raise too_many(column)
        names += [f"{number:0{len(low)}d}" for number in range(int(low), int(high) + 1)]
        column += len(part) + 1
    return names


def _check_letters(piece: Word) -> None:
    odd = re.search(r"[^A-Za-z0-9_.-]", piece.text)
    if not odd:
        return
    fix = "letters a-z, digits, '.', '_' and '-' only"
    if odd[0] == "#":
        fix = "a space in front of '#' to begin a comment"
    elif odd[0] == "{":
        fix = "a range in square brackets: gpu[01-04]"
    elif odd[0].isalpha():
        fix = "the ASCII form of the name (xn--...) or an alias from ssh_config"
    raise Wrong(piece.column + odd.start(), f"{odd[0]!r} cannot be in a host name", fix)


def same_host(name: str, column: int) -> str:
    """One spelling for every way to write this name or address, checked."""
    if v6 := v6_spelling(name):
        return v6
    if not _NAME.fullmatch(name):
        what = f"{cut(name)} is not a host name" if name else "the host is missing"
        raise Wrong(column, what, "an address, or a name that begins with a letter or digit")
    if re.fullmatch(r"[0-9]+\.[0-9.]*", name):
        try:
            ipaddress.IPv4Address(name)
        except ValueError:
            fix = "four numbers from 0 to 255, without leading zeros"
            raise Wrong(column, f"{cut(name)} is not an IPv4 address", fix) from None
    return name.lower()


def too_many(column: int) -> Wrong:
    return Wrong(column, f"this makes more than {MAX_NODES} nodes", f"{MAX_NODES} nodes at most")


def cut(text: str) -> str:
    """In quotes, and short enough for one line of an error."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
