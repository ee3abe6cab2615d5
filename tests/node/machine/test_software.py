import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.node.machine import probe as software
from orchestrator.protocol.facts import Software
from tests.node.job.trees import plant

VERSION = """from typing import Optional
__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '{torch}'
debug = False
cuda: Optional[str] = {cuda!r}
git_version = 'ba56102387ef21a3b04b357e5b183d48f0afefc7'
hip: Optional[str] = {hip!r}
"""


def test_torch_version_is_read_without_import() -> None:
    from torch import __version__ as real

    code = "import sys; from orchestrator.node.machine import probe as s;v = s.read_software()[0];"
    code += "assert 'torch' not in sys.modules; print(v)"
    read = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert read == f"{real}\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where packages are, and nothing else is."""
    plant(tmp_path, {"site/torch/__init__.py": "raise RuntimeError('imported')"})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return tmp_path / "site"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.4.0'\n", "2.4.0"),
        ('from typing import Final\n__version__: Final[str] = "2.9.1+cu128"\n', "2.9.1+cu128"),
        ("debug = False\n", ""),
        ("__version__ = None\ncuda = '1'", ""),
        (None, ""),
    ],
)
def test_torch_version_is_read_from_file(site: Path, text: str | None, version: str) -> None:
    if text is not None:
        (site / "torch" / "version.py").write_text(text)
    assert software.read_software(str(site))[0] == version


def test_missing_torch_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert software.read_software(str(tmp_path)) == ("", Software())


def torch(site: Path, cuda: str | None = "12.8", hip: str | None = None) -> None:
    text = VERSION.format(torch="2.9.1", cuda=cuda, hip=hip)
    (site / "torch" / "version.py").write_text(text)


def test_nccl_of_matching_wheel_is_found(site: Path) -> None:
    torch(site)
    for name in ("nvidia_nccl_cu13-2.28.3.dist-info", "nvidia_nccl_cu12-2.27.5.dist-info"):
        (site / name).mkdir()
    _, found = software.read_software(str(site))
    assert (found.cuda, found.nccl) == ("12.8", "2.27.5")


def test_nccl_of_system_is_found(site: Path) -> None:
    torch(site)
    root = site.parent
    assert software.read_software(str(root))[1].nccl == ""
    plant(root, {"usr/lib/x86_64-linux-gnu/libnccl.so.2.21.5": "", "usr/lib64/libnccl.so.2.so": ""})
    assert software.read_software(str(root))[1].nccl == "2.21.5"


def test_rccl_and_amd_driver_are_found(site: Path) -> None:
    torch(site, cuda=None, hip="6.3.42131-fa1d09cbd")
    root = site.parent
    header = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 21\n#define NCCL_PATCH 5\n"
    plant(root, {"opt/rocm/include/rccl/rccl.h": header, "sys/module/amdgpu/version": "6.10.5"})
    _, found = software.read_software(str(root))
    assert (found.hip, found.nccl, found.amd_driver) == (
        *("6.3.42131-fa1d09cbd", "2.21.5"),
        "6.10.5",
    )


def test_cpu_torch_has_no_nccl(site: Path) -> None:
    torch(site, cuda=None)
    (site / "nvidia_nccl_cu12-2.27.5.dist-info").mkdir()
    assert software.read_software(str(site))[1].nccl == ""


def test_pythons_with_torch_searches_usual_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work = tmp_path / "home [1]", tmp_path / "work"
    monkeypatch.setenv("HOME", str(home))
    usual = (home / "miniconda3/envs/train", work / ".venv", home / "venv", work / "env")
    for prefix in usual:
        site = prefix / "lib/python3.11/site-packages/torch"
        site.mkdir(parents=True)
        (site / "version.py").write_text("__version__ = '2.9.1'\n")
        (prefix / "bin").mkdir()
        (prefix / "bin/python").touch(mode=0o755)
    (home / "venv/bin/python").chmod(0o644)
    (work / "env/lib/python3.11/site-packages/torch/version.py").unlink()
    found = software.pythons_with_torch(str(work))
    ours = [path for path in found if path.startswith(("~", str(tmp_path)))]
    assert ours == [f"{work}/.venv/bin/python", "~/miniconda3/envs/train/bin/python"]
