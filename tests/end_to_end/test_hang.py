"""Jobs that stand still, for real: who keeps the others waiting is said in one line."""

from collections.abc import Callable
from pathlib import Path

from tests.clusters.netns import NetnsCluster
from tests.launching import Head

# It spins, as NCCL does: the processors are busy, nothing is printed, and the wait is old.
SPINNING = """import time, torch, torch.distributed as dist
dist.init_process_group("gloo")

if dist.get_rank() == 1:
    time.sleep(1000)
work = dist.all_reduce(torch.ones(4), async_op=True)
while not work.is_completed():
    pass
"""


def test_hang_names_rank_that_others_wait_for(head: Head) -> None:
    words = r"it never entered all_reduce #1; it is in \S+/hangs.py:5 <module>\(\)"
    script = head.script("hangs.py", SPINNING)
    command = head.launch("--nnodes", "1", "--nproc", "2", "--hang-timeout", "2", script)
    command.wait_for(r"no progress for \d+ s: .*" + words)
    assert command.finish() == 1
    verdict = head.record["verdict"]
    assert (verdict["kind"], verdict["rank"]) == ("hang", 1)
    kept = {path.name for path in (head.experiment / "hang").iterdir()}
    assert {f"node_0_rank_{n}_stacks.txt" for n in range(2)} <= kept
    assert head.nothing_left()


def test_engine_hang_is_found_and_slow_steps_are_not(head: Head) -> None:
    """Silence is no hang where steps go on; a dataset that blocks on one rank is."""
    (head.directory / "slow.py").write_text(
        "import os, time\nfrom torch.utils.data import Dataset\n"
        "class Slow(Dataset):\n"
        "    def __len__(self):\n        return 100000\n"
        "    def __getitem__(self, index):\n"
        "        time.sleep(0.02)\n"
        "        if os.environ['RANK'] == '1' and self.seen > 450:\n"
        "            time.sleep(1000)\n"
        "        self.seen += 1\n"
        "        return {'x': float(index)}\n"
        "    seen = 0\n"
        "def data(split):\n    return Slow()\n"
        "from torch import nn\n"
        "def model():\n    return nn.Linear(1, 1)\n"
        "def loss(model, batch):\n"
        "    x = batch['x'].float()[:, None]\n    return model(x).square().sum(), len(x)\n"
    )
    own = ["model.target=slow:model", "dataset.target=slow:data", "training.loss=slow:loss"]
    own += ["training.max_steps=100000", "logging.interval=100000", "training.batch_size=4"]
    options = [word for value in own for word in ("--set", value)]
    # Longer than one rank may wait for the other at the start, and shorter than the steps go on.
    command = head.launch("--nnodes", "1", "--nproc", "2", "--hang-timeout", "6", *options)
    command.wait_for(r"no progress for \d+ s: it never entered \w+ #\d+; it is in \S+slow.py:9 ")
    assert command.finish() == 1
    assert head.record["verdict"]["rank"] == 1
    assert "NaN" not in command.text


SILENT = """
import time
end = time.monotonic() + 2.5
while time.monotonic() < end:
    pass
print("computed", flush=True)
time.sleep(60)
"""


def test_silent_computation_is_no_hang(head: Head) -> None:
    options = ["--nnodes", "1", "--no-torchrun", "--hang-timeout", "1"]
    command = head.launch(*options, head.script("silent.py", SILENT)).ends(1)
    before, _, after = command.text.partition("computed")
    assert "no progress" not in before
    assert "no progress" in after
    assert head.record["verdict"]["kind"] == "hang"


def walled(netns_cluster: Callable[..., NetnsCluster], tmp_path: Path) -> Head:
    """A firewall before the master's port: torchrun waits for the other node, without a word."""
    cluster = netns_cluster(2)
    for words in (
        "add table inet wall",
        "add chain inet wall in { type filter hook input priority 0 ; }",
        "add rule inet wall in tcp dport 29500 drop",
    ):
        cluster.exec(0, ["nft", words])
    return Head(cluster, tmp_path)


def test_ranks_that_never_start_are_reported(
    netns_cluster: Callable[..., NetnsCluster], tmp_path: Path
) -> None:
    head = walled(netns_cluster, tmp_path)
    head.launch("--hang-timeout", "4", head.script("x.py", "print('never')")).ends(1)
    verdict = head.record["verdict"]
    assert (verdict["kind"], verdict["rank"]) == ("hang", None)
    assert "no rank has started" in verdict["message"]
    assert verdict["fix"].startswith("orchestrator doctor")
    assert not (head.experiment / "hang").exists()
    assert head.nothing_left()
