import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB, which can really be full."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    directory = tmp_path / "disk"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", directory], check=True)
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


@pytest.fixture(scope="module")
def no_groups_left() -> Iterator[None]:
    """Leave no process group to other tests: a Trainer makes one of this process."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
