"""Which variables a program sets before it imports torch is read from its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.node.job import torch_env

SET = "import os\nos.environ['OMP_NUM_THREADS'] = '8'\n"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (SET + "import torch", "OMP_NUM_THREADS"),
        (SET, "OMP_NUM_THREADS"),  # another module may import it
        (SET + "from torch.nn import Linear", "OMP_NUM_THREADS"),
        ("import torch\n" + SET, ""),
        ("import torch.nn as nn\n" + SET, ""),
        (SET.replace("'8'", "'2'"), ""),  # its value already
        (SET.replace("'8'", "str(8)"), "OMP_NUM_THREADS"),
        ("from os import environ\nenviron['TORCH_LOGS'] = 'x'", "TORCH_LOGS"),
        ("import os\nos.environ.setdefault('MKL_NUM_THREADS', '1')", "MKL_NUM_THREADS"),
        ("import os\nos.environ.update(PYTORCH_JIT='0')", "PYTORCH_JIT"),
        ("import os\nos.environ.update({'KMP_BLOCKTIME': '0', **more})", "KMP_BLOCKTIME"),
        ("import os\nos.putenv('TORCH_DISTRIBUTED_DEBUG', 'INFO')", "TORCH_DISTRIBUTED_DEBUG"),
        ("def main():\n  import os\n  os.environ['ATEN_CPU_CAPABILITY'] = 'avx2'\n  import torch",
         "ATEN_CPU_CAPABILITY"),
        ("import os\nos.environ['WANDB_MODE'] = 'offline'", ""),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'", ""),
        ("import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'", ""),  # is read late
        ("import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'x'", ""),
        ("import os\nos.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'", ""),
        ("a = {}\na['OMP_NUM_THREADS'] = '8'\na.update(OMP_NUM_THREADS='8')", ""),
        ("import os\nos.environ[name] = '8'\nos.environ.update(other)", ""),
        ("this is no Python", ""),
        ("\0", ""),
    ],
)  # fmt: skip
def test_what_is_set_before_torch_is_imported(tmp_path: Path, source: str, name: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    assert torch_env.set_early(str(path), {"OMP_NUM_THREADS": "2"}) == name


def test_a_program_without_a_source_sets_nothing(tmp_path: Path) -> None:
    assert torch_env.set_early(str(tmp_path), {}) == ""
    assert torch_env.set_early(str(tmp_path / "missing.py"), {}) == ""
