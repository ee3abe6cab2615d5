import pytest

from orchestrator.common import text
from orchestrator.common.errors import UsageError


@pytest.mark.parametrize(
    ("count", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1 kB", "0.977 KiB"),
        (1024, "1.02 kB", "1 KiB"),
        (99_440, "99.4 kB", "97.1 KiB"),
        (999_499, "999 kB", "976 KiB"),
        (999_500, "1 MB", "976 KiB"),
        (12_345_678_901, "12.3 GB", "11.5 GiB"),
        (5 * 10**15, "5000 TB", "4547 TiB"),
    ],
)
def test_size_is_formatted(count: int, decimal: str, binary: str) -> None:
    assert text.format_bytes(count) == decimal
    assert text.format_bytes(count, binary=True) == binary


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0 s"),
        (3.6e-7, "0.36 us"),
        (2.5e-5, "25 us"),
        (0.01234, "12.3 ms"),
        (1.0, "1 s"),
        (59.4, "59.4 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3600, "1 h 00 min"),
        (86399, "23 h 59 min"),
        (90000, "1 d 01 h"),
    ],
)
def test_duration_is_formatted(seconds: float, written: str) -> None:
    assert text.format_duration(seconds) == written


def test_plural_is_formatted() -> None:
    assert [text.plural(count, "node") for count in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


def test_table_aligns_columns() -> None:
    rows = [("step", "size", ""), ("7", "10 kB", "complete"), ("120", "1 B", "")]
    assert text.align_columns(rows, right={0, 1}) == [
        "step   size",
        "   7  10 kB  complete",
        " 120    1 B",
    ]
    assert text.align_columns([]) == []
    assert text.align_columns([("a long cell", "x"), ("b", "y")], widest=5) == [
        "a long cell  x",
        "b  y",
    ]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("14d", 1209600),
        ("36h", 129600),
        ("90m", 5400),
        ("2w", 1209600),
        ("1.5 h", 5400),
        ("0d", 0),
        ("14days", 1209600),
        ("3 Hours", 10800),
        ("90min", 5400),
        ("30s", 30),
    ],
)
def test_parse_seconds_reads_units(written: str, seconds: float) -> None:
    assert text.parse_seconds("--age", written) == seconds


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("14", "the unit is missing"),
        ("14x", "the units are s, m (minutes), h (hours), d (days) and w (weeks)"),
        ("3dys", "did you mean 'day'?"),
        ("1e9d", "not a time"),
        ("d", "not a time"),
        ("", "not a time"),
        ("-1d", "not a time"),
        ("infd", "not a time"),
        ("٣d", "not a time"),
        ("3d 4h", "not a time"),
    ],
)
def test_parse_seconds_refuses_invalid_text(written: str, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        text.parse_seconds("--age", written)
    assert words in str(refused.value)
    assert str(refused.value).startswith(f"--age {written}: ")


@pytest.mark.parametrize(
    ("written", "count"),
    [("1K", 1024), ("64M", 64 << 20), ("1.5GiB", 3 << 29), ("8gb", 8 << 30), ("4096", 4096)],
)
def test_parse_size_reads_units(written: str, count: int) -> None:
    assert text.parse_size("--max-size", written) == count


@pytest.mark.parametrize("written", ["", "G", "-1M", "1e9", "5 X", "1Mib2", "nan"])
def test_parse_size_refuses_invalid_text(written: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        text.parse_size("--max-size", written)
