"""Turn texts into a file of tokens, for dataset.path.

    python scripts/make_tokens.py tokens.bin texts/ more.txt
    python scripts/make_tokens.py tokens.bin corpus.jsonl --tokenizer tokenizer.json

Without a tokenizer, a token is a byte, and 256 ends a document. A file is a document; in a .jsonl
file, every line is one. What is in memory does not grow with the texts.

(Not called tokenize.py: Python's own module of that name would be found here by all scripts.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from orchestrator.engine.data.tokens import HEADER, WIDTHS, Header, dtype_for, write_header
from orchestrator.errors import EXIT_STOPPED, CheckFailed, OrchestratorError, UsageError, nearest

PIECE = 1 << 18  # bytes of a document that are read at a time
BATCH = 1 << 22  # bytes that a tokenizer gets at a time, in pieces that it shares among the cores
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Piece(NamedTuple):
    text: bytes
    ends: bool  # the document
    where: str


class Encoder(Protocol):
    vocab_size: int

    def encode(self, pieces: list[Piece]) -> bytes:
        """Little-endian numbers."""
        ...


class Bytes:
    vocab_size = 257

    def encode(self, pieces: list[Piece]) -> bytes:
        made = bytearray()
        for piece in pieces:
            wide = bytearray(2 * len(piece.text))
            wide[::2] = piece.text
            made += wide + (b"\x00\x01" if piece.ends else b"")
        return bytes(made)


class Tokenizer:
    """A tokenizer.json of Hugging Face. Long documents are cut at line ends before it sees them."""

    def __init__(self, path: Path, end: str | None) -> None:
        try:
            import tokenizers  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            raise CheckFailed(
                "--tokenizer needs the package tokenizers, which this Python lacks",
                f"{sys.executable} -m pip install tokenizers",
            ) from None
        try:
            self.made = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  it has no type of its own
            raise CheckFailed(f"{path} is not a tokenizer.json: {error}") from None
        known: dict[str, int] = self.made.get_vocab(with_added_tokens=True)
        self.vocab_size = max(known.values()) + 1
        self.kind = "H" if WIDTHS[dtype_for(self.vocab_size)] == 2 else "I"
        found = [word for word in ([end] if end is not None else ENDS) if word in known]
        if not found:
            what = f"no token {end!r}" if end else f"none of {', '.join(ENDS)}"
            raise UsageError(
                f"{path} has {what}{nearest(end or '', known)}",
                "name the token that ends a document: --end TOKEN",
            )
        self.end = known[found[0]]

    def encode(self, pieces: list[Piece]) -> bytes:
        made = array(self.kind)
        encoded = self.made.encode_batch([text_of(p) for p in pieces], add_special_tokens=False)
        for piece, one in zip(pieces, encoded, strict=True):
            made.extend(one.ids)
            if piece.ends:
                made.append(self.end)
        if sys.byteorder == "big":
            made.byteswap()
        return made.tobytes()


def text_of(piece: Piece) -> str:
    try:
        return piece.text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckFailed(f"{piece.where} is not UTF-8: {error.reason}") from None


# -- reading ----------------------------------------------------------------------------------


def files_of(paths: list[Path], suffixes: list[str]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no file or directory {path}")
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        chosen = [file for file in inside if file.suffix in suffixes]
        if not chosen:
            others = sorted({file.suffix for file in inside if file.suffix})[:8]
            raise UsageError(
                f"{path} has no files that end in {' or '.join(suffixes)}",
                f"it has {', '.join(others)}: choose with --suffix" if others else "",
            )
        found += chosen
    return found


def pieces_of(path: Path, field: str) -> Iterator[Piece]:
    with path.open("rb") as file:
        if path.suffix == ".jsonl":
            yield from documents(path, file, field)
            return
        piece = next_piece(file)
        while piece:
            following = next_piece(file)
            yield Piece(piece, not following, str(path))
            piece = following


def next_piece(file: Any) -> bytes:
    """Up to the end of a line; of a very long one, up to the end of a character."""
    piece: bytes = file.read(PIECE)
    piece += file.readline(PIECE)
    while (after := file.peek(1)[:1]) and 0x80 <= after[0] < 0xC0 and not piece.endswith(b"\n"):
        piece += file.read(1)
    return piece


def documents(path: Path, file: BinaryIO, field: str) -> Iterator[Piece]:
    for number, line in enumerate(file, start=1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            told = json.loads(line)
        except ValueError as error:
            raise CheckFailed(f"{where} is not JSON: {error}") from None
        text = told.get(field) if isinstance(told, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(map(str, told)) if isinstance(told, dict) else "no keys"
            raise CheckFailed(f"{where} has no text {field!r} (it has {keys})", "see --field")
        yield Piece(text.encode("utf-8", "surrogatepass"), True, where)


def batches(files: list[Path], field: str) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for path in files:
        for piece in pieces_of(path, field):
            batch.append(piece)
            size += len(piece.text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


# -- writing ----------------------------------------------------------------------------------


def make(out: Path, files: list[Path], encoder: Encoder, field: str) -> Header:
    """Under another name until it is whole, so that nobody trains on half of it."""
    hidden = out.with_name(f".{out.name}.{os.getpid()}")
    dtype = dtype_for(encoder.vocab_size)
    shown = Progress(sum(path.stat().st_size for path in files))
    text = 0
    try:
        with hidden.open("wb") as file:
            write_header(file, Header(dtype, encoder.vocab_size, 0))
            for batch in batches(files, field):
                file.write(encoder.encode(batch))
                text += sum(len(piece.text) for piece in batch)
                shown.show(text)
            count = (file.tell() - HEADER) // WIDTHS[dtype]
            if not text:
                raise CheckFailed(f"there is no text in {', '.join(map(str, files[:5]))}")
            header = Header(dtype, encoder.vocab_size, count)
            write_header(file, header)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(out)
    finally:
        shown.clear()
        hidden.unlink(missing_ok=True)
    return header


class Progress:
    """One line that is written over, on a terminal only."""

    def __init__(self, total: int) -> None:
        self.total, self.began, self.last = total, time.monotonic(), 0.0
        self.wanted = sys.stderr.isatty()

    def show(self, done: int) -> None:
        now = time.monotonic()
        if self.wanted and now - self.last > 0.2:
            self.last = now
            rate = done / 1e6 / max(1e-9, now - self.began)
            line = f"{done / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, {rate:,.1f} MB/s"
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.wanted:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.bin")
    parser.add_argument("paths", type=Path, nargs="+", metavar="FILE_OR_DIR")
    parser.add_argument("--tokenizer", type=Path, metavar="tokenizer.json")
    parser.add_argument("--end", metavar="TOKEN", help="of the tokenizer, after each document")
    parser.add_argument(
        "--suffix", action="append", help="of files in directories (.txt and .jsonl); repeatable"
    )
    parser.add_argument("--field", default="text", help="the text's key in a .jsonl file (text)")
    parser.add_argument("--force", action="store_true", help="write over OUT.bin")
    parser.add_argument("--json", action="store_true", help="say what was made as JSON")
    return parser.parse_args()


def main() -> int:
    given = options()
    try:
        if given.out.exists() and not given.force:
            raise UsageError(f"{given.out} exists already", "write over it with --force")
        if given.end is not None and given.tokenizer is None:
            raise UsageError("--end names a token of a tokenizer, but there is no --tokenizer")
        files = files_of(given.paths, given.suffix or [".txt", ".jsonl"])
        encoder = Tokenizer(given.tokenizer, given.end) if given.tokenizer else Bytes()
        header = make(given.out, files, encoder, given.field)
    except OrchestratorError as error:
        print(f"make_tokens: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"make_tokens: {error.filename or given.out}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make_tokens: stopped; nothing was written", file=sys.stderr)
        return EXIT_STOPPED
    made = {"path": str(given.out), "files": len(files), **asdict(header)}
    if given.json:
        print(json.dumps(made))
    else:
        print(
            f"{given.out}: {header.count:,} tokens ({header.dtype}) of {len(files)}"
            f" file{'s' * (len(files) != 1)}; model.vocab_size at least {header.vocab_size}"
        )
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
