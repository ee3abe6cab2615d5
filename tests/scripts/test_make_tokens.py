"""scripts/make_tokens.py: texts in, a file of tokens out that the engine reads."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from orchestrator.engine.data.tokens import HEADER, WIDTHS, Header, read_header
from tests.node.running import wait_until
from tests.typed import typed

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tokens.py"

# What the package tokenizers does, in the few calls that are made: words, by their length.
STAND_IN = """
class Encoding:
    def __init__(self, ids):
        self.ids = ids

class Tokenizer:
    @staticmethod
    def from_file(path):
        made = Tokenizer()
        made.size = int(open(path).read())
        return made
    def get_vocab(self, with_added_tokens):
        assert with_added_tokens
        return {"a": 1, "</s>": self.size - 1, "<stop>": 2}
    def encode_batch(self, texts, add_special_tokens):
        assert not add_special_tokens
        return [Encoding([min(100, len(word)) for word in text.split()]) for text in texts]
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(*words: object, place: Path) -> Done:
    """Run the script where the package tokenizers is the file of that name in the directory."""

    def main() -> None:
        sys.modules.pop("tokenizers", None)
        sys.path.insert(0, str(place))
        runpy.run_path(str(SCRIPT), run_name="__main__")

    return Done(*typed([*map(str, words)], place, main, str(SCRIPT)))


def read(path: Path) -> tuple[Header, list[int]]:
    header, data = read_header(path), path.read_bytes()[HEADER:]
    width = WIDTHS[header.dtype]
    return header, [
        int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)
    ]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    place = tmp_path / "texts"
    (place / "deep").mkdir(parents=True)
    (place / "b.txt").write_text("béta\n")
    (place / "deep" / "a.txt").write_text("alpha")
    (place / "c.md").write_text("gamma")
    return place


def test_make_tokens_writes_bytes_and_end_tokens(texts: Path, tmp_path: Path) -> None:
    done = run("out.bin", "texts", "texts/c.md", place=tmp_path)
    assert done.returncode == 0, done.stderr
    header, found = read(tmp_path / "out.bin")
    assert (header.dtype, header.vocab_size) == ("uint16", 257)
    assert found == [*"béta\n".encode(), 256, *b"alpha", 256, *b"gamma", 256]
    assert done.stdout == (
        "out.bin: 19 tokens (uint16) from 3 files; model.vocab_size must be at least 257\n"
    )
    assert done.stderr == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "texts"]


def test_suffix_and_json_are_honoured(texts: Path, tmp_path: Path) -> None:
    done = run("out.bin", "texts", "--suffix", ".md", "--json", place=tmp_path)
    told = {"dtype": "uint16", "vocab_size": 257, "count": 6}
    assert json.loads(done.stdout) == {"path": "out.bin", "files": 1, **told}


def test_long_and_many_documents_are_whole(tmp_path: Path) -> None:
    """Also where a line is longer than what is read at a time, and its characters than a byte."""
    long = "é" * 900_001 + "\n" + "word " * 300_000
    lines = [f"document {number}" for number in range(2000)]
    (tmp_path / "long.txt").write_text(long)
    (tmp_path / "many.jsonl").write_text(
        "".join(json.dumps({"body": line}) + "\n" for line in lines) + "\n"
    )
    (tmp_path / "t.json").write_text("300")
    (tmp_path / "tokenizers.py").write_text(STAND_IN)
    paths = ("long.txt", "many.jsonl", "--field", "body")
    assert run("bytes.bin", *paths, place=tmp_path).returncode == 0
    expected = [*long.encode(), 256]
    for line in lines:
        expected += [*line.encode(), 256]
    assert read(tmp_path / "bytes.bin")[1] == expected
    done = run("t.bin", *paths, "--tokenizer", "t.json", place=tmp_path)
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "t.bin")[1]
    cut = found.index(4)
    assert 2 <= cut <= 9  # the word of 900,001 letters, in as many pieces as were read
    document = found[cut : found.index(299)]
    assert 300_000 <= len(document) <= 300_009  # words too may be cut, where no line ends
    assert found.count(299) == 2001
    assert found[-3:] == [8, 4, 299]


@pytest.mark.parametrize(("size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_large_vocabulary_uses_wide_numbers(texts: Path, size: int, dtype: str) -> None:
    place = texts.parent
    (place / "t.json").write_text(str(size))
    (place / "tokenizers.py").write_text(STAND_IN)
    more = ("--tokenizer", "t.json")
    done = run("out.bin", "texts", *more, place=place)
    assert done.returncode == 0, done.stderr
    header, found = read(place / "out.bin")
    assert (header.dtype, header.vocab_size) == (dtype, size)
    assert found == [4, size - 1, 5, size - 1]
    done = run("2.bin", "texts", *more, "--end", "<stop>", place=place)
    assert read(place / "2.bin")[1] == [4, 2, 5, 2]
    done = run("3.bin", "texts", *more, "--end", "<stpo>", place=place)
    assert done.stderr.startswith(
        "make_tokens: t.json has no token '<stpo>'; did you mean '<stop>'?\n  name the token"
    )
    assert done.returncode == 2


WRONG: dict[str, tuple[list[str], str]] = {
    "no file": (["missing.txt"], "there is no file or directory missing.txt"),
    "no such suffix": (
        ["texts", "--suffix", ".rst"],
        "no files ending in .rst\n  it has .md",
    ),
    "empty": (["empty.txt"], "there is no text in empty.txt"),
    "exists": (
        ["texts", "--out", "old.bin"],
        "already exists\n  overwrite it with --force",
    ),
    "end": (["texts", "--end", "x"], "there is no --tokenizer"),
    "not json": (["bad.jsonl"], "bad.jsonl:2 is not JSON"),
    "no field": (["good.jsonl", "--field", "body"], "has no text 'body' (it has text)"),
    "no tokenizers": (["texts", "--tokenizer", "t.json"], "-m pip install tokenizers"),
    "no room": (["texts", "--out", "missing/out.bin"], "No such file or directory"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_input_leaves_nothing(texts: Path, name: str) -> None:
    place = texts.parent
    (place / "empty.txt").write_text("")
    (place / "old.bin").write_text("old")
    (place / "t.json").write_text("{}")
    (place / "bad.jsonl").write_text('{"text": "a"}\nb\n')
    (place / "good.jsonl").write_text('{"text": "a"}\n')
    (place / "tokenizers.py").write_text("raise ImportError")
    before = sorted(place.rglob("*"))
    words, told = WRONG[name]
    out = "out.bin"
    if "--out" in words:
        words, out = words[:-2], words[-1]
    done = run(out, *words, place=place)
    assert done.returncode in (1, 2, 3)
    assert done.stderr.startswith("make_tokens: ") and told in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert [path for path in sorted(place.rglob("*")) if "__pycache__" not in str(path)] == before
    assert (place / "old.bin").read_text() == "old"


def test_force_replaces_existing_file(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out.bin").write_text("old")
    assert run("out.bin", "texts", "--force", place=tmp_path).returncode == 0
    assert read(tmp_path / "out.bin")[0].count == 13


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endless.txt")
    command = [sys.executable, str(SCRIPT), "out.bin", "endless.txt"]
    with (
        subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as made,
        (tmp_path / "endless.txt").open("w") as text,
    ):
        text.write("some words")
        text.flush()
        wait_until(lambda: len(list(tmp_path.iterdir())) >= 2)
        time.sleep(0.2)  # it waits for more to read
        made.send_signal(signal.SIGINT)
        assert made.wait(60) == 130
        assert made.stderr is not None
        assert made.stderr.read() == "make_tokens: stopped; nothing was written\n"
    assert [path.name for path in tmp_path.iterdir()] == ["endless.txt"]
