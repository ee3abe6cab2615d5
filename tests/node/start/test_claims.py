"""GPUs and slots that one launch holds: who has them, and what a liar can do."""

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.node.job import supervisor
from orchestrator.node.job.run_directory import RunDir
from orchestrator.node.job.supervisor import Supervisor
from orchestrator.node.machine import nvidia
from orchestrator.node.server.session import Refusal, ServerSession
from orchestrator.node.start import claims as module
from orchestrator.node.start.claims import Claims, Device
from orchestrator.node.start.lock_table import LockTable
from orchestrator.protocol.requests.claims import (
    RUNNING,
    STARTING,
    WAITING,
    ClaimEntry,
    DeviceRequest,
    holders_in_words,
)
from orchestrator.protocol.requests.start import Claim, ReadLockTable, Unclaim, Wait
from tests.node.running import bare_spec

ENTRY = ClaimEntry(id="0123456789abcdef", state=WAITING, job="later", since=5.0, order=5.0, wants=1)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCHESTRATOR_CLAIMS", str(tmp_path / "claims"))
    return tmp_path / "claims"


@pytest.fixture
def sessions() -> Iterator[list[ServerSession]]:
    made = [ServerSession(), ServerSession(), ServerSession()]
    yield made
    for session in made:
        session.leave()


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """Eight idle GPUs, as the driver's files list them."""
    for index in range(8):
        top = tmp_path / f"proc/driver/nvidia/gpus/0000:{index + 1:02x}:00.0"
        top.mkdir(parents=True)
        words = f"Model: \t NVIDIA H100\nGPU UUID: \t GPU-{index}\nDevice Minor: \t {index}\n"
        (top / "information").write_text(words)
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / f"dev/nvidia{index}").touch()
    found = partial(module.gpus_here, str(tmp_path))
    monkeypatch.setattr(module, "gpus_here", lambda root="": found())
    monkeypatch.setattr(module, "RIVALS_SECONDS", 0.0)
    tools = tmp_path / "tools"
    tools.mkdir()
    used_by(tools, "")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for name in module.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    return found()


def used_by(tools: Path, lines: str) -> None:
    """Install an nvidia-smi that lists these processes: PID, GPU, MiB, name."""
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<END\n{lines}END\n")
    (tools / "nvidia-smi").chmod(0o755)


def devices(slots: int = 1, of: int = 2, **more: object) -> DeviceRequest:
    return DeviceRequest(job="train", slots=slots, of=of, **more)  # type: ignore[arg-type]


# -- slots, and what a lock is --------------------------------------------------------------------


def test_slot_has_one_holder(sessions: list[ServerSession]) -> None:
    first, second, third = sessions
    assert (
        first.answer(Claim(devices=devices())).held and second.answer(Claim(devices=devices())).held
    )
    answer = third.answer(Claim(devices=devices()))
    assert not answer.held
    assert [(one.names, one.job, one.state) for one in answer.taken] == [
        (("slot 0",), "train", STARTING),
        (("slot 1",), "train", STARTING),
    ]
    first.answer(Unclaim())
    assert third.answer(Claim(devices=devices())).words == "slot 0 of 2"
    assert first.answer(Claim(devices=devices(2))).taken


def test_claim_is_all_or_nothing(sessions: list[ServerSession]) -> None:
    first, second, third = sessions
    assert first.answer(Claim(devices=devices(1, 3))).held
    assert not second.answer(Claim(devices=devices(3, 3))).held
    assert third.answer(Claim(devices=devices(2, 3))).held


def test_claim_waits_for_starting_launch_alone(sessions: list[ServerSession]) -> None:
    first, second, _ = sessions
    first.answer(Claim(devices=devices(2)))
    began = time.monotonic()
    assert not second.answer(Claim(devices=devices(2), patience=0.2)).held
    assert time.monotonic() - began > 0.15
    entry = first.of(Claims).entry
    assert entry is not None
    first.of(Claims).enter(entry.replace(state=RUNNING))
    began = time.monotonic()
    assert not second.answer(Claim(devices=devices(2), patience=60.0)).held
    assert time.monotonic() - began < 30.0


HOLD = """
import sys, time
from orchestrator.node.server.session import ServerSession
from orchestrator.protocol.requests.claims import DeviceRequest
from orchestrator.protocol.requests.start import Claim
session = ServerSession()
assert session.answer(Claim(devices=DeviceRequest(job="killed", slots=1, of=1))).held
print("held", flush=True)
sys.stdin.read()
"""


def test_kernel_frees_locks_of_killed_holder(sessions: list[ServerSession], place: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    (taken,) = sessions[0].answer(Claim(devices=devices(1, 1))).taken
    assert taken.job == "killed"
    holder.kill()
    holder.wait()
    assert sessions[1].answer(Claim(devices=devices(1, 1))).held
    # Its entry is gone.
    assert len(list(place.glob("*.json"))) == 1


def test_supervisor_inherits_locks(
    sessions: list[ServerSession],
) -> None:
    first, second, _ = sessions
    first.answer(Claim(devices=devices(1, 1)))
    held = first.of(Claims).files
    child = subprocess.Popen(["sleep", "1000"], pass_fds=held)
    first.of(Claims).job_started(RunDir("job", 0), bare_spec())
    try:
        assert second.answer(Claim(devices=devices(1, 1))).taken
    finally:
        child.kill()
        child.wait()
    assert second.answer(Claim(devices=devices(1, 1))).held


def test_job_with_restarts_keeps_locks_between_attempts(
    sessions: list[ServerSession],
) -> None:
    first, second, _ = sessions
    spec = bare_spec().replace(restarts=1, devices=devices(1, 1))
    assert first.of(Claims).environment(spec) == {}
    first.of(Claims).job_started(RunDir("job", 0), spec)
    assert second.answer(Claim(devices=devices(1, 1))).taken  # though no supervisor lives
    assert first.of(Claims).environment(spec) == {} and first.of(Claims).files
    first.answer(Unclaim())  # is for those who have not started
    assert second.answer(Claim(devices=devices(1, 1))).taken
    first.of(Claims).drop()
    assert second.answer(Claim(devices=devices(1, 1))).held


@pytest.mark.parametrize(
    ("again", "nnodes", "why", "code", "lives", "lets_go"),
    [
        (False, 1, "", 0, False, True),
        (False, 2, "", 1, False, True),
        # It may still compute there.
        (False, 1, "", 0, True, False),
        (True, 1, "", 0, False, True),
        # Another node may fail.
        (True, 2, "", 0, False, False),
        (True, 1, "", 1, False, False),
        (True, 1, "more nodes can join", 0, False, False),
    ],
)
def test_release_happens_at_final_end(
    monkeypatch: pytest.MonkeyPatch,
    again: bool,
    nnodes: int,
    why: str,
    code: int,
    lives: bool,
    lets_go: bool,
) -> None:
    let_go: list[str] = []
    monkeypatch.setattr(supervisor.files, "unlock_inherited", let_go.append)
    spec = bare_spec().replace(claim="/book/0123.json", restarts=int(again), nnodes=nnodes)
    end, left = SimpleNamespace(why=why), [1] if lives else []
    job = SimpleNamespace(spec=spec, end=end, agent_code=code, living=lambda: left)
    Supervisor.release(job)  # type: ignore[arg-type]
    assert let_go == (["/book/locks"] if lets_go else [])


# -- the book -------------------------------------------------------------------------------------


def test_waiting_entry_is_visible_until_leave(sessions: list[ServerSession]) -> None:
    first, second, _ = sessions
    first.answer(Wait(entry=ENTRY))
    (seen,) = second.answer(ReadLockTable()).entries
    assert (seen.id, seen.state, seen.wants) == (ENTRY.id, WAITING, 1) and seen.user
    assert first.answer(Claim(devices=devices(1, 1))).held
    (seen,) = second.answer(ReadLockTable()).entries
    assert (seen.state, seen.names) == (STARTING, ("slot 0",))
    first.answer(Unclaim())
    (seen,) = second.answer(ReadLockTable()).entries
    assert (seen.state, seen.names) == (WAITING, ())  # back at its place
    first.leave()
    assert second.answer(ReadLockTable()).entries == ()


def test_claim_leaves_enough_for_earlier_entries(sessions: list[ServerSession]) -> None:
    first, second, _ = sessions
    first.answer(Wait(entry=ENTRY.replace(wants=2)))
    answer = second.answer(Claim(devices=devices(2, 3)))
    assert not answer.held and "'s later waits for what is free" in holders_in_words(answer.taken)
    assert second.answer(Claim(devices=devices(1, 3))).held
    second.answer(Unclaim())
    assert second.answer(Claim(devices=devices(2, 3))).taken  # it still has not waited
    assert first.answer(Claim(devices=devices(2, 3))).held


def test_entry_without_living_writer_is_ignored(sessions: list[ServerSession], place: Path) -> None:
    lock_table = LockTable()
    lock_table.write(ENTRY.replace(user="another"))
    (place / "fedcba9876543210.json").write_text("{}")
    (place / "0000000000000000.json").symlink_to("/etc/passwd")
    (place / "aaaaaaaaaaaaaaaa.json").write_text(json.dumps({"id": ENTRY.id}))
    assert sessions[0].answer(ReadLockTable()).entries == ()
    lock_table.close()


def test_owner_of_entry_is_owner_of_file(sessions: list[ServerSession]) -> None:
    sessions[0].answer(Wait(entry=ENTRY.replace(user="the emperor")))
    (seen,) = sessions[1].answer(ReadLockTable()).entries
    assert seen.user != "the emperor"


def test_entry_text_is_cleaned(
    sessions: list[ServerSession],
) -> None:
    said = ENTRY.replace(job="x\norchestrator: done\x1b[2J", names=("\r",))
    sessions[0].answer(Wait(entry=said))
    (seen,) = sessions[1].answer(ReadLockTable()).entries
    assert (seen.job, seen.names) == ("x?orchestrator: done?[2J", ("?",))


ANOTHER = """
import os, resource, sys
import encodings.ascii, encodings.latin_1  # this Python may be below a home directory
import orchestrator.node.start.requests
from orchestrator.node.server.session import ServerSession
from orchestrator.node.start.claims import Claims, Device
from orchestrator.protocol.requests.claims import DeviceRequest
from orchestrator.protocol.requests.start import Claim
os.setgroups([])
os.setgid(65534)
os.setuid(int(sys.argv[1]))
os.umask(0o077)
session = ServerSession()
answer = session.answer(Claim(devices=DeviceRequest(job="theirs", slots=1, of=2)))
print(answer.held, answer.words, flush=True)
try:
    session.of(Claims).opened().remove(sys.argv[2])
except OSError as error:
    print(error, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be others")
def test_users_share_one_lock_table(
    sessions: list[ServerSession], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first creates it under any umask; the others lock it and change their own entries."""
    with tempfile.TemporaryDirectory() as open_to_all:
        Path(open_to_all).chmod(0o777)
        monkeypatch.setenv("ORCHESTRATOR_CLAIMS", f"{open_to_all}/claims")
        sessions[0].answer(Wait(entry=ENTRY.replace(wants=0)))
        others = [
            subprocess.Popen(
                [sys.executable, "-c", ANOTHER, uid, ENTRY.id],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for uid in ("65534", "65533")
        ]
        said = []
        for other in others:
            assert other.stdout is not None
            said.append((other.stdout.readline().strip(), other.stdout.readline()))
        assert sorted(first for first, _ in said) == ["True slot 0 of 2", "True slot 1 of 2"]
        assert all("Operation not permitted" in second for _, second in said)
        taken = sessions[1].answer(Claim(devices=devices(1, 2))).taken
        assert {one.user for one in taken} == {"nobody", "user 65533"}
        assert all(
            stat.S_IMODE(file.stat().st_mode) == 0o644
            for file in Path(open_to_all).glob("claims/*.json")
        )
        for other in others:
            other.communicate("")
        assert sessions[1].answer(Claim(devices=devices(2, 2))).held


# -- GPUs -----------------------------------------------------------------------------------------


def test_claimed_gpus_are_neighbours(sessions: list[ServerSession], gpus: list[Device]) -> None:
    first, second, third = sessions
    assert first.answer(Claim(devices=devices(gpus=2))).words == "GPU 0-1 of 8"
    assert second.answer(Claim(devices=devices(gpus=4))).words == "GPU 2-5 of 8"
    spec = bare_spec().replace(devices=devices(gpus=2))
    assert third.of(Claims).environment(spec) == {"CUDA_VISIBLE_DEVICES": "GPU-6,GPU-7"}
    second.answer(Unclaim())
    assert second.answer(Claim(devices=devices())).taken  # all eight, of which four are free
    with pytest.raises(Refusal, match=r"GPU 0-1: .*train.*; GPU 6-7: "):
        second.of(Claims).environment(bare_spec().replace(devices=devices()))


def test_claim_of_all_gpus_sets_no_variable(
    sessions: list[ServerSession], gpus: list[Device]
) -> None:
    spec = bare_spec().replace(devices=devices())
    assert sessions[0].of(Claims).environment(spec) == {}
    assert sessions[0].of(Claims).claimed().words == "GPU 0-7"


def test_claim_above_gpu_count_is_refused(
    sessions: list[ServerSession], gpus: list[Device]
) -> None:
    assert "has 8 GPUs for this job, and 9 are wanted" in (
        sessions[0].answer(Claim(devices=devices(gpus=9))).lacking
    )


@pytest.mark.parametrize(
    ("named", "held"),
    [
        ("2,3", "GPU 2-3 of 2"),
        ("GPU-5", "GPU 5"),
        ("7,1,junk,0", "GPU 1,7"),
        ("MIG-a/1", "MIG-a/1"),
        ("-1", ""),
    ],
)
def test_visible_devices_of_launch_are_claimed(
    sessions: list[ServerSession], gpus: list[Device], named: str, held: str
) -> None:
    answer = sessions[0].answer(Claim(devices=devices(visible=named)))
    assert answer.held and answer.words == held.replace(" of 2", "")
    if "GPU 2" in held:
        assert sessions[1].answer(Claim(devices=devices(visible="3"))).taken
        assert sessions[1].answer(Claim(devices=devices(visible="4"))).held


def test_gpu_in_use_is_not_claimed(
    sessions: list[ServerSession], gpus: list[Device], tmp_path: Path
) -> None:
    used_by(
        tmp_path / "tools",
        f"{os.getpid()}, GPU-3, 60000, /usr/bin/python3\x1b[2J\n"
        "77, GPU-0, 20, nvidia-cuda-mps-server\n",
    )
    # Each look costs a command.
    assert sessions[0].answer(ReadLockTable()).free == 8
    answer = sessions[0].answer(Claim(devices=devices()))
    (taken,) = answer.taken
    assert (taken.names, taken.program, taken.pid) == (("GPU 3",), "python3?[2J", os.getpid())
    assert sessions[0].answer(Claim(devices=devices(gpus=4))).words == "GPU 4-7 of 8"
    assert sessions[1].answer(Claim(devices=devices(gpus=2))).words == "GPU 0-1 of 8"
    assert sessions[2].answer(Claim(devices=devices(gpus=2))).taken


def test_unknown_gpu_use_is_reported(
    sessions: list[ServerSession], gpus: list[Device], tmp_path: Path
) -> None:
    (tmp_path / "tools/nvidia-smi").write_text("#!/bin/sh\necho broken; exit 9\n")
    answer = sessions[0].answer(Claim(devices=devices()))
    assert answer.held and "exit code 9: broken" in answer.unsure


def test_container_sees_own_gpus_alone(tmp_path: Path, gpus: list[Device]) -> None:
    (tmp_path / "dev/nvidia0").unlink()
    assert [card.uuid for card in nvidia.read_cards(str(tmp_path), seen=True)] == [
        f"GPU-{index}" for index in range(1, 8)
    ]
