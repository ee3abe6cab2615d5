"""Turn text files into a file of tokens, for dataset.path.

    python scripts/make_tokens.py tokens.bin texts/ more.txt
    python scripts/make_tokens.py tokens.bin corpus.jsonl --tokenizer tokenizer.json

Without a tokenizer, a token is a byte, and 256 ends a document. A file is a document; in a .jsonl
file, every line is one. Memory use does not grow with the size of the text.

(It is not called tokenize.py, because that would hide Python's own module from all scripts here.)
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

from orchestrator.common.errors import (
    EXIT_STOPPED,
    CheckFailed,
    OrchestratorError,
    UsageError,
    did_you_mean,
)
from orchestrator.engine.data.tokens import HEADER, WIDTHS, Header, dtype_for, write_header

# Bytes of a document that are read at a time.
PIECE = 1 << 18
# Bytes that a tokenizer gets at a time, in pieces that it spreads over the cores.
BATCH = 1 << 22
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Piece(NamedTuple):
    text: bytes
    # True if the document ends here.
    ends: bool
    where: str


class Encoder(Protocol):
    vocab_size: int

    def encode(self, pieces: list[Piece]) -> bytes:
        """Return the tokens as little-endian numbers."""
        ...


class Bytes:
    vocab_size = 257

    def encode(self, pieces: list[Piece]) -> bytes:
        tokens = bytearray()
        for piece in pieces:
            wide = bytearray(2 * len(piece.text))
            wide[::2] = piece.text
            tokens += wide + (b"\x00\x01" if piece.ends else b"")
        return bytes(tokens)


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
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001  the package has no error type of its own
            raise CheckFailed(f"{path} is not a tokenizer.json: {error}") from None
        known: dict[str, int] = self.tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(known.values()) + 1
        self.kind = "H" if WIDTHS[dtype_for(self.vocab_size)] == 2 else "I"
        ends = [token for token in ([end] if end is not None else ENDS) if token in known]
        if not ends:
            what = f"no token {end!r}" if end else f"none of {', '.join(ENDS)}"
            raise UsageError(
                f"{path} has {what}{did_you_mean(end or '', known)}",
                "name the token that ends a document with --end TOKEN",
            )
        self.end = known[ends[0]]

    def encode(self, pieces: list[Piece]) -> bytes:
        tokens = array(self.kind)
        texts = [text_of(piece) for piece in pieces]
        encoded = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        for piece, encoding in zip(pieces, encoded, strict=True):
            tokens.extend(encoding.ids)
            if piece.ends:
                tokens.append(self.end)
        if sys.byteorder == "big":
            tokens.byteswap()
        return tokens.tobytes()


def text_of(piece: Piece) -> str:
    try:
        return piece.text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckFailed(f"{piece.where} is not UTF-8: {error.reason}") from None


# -- reading ----------------------------------------------------------------------------------


def files_of(paths: list[Path], suffixes: list[str]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"there is no file or directory {path}")
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(file for file in path.rglob("*") if file.is_file())
        chosen = [file for file in inside if file.suffix in suffixes]
        if not chosen:
            others = sorted({file.suffix for file in inside if file.suffix})[:8]
            raise UsageError(
                f"{path} has no files ending in {' or '.join(suffixes)}",
                f"it has {', '.join(others)}: choose with --suffix" if others else "",
            )
        files += chosen
    return files


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
    """Read up to the end of a line; if it is very long, up to the end of a character."""
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
            document = json.loads(line)
        except ValueError as error:
            raise CheckFailed(f"{where} is not JSON: {error}") from None
        text = document.get(field) if isinstance(document, dict) else None
        if not isinstance(text, str):
            keys = ", ".join(map(str, document)) if isinstance(document, dict) else "no keys"
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
    """Write the tokens under a hidden name until all are there, so that half a file is not used."""
    hidden = out.with_name(f".{out.name}.{os.getpid()}")
    dtype = dtype_for(encoder.vocab_size)
    progress = Progress(sum(path.stat().st_size for path in files))
    text = 0
    try:
        with hidden.open("wb") as file:
            write_header(file, Header(dtype, encoder.vocab_size, 0))
            for batch in batches(files, field):
                file.write(encoder.encode(batch))
                text += sum(len(piece.text) for piece in batch)
                progress.show(text)
            count = (file.tell() - HEADER) // WIDTHS[dtype]
            if not text:
                raise CheckFailed(f"there is no text in {', '.join(map(str, files[:5]))}")
            header = Header(dtype, encoder.vocab_size, count)
            write_header(file, header)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(out)
    finally:
        progress.clear()
        hidden.unlink(missing_ok=True)
    return header


class Progress:
    """One line that is overwritten, on a terminal only."""

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
    parser.add_argument("--end", metavar="TOKEN", help="the token that ends each document")
    parser.add_argument(
        "--suffix", action="append", help="which files of a directory (.txt, .jsonl); repeatable"
    )
    parser.add_argument("--field", default="text", help="the text's key in a .jsonl file (text)")
    parser.add_argument("--force", action="store_true", help="overwrite OUT.bin")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def main() -> int:
    given = options()
    try:
        if given.out.exists() and not given.force:
            raise UsageError(f"{given.out} already exists", "overwrite it with --force")
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
    if given.json:
        print(json.dumps({"path": str(given.out), "files": len(files), **asdict(header)}))
    else:
        print(
            f"{given.out}: {header.count:,} tokens ({header.dtype}) from {len(files)}"
            f" file{'s' * (len(files) != 1)}; model.vocab_size must be at least {header.vocab_size}"
        )
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
