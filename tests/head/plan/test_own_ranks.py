"""Programs that start ranks by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.head.plan.plan import warning


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("#!/bin/bash\ntorchrun --nnodes 2 train.py\n", "torchrun"),
        ("#!/bin/sh\nset -e; exec torchrun train.py\n", "torchrun"),
        ("#!/bin/bash\nNCCL_DEBUG=INFO python -m torch.distributed.launch x.py", "torch.distrib"),
        ("#!/bin/bash\nif true; then accelerate launch x.py; fi", "accelerate launch"),
        ("#!/bin/bash\n  deepspeed train.py", "deepspeed"),
        ("#!/bin/bash\n# torchrun train.py\npip install deepspeed\nexec python train.py", ""),
        ("#!/bin/bash\necho torchrun is not used here\n", ""),
        ("\x7fELF torchrun train.py", ""),
    ],
)
def test_a_shell_script_around_a_launcher(tmp_path: Path, text: str, calls: str) -> None:
    file = tmp_path / "run.sh"
    file.write_text(text)
    said = warning(file, "program", 1)
    assert bool(said) == bool(calls) and (not calls or f"{file} calls {calls}" in said)


@pytest.mark.parametrize(
    ("text", "ranks", "told"),
    [
        ("mp.spawn(main, nprocs=8)\n", 8, True),
        ("    torch.multiprocessing.spawn(main)\n", 2, True),
        ("mp.spawn(main, nprocs=8)\n", 1, False),
        ("# not mp.spawn(main)\nmain()\n", 8, False),
    ],
)
def test_a_script_that_spawns(tmp_path: Path, text: str, ranks: int, told: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    said = warning(file, "script", ranks)
    assert ("--nproc 1" in said) == told and bool(said) == told
    assert not warning(tmp_path / "elsewhere.py", "script", ranks)
