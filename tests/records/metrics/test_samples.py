"""A node's samples, read by a head that does not trust them."""

import json
from pathlib import Path

from orchestrator.records.metrics import samples

ABOUT = {"time": 1.0, "about": {"host": "gpu1", "cpus": 8, "memory_bytes": 100, "gpus": ["H100"]}}
LINE = {
    "cpu": 0.5,
    "memory_bytes": 50,
    "net": {"eth0": [100, 200], "ib0": [1, 2]},
    "disks": {"/": [5, 10]},
    "gpu": {"use": [0.5, None, 1.0], "watts": [100, 200, 300]},
}
NONSENSE = [
    "", "x", "[]", "3", '{"time": "now"}', '{"time": 1e999}', "[" * 10000,
    '{"time": 2, "net": {"a": [1], "b": 3, "c": ["x", 1]}, "gpu": {"use": 3}, "disks": []}',
]  # fmt: skip


def test_last_skips_invalid_samples(tmp_path: Path) -> None:
    path = tmp_path / "node_00_metrics.jsonl"
    written = [json.dumps(line) for line in (ABOUT, {"time": 2.0, **LINE})]
    path.write_text("\n".join([*written, *NONSENSE, '{"time": 4, "cp']))
    (first,) = samples.read_last_samples(path, 9)
    assert (first.cpu, first.memory, first.received, first.sent) == (0.5, 50, 101, 202)
    assert first.gpu("use") == 0.75 and first.gpu("watts") == 200 and first.gpu("none") is None
    machine = samples.read_machine(path)
    assert (machine.host, machine.gpus) == ("gpu1", ("H100",))
    assert samples.read_machine(tmp_path / "none") == samples.AttemptMachine()


def test_every_orders_files_by_attempt(tmp_path: Path) -> None:
    for name in ("node_00_metrics_10", "node_00_metrics_2", "node_00_metrics", "node_01_metrics"):
        (tmp_path / f"{name}.jsonl").touch()
    (tmp_path / "rank_00_metrics.jsonl").touch()
    found = samples.list_sample_files(tmp_path)
    assert [path.stem[16:] for path in found[0]] == ["", "2", "10"]
    assert list(found) == [0, 1]
    assert samples.newest_sample_file(tmp_path, 0) == found[0][-1]
    assert samples.newest_sample_file(tmp_path, 7) is None


def test_last_returns_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "grows"
    assert not samples.read_last_samples(path, 3)
    with path.open("a") as file:
        for at in range(5):
            file.write(json.dumps({"time": at, "cpu": 0.1}) + "\n")
        file.write('{"time": 5,')
        file.flush()
        assert [sample.time for sample in samples.read_last_samples(path, 3)] == [2, 3, 4]
        file.write(' "cpu": 0.2}\n')
        file.flush()
        assert [sample.time for sample in samples.read_last_samples(path, 3)] == [3, 4, 5]
