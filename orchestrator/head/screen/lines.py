"""Splits the output of a program into lines that are safe to print."""

from __future__ import annotations

import codecs
import re
import unicodedata

# The longest piece of a line; with the mark it has 64 Ki characters.
LONGEST_CHARACTERS = 64 * 1024 - 1
CONTINUED = "…"


class LineSplitter:
    """Splits the bytes of one stream into finished lines, and keeps the unfinished one.

    The lines do not depend on where the bytes were split. Between two calls at most LONGEST
    characters are kept: an endless line comes out in pieces, all but the last marked as continued.
    """

    def __init__(self, color: bool = False) -> None:
        self._color = color
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        # The unfinished line, without text that a \r has overwritten.
        self._partial = ""

    def feed(self, data: bytes) -> list[str]:
        text = self._partial + self._decode(data)
        lines = text.split("\n")
        self._partial = lines.pop()
        if lines:
            # Nearly all text is clean, and needs only these two fast checks in C.
            short = len(text) <= LONGEST_CHARACTERS or max(map(len, lines)) <= LONGEST_CHARACTERS
            if not short or not all(map(str.isprintable, lines)):
                lines = [shown for line in lines for shown in self._finish(line)]
        if self._partial:
            pieces, self._partial = self._settle(self._partial)
            lines += pieces
        return lines

    @property
    def live(self) -> str:
        """Return the unfinished line as a terminal shows it: a progress bar, dots, a prompt."""
        return clean_line(self._partial.rstrip("\r")).rstrip()

    def flush(self) -> list[str]:
        """Return the unfinished line unless it is blank, and reset it."""
        lines = self._finish(self._partial + self._decode(b"", True))
        self._partial = ""
        return lines if clean_line(lines[-1]).strip() else lines[:-1]

    def _finish(self, line: str) -> list[str]:
        if len(line) <= LONGEST_CHARACTERS and line.isprintable():
            return [line]
        pieces, rest = self._settle(line)
        return [*pieces, clean_line(rest.rstrip("\r"), self._color)]

    def _settle(self, text: str) -> tuple[list[str], str]:
        """Return (full pieces, rest); the rest is the text after the last \\r.

        A \\r at the end stays with the text before it, which the next text overwrites.
        """
        kept = text.rstrip("\r")
        if len(text) <= LONGEST_CHARACTERS:
            return [], kept.rpartition("\r")[2] + text[len(kept) :][:1]
        pieces: list[str] = []
        rest = ""
        for run in kept.split("\r"):
            full = max(0, len(run) - 1) // LONGEST_CHARACTERS * LONGEST_CHARACTERS
            pieces += (
                run[at : at + LONGEST_CHARACTERS] for at in range(0, full, LONGEST_CHARACTERS)
            )
            rest = run[full:]
        marked = [clean_line(piece, self._color) + CONTINUED for piece in pieces]
        return marked, rest + text[len(kept) :][:1]


_PLAIN = bytes(range(0x20, 0x7F)) + b"\n"


def plain_lines(lines: bytes) -> str:
    """Return whole lines if all can be shown unchanged, else ""; it is 5 times faster."""
    if lines.translate(None, _PLAIN):
        return ""
    at = 0
    while len(lines) - at > LONGEST_CHARACTERS:
        at = lines.rfind(b"\n", at, at + LONGEST_CHARACTERS + 1) + 1
        if not at:
            return ""
    return lines.decode("ascii")


_COLOUR = r"\x1b\[[0-9;:]*m"
_ESCAPE = r"""
    \x1b (?: \[ [0-?]* [ -/]* [@-~]?                 # CSI: colours, cursor moves, erasing, modes
          | [\]PX^_] [^\x07\x1b]* (?:\x07|\x1b\\)?   # OSC (titles, links), DCS and the like
          | [ -/]* [0-~]? )                          # short ones, and a bare ESC
"""
_ESCAPES = re.compile(_ESCAPE, re.VERBOSE)
_ESCAPES_BUT_COLOURS = re.compile(f"(?!{_COLOUR}) {_ESCAPE}", re.VERBOSE)
# Without tabs and ESC. The last two ranges break lines and change the direction of text.
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def clean_line(text: str, color: bool = False) -> str:
    """Return a line without control characters; with `color` it keeps colours, reset at its end."""
    if text.isprintable():
        return text
    text = (_ESCAPES_BUT_COLOURS if color else _ESCAPES).sub("", text)
    if not text.isprintable():
        text = _CONTROLS.sub(_picture, text).expandtabs()
    return text + "\x1b[0m" if "\x1b" in text else text


def _picture(control: re.Match[str]) -> str:
    """Return a visible character for a control character, such as ␀ for NUL."""
    code = ord(control[0])
    other = "␡" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"
    return chr(0x2400 + code) if code < 0x20 else other


def fit_columns(text: str, columns: int) -> str:
    """Return the beginning of `text` that fits into a number of terminal columns."""
    if text.isascii():
        return text[: max(0, columns)]
    used = 0
    for at, character in enumerate(text):
        used += _columns(character)
        if used > columns:
            return text[:at]
    return text


def _columns(character: str) -> int:
    if unicodedata.east_asian_width(character) in "WF":
        return 2
    return 0 if unicodedata.category(character) in ("Mn", "Me", "Cf") else 1
