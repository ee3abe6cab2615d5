"""The doctor's findings on machines with one fault, and none on sound ones."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.head.doctor.examination import (
    CHECKS,
    Diagnosis,
    diagnosis_to_json,
    diagnosis_to_text,
    judge_case,
)
from orchestrator.head.doctor.findings import (
    BAD,
    UNKNOWN,
    WARN,
    Case,
    Examined,
    Finding,
    Needs,
    odd_values,
)
from orchestrator.head.nodes.facts import Facts, ProbedNode
from orchestrator.head.nodes.node_list import Node
from orchestrator.head.plan import nccl_transport
from orchestrator.head.plan.model import NodeAddress
from orchestrator.head.screen.output import Terminal
from orchestrator.protocol.facts import (
    Card,
    Checkup,
    Disk,
    Gpu,
    Holder,
    Leftover,
    Limits,
    Torch,
    Xid,
)
from orchestrator.protocol.requests.machine import LARGE_LOST
from orchestrator.protocol.spec import Target
from tests.head.plan.probed import facts, infiniband, interface, roce, software

GIB = 1 << 30
ROOM = Disk("/job", 100 * GIB, 50 * GIB, 10**6, 10**6, "/", writable=True)
SHM = Disk("/dev/shm", 64 * GIB, 64 * GIB, 10**6, 10**6, "/dev/shm", writable=True)
FREE = Limits((1 << 20, 1 << 20), (-1, -1))
H100 = Card("nvidia", "NVIDIA H100 80GB HBM3", memory=80 * GIB, used=0)


def machine(n: int, **fields: Any) -> Facts:
    sound = {
        "hostname": f"host{n}",
        "torch": "2.13.0+cu130",
        "interfaces": (interface("eth0", speed=25000),),
        "gpus": 8,
        "cards": (H100,) * 8,
        "software": software(),
        "disk": ROOM,
        "shm": SHM,
        "limits": FREE,
        "boot": f"boot{n}",
        "rdma": (infiniband("mlx5_0"),),
    }
    return facts(f"eth0 10.0.0.{n}/24", **{**sound, **fields})


def look(**fields: Any) -> Checkup:
    told = Torch("/usr/bin/python3", "13.0", "", "2.27.5", True)
    sound = {
        "gpus": tuple(Gpu(vendor="nvidia", index=i, model="H100", ecc_errors=0) for i in range(8)),
        "holders": (),
        "xids": (),
        "script": "abcd",
        "torch": told,
        "names": ("127.0.1.1",),
    }
    return Checkup(**{**sound, **fields})


def case(*changed: dict[str, Any], **fields: Any) -> Case:
    """Four nodes; the last ones with these facts, `checkup=` and `slots=`."""
    nodes = []
    for n in range(1, 5):
        change = dict(changed[n - 5 + len(changed)] if n > 4 - len(changed) else {})
        closer = change.pop("checkup", look())
        slots = change.pop("slots", None)
        found = machine(n, **change)
        nodes.append(Examined(f"gpu{n}", found, f"10.0.0.{n}", checkup=closer, slots=slots))
    addresses = {f"gpu{n}": NodeAddress(f"10.0.0.{n}", "eth0") for n in range(1, 5)}
    return Case(
        tuple(nodes), **{"full": True, "addresses": addresses, "needs": Needs(port=29500), **fields}
    )


def findings(one: Case) -> list[Finding]:
    return list(judge_case(one, 0.0).findings)


@pytest.mark.parametrize(("engine", "level"), [(True, BAD), (False, WARN)])
def test_nproc_above_gpus_is_reported(engine: bool, level: str) -> None:
    seen = findings(case({"slots": 9}, needs=Needs(nproc=9, engine=engine)))
    assert [(finding.check, finding.level) for finding in seen] == [("gpus", level)]
    assert seen[0].what == "gpu1, gpu2, gpu3, gpu4: it has 8 GPUs, and --nproc is 9"
    assert findings(case({"slots": 9}, needs=Needs(nproc=8))) == []


def test_engine_needs_torch_that_can_shard() -> None:
    changed = [{"torch": "2.7.1+cu126"}, {"torch": "2.7.1"}, {"torch": "2.8.0"}]
    told = [found.what for found in findings(case(*changed, needs=Needs(engine=True)))]
    assert "gpu2: the engine needs torch 2.8 or later, and this is 2.7.1+cu126" in told
    assert not any("gpu4: the engine needs" in what for what in told)
    assert not any("the engine needs" in found.what for found in findings(case(*changed)))


def test_healthy_machines_give_no_finding() -> None:
    assert findings(case()) == []
    assert findings(case(full=False)) == []
    assert findings(Case(case().nodes[:1], full=True)) == []
    assert findings(Case((), full=True)) == []


def test_cpu_torch_on_gpu_node_is_refused_for_python_launch() -> None:
    changed = [{"torch": "2.13.0+cpu"}] * 4
    (found,) = findings(case(*changed, full=False))
    assert (found.level, found.nodes) == (BAD, ("gpu1", "gpu2", "gpu3", "gpu4"))
    assert "on gpu1: " in found.fix and "pip install" in found.fix
    assert findings(case(*changed, full=False, needs=Needs(torch=False))) == []
    # The script may use a torch of its own.
    shell = {"target": Target(kind="program", name="run.sh")}
    assert findings(case(*[{**one, **shell} for one in changed], full=False)) == []
    assert findings(case(*[{**one, "gpus": 0, "cards": ()} for one in changed], full=False)) == []


def gpu(**fields: Any) -> Checkup:
    return look(gpus=(Gpu(vendor="nvidia", index=3, model="H100", **fields),))


DISK_FULL = Disk("/job", 100 * GIB, 1 << 20, 10**6, 10**6, "/", writable=True)
NO_INODES = Disk("/job", 100 * GIB, 50 * GIB, 10**6, 3, "/", writable=True)
SMALL_HOME = DISK_FULL.replace(path="/home/me/.orchestrator", mounted="/home")
READ_ONLY = Disk("/job", 100 * GIB, 50 * GIB, 10**6, 9**6, "/", writable=False)
CONTAINER = Disk("/dev/shm", 64 << 20, 64 << 20, 9**6, 9**6, "/dev/shm", writable=True)
FULL = Disk("/dev/shm", 64 * GIB, 4096, 9**6, 9**6, "/dev/shm", writable=True)
PLANTED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"python_version": "3.9.2"}, "python", WARN, "Python: 3.9 on gpu4, 3.11 on the others"),
    ({"torch": ""}, "torch", BAD, "gpu4: /usr/bin/python3 has no torch"),
    ({"torch": "", "torch_elsewhere": ("/opt/conda/bin/python",)}, "torch", BAD, "has no torch"),
    ({"torch": "2.12.1+cu130"}, "torch", BAD, "torch: 2.12.1 on gpu4, 2.13.0 on the others"),
    ({"torch": "2.13.0+cu126"}, "torch", WARN, "builds of torch: 2.13.0+cu126 on gpu4"),
    ({"torch": "2.13.0+cpu"}, "torch", BAD,
     "gpu4: it has 8 GPUs, and its torch 2.13.0+cpu is built for CPUs"),
    ({"software": software().replace(cuda="")}, "torch", BAD,
     "gpu4: it has 8 GPUs, and its torch 2.13.0+cu130 is built for CPUs"),
    ({"checkup": look(torch=Torch("/p", hip="7.0", available=False))}, "torch", BAD,
     "its torch can use none: it is built for ROCm 7.0"),
    ({"checkup": look(torch=Torch("/p", error="ImportError: libcudart"))}, "torch", BAD,
     "gpu4: importing torch fails: ImportError: libcudart"),
    ({"checkup": look(torch=Torch("/p", "13.0", nccl="2.27.5", available=False))},
     "torch", BAD, "gpu4: it has 8 GPUs, and its torch can use none"),
    ({"checkup": look(torch=None, problems={"torch": "it did not end"})}, "torch", UNKNOWN,
     "torch was not tried: it did not end"),
    ({"checkup": look(torch=Torch("/p", "13.0", nccl="2.21.5", available=True))},
     "nccl", BAD, "NCCL: 2.21.5 on gpu4, 2.27.5 on the others"),
    ({"gpus": 7}, "gpus", WARN, "GPUs: 7 on gpu4, 8 on the others"),
    ({"cards": (Card("nvidia", "A100"),)}, "gpus", WARN, "GPU models: A100 on gpu4"),
    ({"slots": 9}, "gpus", BAD, "gpu4: it has 8 GPUs, and slots=9 in the node list"),
    ({"checkup": gpu(problem="nvidia-smi says 'ERR!' for its name")}, "gpus", BAD,
     "gpu4: GPU 3: nvidia-smi says 'ERR!'"),
    ({"checkup": gpu(ecc_errors=2)}, "gpus", BAD, "2 uncorrected memory errors"),
    ({"checkup": gpu(rows_pending=True)}, "gpus", WARN, "waits to be remapped"),
    ({"checkup": gpu(pcie_width=8, pcie_width_most=16)}, "gpus", WARN, "PCIe x8 of x16"),
    ({"checkup": look(xids=(Xid("0000:4f:00", 79, "GPU has fallen off the bus.", 1),))}, "gpus",
     WARN, "Xid 79"),
    ({"checkup": look(problems={"gpus": "nvidia-smi did not end within 20 s"})}, "gpus", BAD,
     "did not end within 20 s"),
    ({"checkup": look(holders=(Holder(7, "u", "python", 4 * GIB, "alice"),))}, "busy", WARN,
     "gpu4: alice holds 4 GiB on its GPUs (PID 7)"),
    ({"leftovers": (Leftover("run_20260101_000000-abc123", alive=True),)}, "ours", WARN,
     "the job run_20260101_000000-abc123 runs there"),
    ({"leftovers": (Leftover("run_20260101_000000-abc123", alive=False),)}, "ours", WARN,
     "was left without its supervisor"),
    ({"checkup": look(script="9999")}, "code", BAD, "sha256 of the program: 9999 on gpu4"),
    ({"workdir_exists": False}, "workdir", BAD, "gpu4: there is no directory /job"),
    ({"disk": READ_ONLY}, "workdir", WARN, "gpu4: /job cannot be written"),
    ({"disk": DISK_FULL}, "disk", BAD, "gpu4: /: 1 MiB free of 100 GiB"),
    ({"disk": NO_INODES}, "disk", BAD, "3 inodes left"),
    ({"home": SMALL_HOME}, "disk", BAD, "gpu4: /home: 1 MiB free of 100 GiB"),
    ({"disk": None, "problems": {"disk": "it did not answer within 3 s"}}, "disk", BAD,
     "did not answer"),
    ({"shm": CONTAINER}, "shm", WARN, "/dev/shm has 64 MiB in all"),
    ({"shm": None}, "shm", BAD, "/dev/shm is not there: torchrun needs it"),
    ({"shm": SHM.replace(writable=False)}, "shm", BAD, "/dev/shm cannot be written"),
    ({"shm": None, "problems": {"shm": "no answer"}}, "shm", UNKNOWN, "/dev/shm: no answer"),
    ({"shm": FULL}, "shm", BAD, "/dev/shm is full: 4 KiB free of 64 GiB"),
    ({"limits": Limits((1 << 20, 1 << 20), (65536, 65536))}, "limits", BAD,
     "gpu4: memlock is 64 KiB"),
    ({"limits": Limits((256, 4096), (-1, -1))}, "limits", WARN,
     "256 open files at most"),
    ({"clock_offset": 2.5}, "clock", WARN, "gpu4: its clock is 2.5 s ahead of"),
    ({"clock_offset": -3600.0}, "clock", WARN, "3600.0 s behind"),
    ({"interfaces": (interface("eth0", speed=1000),)}, "net", WARN, "1000 Mb/s on gpu4"),
    ({"interfaces": (interface("eth0", speed=25000, state="down"),)}, "net", BAD, "eth0 is down"),
    ({"rdma": (infiniband("mlx5_0", state="DOWN"),)}, "net", WARN, "RDMA ports that are up"),
    ({"interfaces": (interface("eth0", speed=25000, mtu=9000),)}, "mtu", WARN, "MTU: 9000 on gpu4"),
    ({"checkup": look(names=("10.9.9.9",))}, "names", WARN, "resolves to 10.9.9.9"),
    ({"checkup": look(names=None, problems={"names": "unknown"})}, "names", WARN,
     "its own name 'host4' does not resolve"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "check", "level", "words"), PLANTED)
def test_single_defect_gives_single_finding(
    change: dict[str, Any], check: str, level: str, words: str
) -> None:
    (found,) = findings(case(change))
    assert (found.check, found.level, found.nodes) == (check, level, ("gpu4",))
    assert words in found.what
    assert "{" not in found.fix


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"free": 1 << 20}, WARN, "1 MiB free of 100 GiB"),
        ({"free": 0}, BAD, "0 B free of 100 GiB"),
        ({"inodes_free": 3}, WARN, "3 inodes left"),
        ({"inodes_free": 0}, BAD, "0 inodes left"),
    ],
)
def test_disk_of_experiments_is_checked(change: dict[str, int], level: str, words: str) -> None:
    (found,) = findings(case(head=ROOM.replace(**change)))
    assert (found.check, found.level, found.nodes) == ("disk", level, ())
    assert words in found.what and "on this machine, of /job" in found.what


def test_disk_may_lack_room_and_inodes() -> None:
    both = findings(case({"disk": DISK_FULL.replace(inodes_free=3)}))
    assert [finding.level for finding in both] == [BAD, BAD]


def test_fix_names_most_common_version() -> None:
    (found,) = findings(case({"torch": "2.12.1+cu130"}, {"torch": "2.12.1+cu130"}, {}))
    assert found.nodes == ("gpu2", "gpu3")
    assert found.fix.endswith("pip install torch==2.13.0")
    (found,) = findings(case({"torch": ""}))
    assert found.fix.startswith("orchestrator bootstrap torch==2.13.0 numpy ")


def test_missing_torch_is_one_finding() -> None:
    without = {"torch": "", "checkup": look(torch=Torch("/p", error="No module named 'torch'"))}
    (found,) = findings(case(without, without))
    assert found.nodes == ("gpu3", "gpu4")
    assert found.what == "gpu3, gpu4: /usr/bin/python3 has no torch"


def test_engine_accepts_missing_default_workdir() -> None:
    """Its directory is sent; a directory that the user named is still reported as missing."""
    anywhere = case({"workdir_exists": False}, needs=Needs(workdir=False))
    assert findings(anywhere) == []
    placed = Case((*anywhere.nodes[:-1], replace(anywhere.nodes[-1], placed=True)), full=True,
                  needs=anywhere.needs)  # fmt: skip
    (found,) = findings(placed)
    assert (found.check, found.level, found.nodes) == ("workdir", BAD, ("gpu4",))


def test_fix_quotes_paths_with_spaces() -> None:
    (plain,) = findings(case({"workdir_exists": False}))
    assert plain.fix.startswith("ssh gpu4 mkdir -p /job, or")
    (found,) = findings(case({"workdir_exists": False, "workdir": "/my job"}))
    words = shlex.split(found.fix.partition(", or")[0])
    assert (words[:2], shlex.split(words[2])) == (["ssh", "gpu4"], ["mkdir", "-p", "/my job"])


@pytest.mark.parametrize(
    ("values", "most", "odd"),
    [
        ([], None, {}),
        ([("a", 1)], 1, {}),
        # In a tie the master's version is the expected one.
        ([("a", 1), ("b", 2)], 1, {2: ["b"]}),
        ([("a", 1), ("b", 2), ("c", 2)], 2, {1: ["a"]}),
        ([("a", 1), ("b", 2), ("c", 3), ("d", 1)], 1, {2: ["b"], 3: ["c"]}),
    ],
)
def test_odd_values_names_minority(
    values: list[tuple[str, int]], most: int | None, odd: dict[int, Any]
) -> None:
    assert odd_values(values) == (most, odd)


def blocked(*pairs: tuple[int, int]) -> dict[tuple[str, str, int], str]:
    return {(f"gpu{a}", f"gpu{b}", 40000 + b): "no answer in 3 s" for a, b in pairs}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"interfaces": (interface("eth0", speed=1000),), "rdma": ()},
            "over 1 Gb/s (on gpu1, gpu2",
        ),
        # NCCL uses InfiniBand.
        ({"interfaces": (interface("eth0", speed=1000),)}, ""),
        *(
            ({"interfaces": (interface("eth0", speed=1000),), "rdma": (card,)}, words)
            for card, words in (
                (roce("mlx5_0", "eth1", "10.1.0.1"), ""),
                # A card without an address cannot be used.
                (roce("mlx5_0", "eth1"), "over 1 Gb/s (on gpu1"),
                (roce("cxgb4_0", "eth1", "10.1.0.1", node_type="RNIC"), "over 1 Gb/s"),  # iWARP
            )
        ),
        (
            {
                "interfaces": (interface("eth0", speed=100),),
                "gpus": 0,
                "cards": (),
            },  # gloo does not
            "(on gpu1, gpu2, gpu3, gpu4): 100 million gradients take 32 s a step",
        ),
        # The link's speed is unknown.
        ({"interfaces": (interface("eth0"),), "rdma": ()}, ""),
        ({"rdma": ()}, ""),
    ],
)
def test_link_slow_for_all_is_reported(fields: dict[str, Any], words: str) -> None:
    slow = slow_links("auto", fields)
    assert [(f.check, f.level, len(f.nodes)) for f in slow] == [("net", WARN, 4)] * bool(words)
    assert not slow or words in slow[0].what


def slow_links(profile: str, fields: dict[str, Any], *theirs: str) -> list[Finding]:
    """Return the findings for four nodes with these facts, on the network that the plan chooses."""
    changed = [{**fields, "checkup": None}] * 4
    nodes = [
        ProbedNode(Node(node.name), known, node.reached) for node, known in case(*changed).seen
    ]
    chosen = nccl_transport.choose_fabric(nodes, profile, frozenset(theirs), frozenset())
    needs = Needs(fabric=chosen.kind)
    seen = findings(case(*changed, full=False, needs=needs))
    return [finding for finding in seen if "the nodes meet over" in finding.what]


def test_unused_cards_do_not_hide_slow_link() -> None:
    slow = {"interfaces": (interface("eth0", speed=1000),)}
    # With nccl.profile=ethernet InfiniBand stays unused.
    assert slow_links("ethernet", slow)
    # The user has chosen the cards.
    assert not slow_links("auto", slow, "NCCL_IB_HCA")
    assert slow_links("auto", {**slow, "rdma": ()}, "NCCL_IB_HCA")


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([(1, 2)], ["gpu1 does not reach gpu2"]),
        ([(1, 2), (2, 1)], ["gpu1 does not reach gpu2", "gpu2 does not reach gpu1"]),
        ([(1, 3), (2, 3), (4, 3)], ["no node reaches gpu3"]),
        ([(3, 1), (3, 2), (3, 4)], ["gpu3 reaches no node"]),
        ([(1, 3), (2, 3), (4, 3), (3, 1), (3, 2), (3, 4)],
         ["no node reaches gpu3", "gpu3 reaches no node"]),
    ],
)  # fmt: skip
def test_unreachable_pairs_are_reported(pairs: Sequence[tuple[int, int]], told: list[str]) -> None:
    found = findings(case(silent=blocked(*pairs)))
    assert [one.what.partition(" (")[0] for one in found] == told
    assert all(one.level == BAD and "firewall" in one.fix for one in found)


def test_lost_large_packets_are_mtu_finding() -> None:
    """It is a matter of the MTU and not of a firewall, and one for both directions."""
    silent = dict.fromkeys(blocked((1, 2), (2, 1)), LARGE_LOST)
    (finding,) = findings(case(silent=silent))
    assert (finding.check, finding.level, finding.nodes) == ("mtu", BAD, ("gpu1", "gpu2"))
    assert finding.what == (
        "between gpu1 and gpu2 small packets arrive, large ones do not"
        " (MTU 1500 on gpu1, 1500 on gpu2)"
    )
    assert "ip link set INTERFACE mtu" in finding.fix


def test_taken_master_port_is_reported() -> None:
    def port(exact: bool, **fields: Any) -> list[tuple[str, str]]:
        one = case(needs=Needs(port=29500, that_port=exact))
        first = Examined("gpu1", machine(1, **fields), "10.0.0.1", checkup=look())
        whole = Case((first, *one.nodes[1:]), full=True, needs=one.needs)
        return [(found.level, found.what) for found in findings(whole)]

    assert port(False, port=29500) == []
    assert port(False, port=29501)[0] == (
        WARN, "gpu1: port 29500 is taken on the master; 29501 would be used"
    )  # fmt: skip
    assert port(True, port=0)[0][0] == BAD


def test_two_names_of_one_machine_are_reported() -> None:
    (found,) = findings(case({"boot": "boot1", "hostname": "host1"}))
    assert (found.check, found.level, found.nodes) == ("names", BAD, ("gpu1", "gpu4"))
    again = Examined("gpu9", machine(1), "10.0.0.9", checkup=look())
    nodes = (*case({"boot": "boot1", "hostname": "host1"}).nodes, again)
    pairs = [found.nodes for found in findings(Case(nodes, full=True)) if found.check == "names"]
    assert pairs == [("gpu1", "gpu4"), ("gpu1", "gpu9")]
    local = [Examined(f"127.0.0.{n}", machine(1), f"127.0.0.{n}", checkup=look()) for n in (2, 3)]
    # The user chose this.
    assert findings(Case(tuple(local), full=True)) == []


@pytest.fixture
def sick() -> Diagnosis:
    one = case({"torch": "2.12.1"}, {"clock_offset": 2.5})
    lost = Examined(
        "gpu5", error="it refuses connections on port 22", fix="is sshd running?\n  or is it off?"
    )
    return judge_case(Case((*one.nodes, lost), full=True, addresses=one.addresses), 0.0)


def test_failure_on_many_nodes_is_one_finding() -> None:
    error, fix = "it refuses connections on port 22", "is sshd running?"
    lost = [Examined(f"gpu{number}", error=error, fix=fix) for number in range(8)]
    odd = Examined("gpu8", error="its host key is another", fix="look")
    first, second = findings(Case((*lost, odd), full=True))
    assert first.nodes == tuple(node.name for node in lost)
    assert first.what == f"gpu[0-7]: {error}"
    assert (second.nodes, second.what) == (("gpu8",), "gpu8: its host key is another")
    denied = [
        Examined(f"gpu{n}", error="it denies ada every key", fix=f"ssh-copy-id ada@10.0.0.{n}")
        for n in range(20)
    ]
    (told,) = findings(Case(tuple(denied), full=True))
    assert told.what == "gpu[0-19]: it denies ada every key"
    assert told.fix == "ssh-copy-id ada@10.0.0.0  # for each of them, with its name"


def test_to_text_prints_findings_and_hints(sick: Diagnosis) -> None:
    lines = diagnosis_to_text(sick).splitlines()
    assert lines[-1].startswith("5 nodes, all checks") and lines[-1].endswith("2 BAD, 1 warn")
    advice = lines.index("       -> is sshd running?")
    assert lines[advice + 1] == "          or is it off?"
    assert "->" not in diagnosis_to_text(sick, hints=False)
    assert "\x1b[1;31mBAD" in diagnosis_to_text(sick, Terminal(color=True))
    assert diagnosis_to_text(judge_case(case(), 0.0)).endswith(
        " s: all is well\n  checked: reach, python, torch, nccl, driver, gpus, busy, ours, code,"
        " workdir, disk, shm, limits, clock, net, mtu, links, port, names"
    )


def test_to_json_lists_checks_per_node(sick: Diagnosis) -> None:
    told = diagnosis_to_json(sick)
    assert (told["ok"], told["full"]) == (False, True)
    assert told["nodes"][2]["checks"]["torch"] == "bad"
    assert told["nodes"][4] == {
        "name": "gpu5",
        "hostname": None,
        "checks": {name: "bad" if name == "reach" else "-" for name in CHECKS},
    }


def test_quick_examination_omits_full_checks() -> None:
    quick = judge_case(case(full=False), 0.0)
    assert not {"busy", "code", "links"} & diagnosis_to_json(quick)["nodes"][0]["checks"].keys()


@pytest.mark.parametrize("check", list(CHECKS.values()), ids=list(CHECKS))
def test_checks_accept_missing_facts(check: Callable[[Case], Any]) -> None:
    bare = facts("eth0 10.0.0.1/24")
    nodes = (Examined("a", bare, "10.0.0.1", checkup=Checkup()), Examined("b", error="down"))
    list(check(Case(nodes, full=True)))
    list(check(Case(nodes, full=False, network_error=("no common network", ""))))
