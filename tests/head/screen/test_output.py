"""Output of the commands: the same plain text for every pipe, colours on a terminal."""

import contextlib
import io
import re
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.head.screen import output, styles
from orchestrator.head.screen.events import say
from orchestrator.head.screen.output import Cell, Terminal

ROWS: list[list[Cell]] = [
    ["name", "size", "state"],
    ["one", "12 kB", ("lost", "bold red")],
    ["[red]two[/red]", "1 B", "a sentence that is longer than a narrow terminal is wide"],
]


def test_table_for_pipe_has_plain_columns() -> None:
    assert output.format_table(ROWS, right={1}, headed=True, indent=1).splitlines() == [
        " name             size  state",
        " one             12 kB  lost",
        " [red]two[/red]    1 B  a sentence that is longer than a narrow terminal is wide",
    ]


def test_table_for_terminal_has_width_and_colours() -> None:
    lines = output.format_table(ROWS, Terminal(50), right={1}, headed=True).splitlines()
    assert lines[2].startswith("[red]two[/red]    1 B  a sentence")
    assert len(lines) > 3 and max(map(len, lines)) <= 50
    assert " ".join(line[23:] for line in lines[2:]) == ROWS[2][2]
    painted = output.format_table(ROWS, Terminal(50, color=True), right={1}, headed=True)
    assert "\x1b[1;31mlost" in painted and "\x1b[1mname" in painted
    assert "\x1b" not in "\n".join(lines)
    assert output.paint_text("[b]x", "yellow", Terminal(color=True)) == "\x1b[33m[b]x\x1b[0m"
    assert output.paint_text("x", "yellow", Terminal(80)) == "x"


@pytest.mark.parametrize("terminal", [output.PLAIN, Terminal(40), Terminal(40, color=True)])
def test_table_escapes_control_characters(terminal: Terminal) -> None:
    drawn = output.format_table([["a\x1b[2J", "b\x9b1m\r\nall is well"]], terminal)
    assert drawn == "a  b\N{REPLACEMENT CHARACTER}1m␍␊all is well"
    assert output.paint_text("a\nb", "yellow", terminal).count("\n") == 1


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "asked", "color", "wide"),
    [
        ({}, None, True, True),
        ({"NO_COLOR": "1"}, None, False, True),
        ({"NO_COLOR": "1"}, True, True, True),
        ({"TERM": "dumb"}, None, False, False),
        ({}, False, False, True),
        ({"CLICOLOR": "0"}, None, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, None, False, True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, None, True, False),
    ],
)
def test_terminal_reads_environment(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    asked: bool | None,
    color: bool,
    wide: bool,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.setattr(styles, "_chosen", [asked])
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert output.terminal_of(FakeTerminal()) == Terminal(77 if wide else None, color)


@pytest.mark.parametrize(
    ("environment", "asked", "color"),
    [
        ({}, None, False),
        ({}, True, True),
        ({"CLICOLOR_FORCE": "1"}, None, True),
        ({"FORCE_COLOR": "0"}, None, False),
        ({"FORCE_COLOR": "1"}, False, False),
    ],
)
def test_pipe_is_coloured_on_request(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    asked: bool | None,
    color: bool,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(styles, "_chosen", [asked])
    say(styles.style_text("lost", styles.FAILED))
    assert ("\x1b[1;31mlost" in capsys.readouterr().out) == color
    assert output.terminal_of(io.StringIO()) == Terminal(None, color)


def test_pipe_output_does_not_import_rich() -> None:
    code = "import sys; from orchestrator.head.screen import output\n"
    code += "output.write_out(output.format_table([['a', 'é']])); assert 'rich' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONIOENCODING": "ascii"},
        cwd=output.__file__.partition("/orchestrator/head/")[0],
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"a  \\xe9\n"


# -- what gets through to the terminal --------------------------------------------------------

EVIL = "\x1b]52;c;ZXZpbA==\x07\x1b]0;title\x1b\\\x1b[2J\x1b[31mred\x9b2J\r\x08\u202e\x00"
TEXT_OF_STRANGERS = st.text(st.sampled_from("ab \n\t\x1b[]0;m31\x07\\\r\x08\x9b\x9d\x00é\u202e"))


@given(TEXT_OF_STRANGERS)
@example(EVIL)
@example("\x1b[31m" * 3)
@example("\x1b\t[31m\x1b\n]0;x")
def test_safe_passes_lines_tabs_and_colours_alone(text: str) -> None:
    left = re.sub(r"\x1b\[[0-9;:]*m", "", output.safe_text(text))
    assert all(c.isprintable() or c in "\n\t" for c in left), left
    assert output.safe_text(text).count("\n") == text.count("\n")
    assert all(c.isprintable() or c == "\n" for c in output.printable_text(text))


@given(st.text(st.characters(exclude_categories=["C", "Z"])))
def test_safe_keeps_harmless_text(text: str) -> None:
    assert output.safe_text(f"\x1b[1m{text}\x1b[0m\n\t{text}").replace("\x1b[0m", "") == (
        f"\x1b[1m{text}\n\t{text}"
    )


def test_missing_streams_are_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, stream, None)
    assert not output.user_agrees("all?")
    assert not output.pass_on("x")


def test_every_output_function_cleans_text(capsys: pytest.CaptureFixture[str]) -> None:
    ways = (output.write_out, output.pass_on, output.complain, say, output.set_status_line)
    for write in ways:
        write(EVIL)
        out, err = capsys.readouterr()
        assert "red" in out + err
        shown = re.sub(r"\x1b\[[0-9;:]*m", "", (out + err).removeprefix("\r\x1b[K"))
        assert all(c.isprintable() or c == "\n" for c in shown), write


@pytest.mark.parametrize("wanted", [True, False])
def test_json_alone_reserves_standard_output(
    capsys: pytest.CaptureFixture[str], *, wanted: bool
) -> None:
    output.set_status_line("")
    capsys.readouterr()
    with output.json_alone() if wanted else contextlib.nullcontext():
        say("on the way")
        output.write_out("a table")
        output.print_result({"a": 1}, lambda _: "words")
    out, err = capsys.readouterr()
    said = "orchestrator: on the way\n"
    as_text = f"{said}a table\nwords\n"
    assert (out, err) == (('{\n "a": 1\n}\n', said) if wanted else (as_text, ""))
    assert not output.as_json()
