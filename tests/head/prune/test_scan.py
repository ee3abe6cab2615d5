from __future__ import annotations

import time

import pytest

from orchestrator.head.prune import scan


@pytest.mark.parametrize(
    ("name", "when"),
    [
        ("m_20260131_235959", "20260131 235959"),
        ("my run 'x'\n_20260131_235959", "20260131 235959"),
        ("-rf_20260131_235959", "20260131 235959"),
        ("m_20250101_000000_20260131_235959", "20260131 235959"),
        ("m_20261331_235959", None),
        ("m_20260230_000000", None),
        ("m_00000000_000000", None),
        (".m_20260131_235959", None),
        ("m_20260131_235959 ", None),
        ("m_20260131_235959\n", None),
        ("_20260131_235959", None),
        ("m_٢٠٢٦٠١٣١_235959", None),
        ("m", None),
        ("", None),
    ],
)
def test_the_time_in_a_name(name: str, when: str | None) -> None:
    told = scan.stamp(name)
    shown = None if told is None else time.strftime("%Y%m%d %H%M%S", time.localtime(told))
    assert shown == when
