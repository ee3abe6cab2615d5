from __future__ import annotations

import pytest

from orchestrator import text


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_400, "99.4 kB"),
        (99_900, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (12_345_678_901, "12.3 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_sizes_in_words(size: int, words: str) -> None:
    assert text.size(size) == words
