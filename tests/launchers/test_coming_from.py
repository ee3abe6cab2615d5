"""docs/start.md and docs/coming-from: somebody types each page from top to bottom, and it works.

What a page says to this test, in the words behind the language of a fenced block:

    sh                   typed at the head node; has to end well
    sh on=10.0.0.1       typed on that machine, at the same time as what follows for others
    LANGUAGE some.file   a file of this name, which a command on the page then uses
    python               a program of its own
    text                 what the last command printed, among other things; ... is anything
    sh old, sh elsewhere what is no longer needed, or needs what no test has: not run

A command of ours in `code` is run after all blocks, unless one of them has it. In tables the first
column is what people typed before.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clusters.netns import NetnsCluster
from tests.clusters.slurm import Slurm, free_ports
from tests.conftest import Cluster
from tests.launching import BIN, Command

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "docs" / "coming-from"
PAGES = sorted(PLACE.glob("*.md"))
START = ROOT / "docs" / "start.md"
LISTED = "node_ip_list.txt"  # what master_launch reads by itself
PROGRAMS = ("master_launch", "orchestrator", "emergency_stop")
NOT_RUN = {"old", "elsewhere"}
PIECE = re.compile(r"^```(?P<info>.*)\n(?P<block>(?s:.*?))^```$|`(?P<code>[^`\n]+)`", re.M)
OLD_COLUMN = re.compile(r"^\|(?:[^|\\\n]|\\.)*\|", re.M)
# This machine has no GPU, which everything but accelerate finds out by itself.
CPU = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Piece:
    """A fenced block, or a command of ours in a sentence."""

    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def file(self) -> str:
        return next((mark for mark in self.marks if "." in mark and "=" not in mark), "")

    @property
    def machine(self) -> str:
        return next((mark[3:] for mark in self.marks if mark.startswith("on=")), "")

    @property
    def run(self) -> bool:
        return not NOT_RUN.intersection(self.marks) and self.language != "text"


def pieces(page: str) -> list[Piece]:
    page = OLD_COLUMN.sub("|", page)
    found = []
    for match in PIECE.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        if match["code"] is None:
            language, *marks = match["info"].split() or [""]
            found.append(Piece(line, language, tuple(marks), match["block"]))
        elif match["code"].split()[0] in PROGRAMS:
            found.append(Piece(line, "code", (), match["code"].replace("\\|", "|")))
    blocks = [one for one in found if one.language != "code"]
    typed = "\n".join(one.text for one in blocks if one.run)
    return blocks + [one for one in found if one not in blocks and one.text not in typed]


class Reader:
    """Somebody in an empty directory, which the nodes share, with `ssh` set up for them."""

    def __init__(self, directory: Path, env: Mapping[str, str], here: Mapping[str, str]) -> None:
        self.directory = directory
        self.env = {"PATH": f"{BIN}:{os.environ['PATH']}", **CPU, **env}
        self.here = here  # what this machine has in place of what a page says
        self.running: dict[str, Command] = {}
        self.said = self.typed = ""

    def read(self, page: str) -> None:
        files = []
        for piece in pieces(page):
            try:
                self.do(piece)
            except AssertionError as wrong:
                raise AssertionError(f"line {piece.line}: {wrong}") from wrong
            files += [piece.file] if piece.file not in ("", LISTED) else []
        self.settle()
        unused = [name for name in files if name not in self.typed]
        assert not unused, f"no command uses {unused}"

    def do(self, piece: Piece) -> None:
        text = piece.text
        for there, here in self.here.items():
            text = re.sub(rf"{re.escape(there)}(?!\d)", here, text)
        if piece.machine in self.running or not piece.machine:
            self.settle()  # only commands on several machines run at the same time
        if NOT_RUN.intersection(piece.marks):
            return
        if piece.file:
            (self.directory / piece.file).write_text(text)
        elif piece.language == "text":
            for line in text.splitlines():
                pattern = ".*".join(map(re.escape, line.strip().split("...")))
                if not re.search(pattern, self.said):
                    raise AssertionError(f"{line!r} was not said:\n{self.said}")
        elif piece.machine:
            self.start(piece.machine, self.on(self.here[piece.machine], text), text)
        elif piece.language in ("sh", "code"):
            self.start("", ["bash", "-euo", "pipefail", "-c", text], text)
        elif piece.language == "python":
            name = f"line_{piece.line}.py"
            (self.directory / name).write_text(text)
            self.start("", ["python", name], text)
        else:
            raise AssertionError(f"nothing is done with this block ({piece.language})")
        if not piece.machine:
            self.settle()

    def on(self, address: str, text: str) -> list[str]:
        setting = [f"{name}={self.env[name]}" for name in ("PATH", *CPU)]
        words = ["env", "-C", str(self.directory), *setting, "bash", "-ec", text]
        return ["ssh", address, shlex.join(words)]

    def start(self, machine: str, words: list[str], text: str) -> None:
        self.running[machine] = Command(words, self.directory, self.env)
        self.typed += text

    def settle(self) -> None:
        """All that runs ends, and well."""
        if self.running:
            ends = [one.finish() for one in self.running.values()]
            self.said = "\n".join(one.text for one in self.running.values())
            self.running = {}
            if any(ends):
                raise AssertionError(f"it ended with {ends}:\n{self.said}")


@pytest.fixture
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Reader:
    """At the head of two nodes; for the page on Slurm, on a login node."""
    if request.node.callspec.params["page"].stem == "slurm":
        slurm: Slurm = request.getfixturevalue("login").slurm
        home = {"ORCHESTRATOR_HOME": str(tmp_path / "home")}
        gpus = {"--gpus 1 ": "", "--gres=gpu:1 ": ""}  # this Slurm has none
        return Reader(tmp_path, {**slurm.env, "PATH": f"{BIN}:{slurm.env['PATH']}", **home}, gpus)
    cluster: Cluster = request.getfixturevalue("two_nodes")
    own = tmp_path / "bin" / "ssh"  # with it no page has to say --ssh-config
    own.parent.mkdir()
    own.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F "{cluster.ssh_config}" "$@"\n')
    own.chmod(0o755)
    here = {"10.0.0.1": cluster.addresses[0], "10.0.0.2": cluster.addresses[1]}
    here["29500"] = str(free_ports(1)[0])
    if not isinstance(cluster, NetnsCluster):
        here["emergency_stop"] = "true"  # it would end what other tests run on this machine
    return Reader(tmp_path, {"PATH": f"{own.parent}:{BIN}:{os.environ['PATH']}"}, here)


@pytest.mark.slow
@pytest.mark.parametrize("page", [START, *PAGES], ids=lambda page: str(page.stem))
def test_all_that_a_page_says_works(page: Path, reader: Reader) -> None:
    reader.read(page.read_text(encoding="utf-8"))


def test_there_is_a_page_for_each_source_and_each_can_be_found() -> None:
    names = {page.name for page in PAGES}
    sources = {"accelerate", "aorta", "ddp-trainer", "flags", "slurm", "torchrun"}
    assert names == {f"{name}.md" for name in sources}
    for place in (ROOT / "README.md", ROOT / "docs" / "guide.md"):
        text = place.read_text(encoding="utf-8")
        assert not [name for name in names if f"coming-from/{name})" not in text]
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        assert not [link for link in links if not (PLACE / link).exists()], page.name


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("```sh\necho one\nfalse\n```\n", r"line 1: it ended with \[1\]:\none"),
        ("a\n\n```json\n{}\n```\n", r"line 3: nothing is done with this block \(json\)"),
        ("```\necho\n```\n", r"line 1: nothing is done with this block \(\)"),
        ("```sh\necho a b c\n```\n```text\na ... d\n```\n", "line 4: 'a ... d' was not said"),
        ("```python\nraise SystemExit(3)\n```\n", r"line 1: it ended with \[3\]"),
        ("```sh x.sh\ntrue\n```\n", r"no command uses \['x.sh'\]"),
        ("see `orchestrator launhc`", r"line 1: it ended with \[2\]"),
        ("| a | b |\n| `x \\| y` | `orchestrator sttaus` |\n", r"line 2: it ended with \[2\]"),
    ],
)
def test_a_page_that_is_wrong_is_found(page: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=words):
        Reader(tmp_path, {}, {}).read(page)


def test_what_is_old_or_said_twice_is_left_alone(tmp_path: Path) -> None:
    page = "```sh old\nfalse\n```\n`orchestrator -h` of\n```sh\norchestrator -h\n```\n"
    assert [one.line for one in pieces(page)] == [1, 5]
    reader = Reader(tmp_path, {}, {"10.0.0.1": "127.0.0.1"})
    reader.read(page + "```sh a.sh\necho 10.0.0.1 10.0.0.11\n```\n```sh\nbash a.sh\n```\n")
    assert reader.said == "127.0.0.1 10.0.0.11"
