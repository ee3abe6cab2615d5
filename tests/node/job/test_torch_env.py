"""Which variables a program sets before it imports torch is read from its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.node.job.ranks import torch_env

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
        ("import os\nfor name in ('OMP_NUM_THREADS', 'X'): os.environ[name] = '8'",
         "OMP_NUM_THREADS"),
        ("import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ.get('MKL_NUM_THREADS'))", ""),
        ("import os, torch\n" + SET, ""),
        ("import torchvision, os\n" + SET, "OMP_NUM_THREADS"),
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


@pytest.mark.parametrize(
    ("files", "trains"),
    [
        ({"train.py": "import torch\nsgd = torch.optim.SGD(p, lr=0.1)"}, True),
        ({"train.py": "from orchestrator import Trainer"}, True),
        ({"train.py": "import lightning as L"}, True),
        ({"train.py": "import torch.distributed as dist\ndist.all_reduce(t)"}, False),
        ({"train.py": "import own", "own.py": "loss.backward()"}, True),
        ({"train.py": "from lib import steps", "lib/steps.py": "optimizer.step()"}, False),
        ({"train/__main__.py": "optim"}, True),
        # An optimizer's import would come too early for these.
        ({"train.py": "import torch, os\nos.environ['TORCHDYNAMO_DISABLE'] = '1'\noptim"}, False),
        ({"train.py": "import own\noptim", "own.py": "import os\nos.putenv('TORCH_LOGS', 'x')"},
         False),
        ({"train.py": "import os\nos.environ['OMP_NUM_THREADS'] = '2'\noptim"}, True),
        ({"train.py": "import os\nos.environ['TORCHINDUCTOR_CACHE_DIR'] = d\noptim"}, True),
        ({}, False),
    ],
)  # fmt: skip
def test_a_program_that_trains_is_known_by_its_source(
    tmp_path: Path, files: dict[str, str], trains: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    folder = (tmp_path / "train").is_dir()
    kinds = {"script": "train" if folder else "train.py", "module": "train"}
    for kind, name in kinds.items():
        target = {"kind": kind, "name": name}
        expected = trains or (kind == "module" and not files)  # its name says so
        found = torch_env.will_train(target, str(tmp_path), {"OMP_NUM_THREADS": "2"})
        assert found == expected, kind
    assert not torch_env.will_train({"kind": "program", "name": "train.py"}, str(tmp_path), {})


@pytest.mark.parametrize(
    ("text", "trains"),
    [("class Net: ...", True), ("import os\nos.environ['TORCH_LOGS'] = 'x'", False), (None, True)],
)
def test_the_engine_trains_and_a_users_model_may_set_what_its_import_reads(
    tmp_path: Path, text: str | None, trains: bool
) -> None:
    if text is not None:
        (tmp_path / "own.py").write_text(text)
    target = {"kind": "engine", "name": "orchestrator.engine.train"}
    assert torch_env.will_train(target, str(tmp_path), {}) == trains
    other = {"kind": "engine", "name": "orchestrator.engine.verify"}
    assert not torch_env.will_train(other, str(tmp_path), {})
    assert torch_env.will_train(target, str(Path(__file__).parents[3]), {})  # in our own clone


def test_a_program_of_many_files_is_not_read_for_long(tmp_path: Path) -> None:
    for number in range(torch_env.MOST_FILES + 1):
        (tmp_path / f"m{number}.py").write_text("import torch")
    assert len(list(torch_env.texts_in(str(tmp_path), "m7.py"))) == torch_env.MOST_FILES
