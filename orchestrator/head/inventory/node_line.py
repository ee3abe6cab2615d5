"""One line of node_ip_list.txt: `host [option ...]  # comment`, taken apart.

nodes.py calls `read_line`. What cannot be meant as written comes back as `Wrong`, all of it.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.errors import nearest
from orchestrator.head.inventory.node_host import Word, Wrong, cut, expand, split_host

# What a value looks like, that in words, and an example. `spare` takes no value.
OPTIONS = {
    "slots": (r"0*[1-9][0-9]{0,3}", "a whole number from 1 to 9999", "8"),
    "python": (r"[/~].*|\w[\w.+-]*", "/absolute, ~/... or a bare command", "~/venv/bin/python"),
    "workdir": (r"[/~].*", "/absolute or ~/...", "~/project"),
    "ifname": (r"\w[\w.-]{0,14}", "an interface name, 15 characters at most", "eth1"),
    "spare": ("", "", ""),
}
# What other launchers call it, and what belongs to the host here.
FOREIGN = {
    **dict.fromkeys(("max_slots", "max-slots"), "slots={}, once: it is number and limit"),
    **dict.fromkeys(("gpus", "ngpus", "nproc", "nproc_per_node"), "slots={}"),
    **dict.fromkeys(("iface", "interface"), "ifname={}"),
    "user": "{}@ in front of the host",
    "port": ":{} behind the host",
}
# Chats, web pages and word processors put these in place of what was typed.
PASTED = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    **dict.fromkeys("\u201c\u201d\u201e", '"'),
    **dict.fromkeys("\u2018\u2019\u201a", "'"),
    **dict.fromkeys("\u00a0\u2002\u2003\u2007\u2009\u202f\u3000", " "),
}

_QUOTED = r"""\\.|"(?:\\.|[^"\\])*"|'[^']*'"""
_WORD = re.compile(rf"""(?P<comment>#.*)|(?P<word>(?:{_QUOTED}|[^ \t"'\\]+)+)|(?P<open>["'\\].*)""")
_SPACES = "".join(pasted for pasted, typed in PASTED.items() if typed == " ")
_PASTED = re.compile(rf"{_QUOTED}|(?<![^ \t{_SPACES}])#.*|(?P<pasted>[{''.join(PASTED)}])")
_UNQUOTE = re.compile(r"""\\(.)|"((?:\\.|[^"\\])*)"|'([^']*)'""")


@dataclass(frozen=True)
class Line:
    """The hosts that a line's ranges make, made as they are asked for, and what holds for all."""

    hosts: Iterator[str]
    column: int  # where the host begins
    user: str | None
    port: int | None
    options: dict[str, str]


def read_line(line: str) -> tuple[Line | None, list[Wrong]]:
    """What the line says, None where it says nothing, and everything that is wrong with it."""
    wrong: list[Wrong] = []
    words = _words(_typed(line, wrong), wrong)
    if not words:
        return None, wrong
    host, user, port = words.popleft(), None, None
    hosts: Iterator[str] = iter(())
    try:
        user, host, port = split_host(host)
        hosts = expand(host)
    except Wrong as error:
        wrong.append(error)
        # Bare words behind it may be the rest of it: 'a, b' or 'gpu[1, 2]'.
        words = deque(word for word in words if "=" in word.text)
    return Line(hosts, host.column, user, port, _options(words, wrong)), wrong


def _typed(line: str, wrong: list[Wrong]) -> str:
    """The line as it would have been typed: pasted look-alikes replaced, each one told."""

    def typed(match: re.Match[str]) -> str:
        pasted = match["pasted"]
        if not pasted:
            return match[0]  # quoted or a comment: as it is
        what = f"{unicodedata.name(pasted)} (U+{ord(pasted):04X}) was pasted in"
        fix = "a plain space" if PASTED[pasted] == " " else f"a plain {PASTED[pasted]}"
        wrong.append(Wrong(match.start() + 1, what, fix))
        return PASTED[pasted]

    return line if line.isascii() else _PASTED.sub(typed, line)


def _words(line: str, wrong: list[Wrong]) -> deque[Word]:
    """What stands between blanks, with its quotes still on; no comment."""
    words: deque[Word] = deque()
    for match in _WORD.finditer(line):
        column = match.start() + 1
        if match["word"]:
            words.append(Word(match["word"], column))
        elif match["open"]:
            if column > 1 and line[column - 2] not in " \t":
                words.pop()  # the word that it breaks off
            what = f"nothing follows or closes this {line[column - 1]}"
            wrong.append(Wrong(column, what, 'quotes in pairs, as in workdir="/data/bob\'s"'))
    return words


def _options(words: deque[Word], wrong: list[Wrong]) -> dict[str, str]:
    given: dict[str, str] = {}
    while words:
        word = words.popleft()
        try:
            key, value = _option(word, words)
            if key in given:
                raise Wrong(word.column, f"{key!r} is given twice", f"{key!r} once")
            given[key] = value
        except Wrong as error:
            wrong.append(error)
    return given


def _option(word: Word, behind: deque[Word]) -> tuple[str, str]:
    """One option, checked. Takes words from behind it where they are its value, torn off."""
    key, equals, value = _UNQUOTE.sub(_unquoted, word.text).partition("=")
    if key not in OPTIONS:
        raise _unknown(key, value, word.column)
    if key == "spare":
        if equals:
            raise Wrong(word.column, "'spare' takes no value", "spare")
        return key, ""
    pattern, wanted, example = OPTIONS[key]
    if not value:  # 'slots 8', 'slots = 8', 'slots= 8'
        if behind and behind[0].text == "=":
            behind.popleft()
        if behind and behind[0].text.partition("=")[0] not in OPTIONS:
            example = behind.popleft().text.lstrip("=")
        raise Wrong(word.column, f"{key!r} needs '=' and a value, no spaces", f"{key}={example}")
    if not re.fullmatch(pattern, value, re.ASCII) or not value.isprintable():
        column = word.column + word.text.index("=") + 1
        raise Wrong(column, f"{key} is {wanted}, not {cut(value)}", f"{key}={example}")
    return key, value


def _unquoted(match: re.Match[str]) -> str:
    escaped, double, single = match.groups()
    if double is not None:
        return re.sub(r'\\([\\"$`])', r"\1", double)
    return single if escaped is None else escaped


@functools.lru_cache  # the same slip on 10,000 lines: 0.5 s without it
def _hint(key: str) -> str:
    return nearest(key, OPTIONS)


def _unknown(key: str, value: str, column: int) -> Wrong:
    if key.isdigit() and not value:
        return Wrong(column, f"a bare number: {cut(key)}", f"slots={key}")
    what = f"unknown option {cut(key)}"
    if key in FOREIGN:
        return Wrong(column, what, FOREIGN[key].format(value or "..."))
    hint = _hint(key[:20])
    meant = next((name for name in OPTIONS if f"{name!r}" in hint), "")
    if not meant:
        fix = f"{', '.join(OPTIONS)}; another node goes on its own line"
    else:
        fix = meant if meant == "spare" else f"{meant}={value or OPTIONS[meant][2]}"
    return Wrong(column, what + hint, fix)
