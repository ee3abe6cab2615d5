"""`orchestrator verify` on real nodes: healthy ones, a slowed link, a collective that is wrong."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.launching import BIN, Command, Head

SHORT = ["--seconds", "1", "--max-size", "1M"]


def verify(head: Head, *words: str) -> Command:
    return head.command("orchestrator", "verify", *words)


def kept(head: Head) -> dict[str, Any]:
    text = (head.experiment / "outputs" / "verify.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def test_verify_passes_healthy_nodes(head: Head) -> None:
    words = ["verify", "--nodes", str(head.node_list), "--ssh-config", str(head.cluster.ssh_config)]
    done = subprocess.run(
        [str(BIN / "orchestrator"), *words, "--nproc", "1", "--json", *SHORT],
        cwd=head.directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Standard output has only JSON, because the job's output went to stderr.
    told = json.loads(done.stdout)
    assert told == kept(head)
    assert "2 ranks" in done.stderr
    assert told["complete"]
    assert told["wrong"] == []
    measured = {row["collective"] for row in told["collectives"]}
    assert measured == {"all_reduce", "all_gather", "reduce_scatter"}
    for row in told["collectives"]:
        assert row["seconds"] > 0
    assert {(pair["from"], pair["to"]) for pair in told["pairs"]} == {(0, 1), (1, 0)}
    assert head.record["state"] == "done"
    assert head.nothing_left()


def test_verify_names_slow_node_alone(netns_cluster: Any, tmp_path: Path) -> None:
    head = Head(netns_cluster(3), tmp_path)
    # The pair without it is measured first: a slow one may take all the time there is.
    head.cluster.slow(0, "20mbit")  # type: ignore[attr-defined]
    command = verify(head, "--strict", "--quiet", "--seconds", "10", "--max-size", "16K").ends(3)
    words = r"SLOW: node (\d) \(host\d\) reaches everyone at (\S+) Mb/s, others \S+ [MG]b/s"
    found = [match for line in command.lines if (match := re.fullmatch(words, line))]
    assert len(found) == 1, command.text
    said = found[0]
    # The link has 20 Mb/s, and its token bucket allows a burst.
    assert said[1] == "0" and 5 < float(said[2]) < 100
    assert [one["nodes"] for one in kept(head)["findings"] if one["kind"] == "node"] == [[0]]


# Loaded by every Python of the job: what all_gather gave to rank 1 is changed in one place.
SPOIL = """
import importlib.machinery, sys

class Spoiler:
    def find_spec(self, name, path, target=None):
        if name != "orchestrator.engine.verify.collective_bench":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), spoil(module))
        return spec

def spoil(module):
    right, busbw = module.COLLECTIVES["all_gather"]
    def spoiled(world, count):
        call = right(world, count)
        def run():
            call.run()
            if world.rank == 1 and count == 256:  # the smallest size, for which there is time
                call.result[200] = 99
        return module.Call(run, call.result, call.expected)
    module.COLLECTIVES["all_gather"] = spoiled, busbw

sys.meta_path.insert(0, Spoiler())
"""


def test_verify_fails_on_wrong_result(head: Head) -> None:
    place = head.directory / "spoiled"
    place.mkdir()
    (place / "sitecustomize.py").write_text(SPOIL)
    one = ("--nnodes", "1", "--nproc", "2", "--env", f"PYTHONPATH={place}")
    command = verify(head, *one, *SHORT).ends(1)
    what = "wrong result: element 200 is 99, not "

    (told,) = [line for line in command.lines if line.startswith("WRONG: ")]
    assert told.startswith("WRONG: all_gather of 1 KiB gave rank 1 on node 0 (")
    assert what in told
    assert "every result is right" not in command.text
    assert head.record["state"] == "failed"
    assert what in json.dumps(head.record["verdict"])
    (wrong,) = kept(head)["wrong"]
    assert (wrong["rank"], wrong["element"], wrong["bytes"]) == (1, 200, 1024)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-size", "big"], "write a number with K, M or G"),
        (["--seconds", "nan"], "write how many seconds it may measure"),
        (["--backend", "ncll"], "'ncll' is not one of 'nccl', 'gloo'"),
    ],
)
def test_verify_refuses_invalid_options(tmp_path: Path, words: list[str], expected: str) -> None:
    (tmp_path / "node_ip_list.txt").write_text("127.0.0.1:1\n")
    command = Command([str(BIN / "orchestrator"), "verify", *words], tmp_path, {}).ends(2)
    assert expected in command.text
