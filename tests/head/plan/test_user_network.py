"""Variables of the network that a user sets are checked against what each node has."""

from dataclasses import replace

import pytest

from orchestrator.head.plan import nccl_env
from orchestrator.head.plan.model import EnvSetting
from tests.head.plan.probed import infiniband
from tests.head.plan.test_plan import found, make


def warned(name: str, value: str, *, yours: bool = True) -> list[str]:
    machines = found("a\nb", rdma=(infiniband("mlx5_0"),))
    setting = EnvSetting(name, value, "--env", yours=yours)
    nodes = [replace(n, settings=(*n.settings, setting)) for n in make(machines).nodes]
    return nccl_env.setting_warnings(zip(machines, nodes, strict=True))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("GLOO_SOCKET_IFNAME", "nope0", "fits no interface of a"),
        ("TP_SOCKET_IFNAME", "nope0", "fits no interface of b"),
        ("NCCL_SOCKET_IFNAME", "nope", "fits no interface of a"),
        ("NCCL_IB_HCA", "mlx4", "fits no device of a: mlx5_0"),
        ("NCCL_IB_HCA", "=mlx5", "fits no device of b: mlx5_0"),
        ("UCX_NET_DEVICES", "mlx5_9:1", "fits no device of a"),
        ("MASTER_ADDR", "10.0.0.9", "does not reach the ranks: the first node of the list"),
        ("MASTER_PORT", "1234", "does not reach the ranks: --master-port"),
    ],
)  # fmt: skip
def test_setting_that_fits_nothing_is_warned_of(name: str, value: str, words: str) -> None:
    assert any(words in line for line in warned(name, value)), warned(name, value)
    assert not any(words in line for line in warned(name, value, yours=False))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_IB_HCA", "mlx5"), ("NCCL_IB_HCA", "=mlx5_0:1"), ("NCCL_IB_HCA", "^mlx4"),
        ("UCX_NET_DEVICES", "all"), ("UCX_NET_DEVICES", "mlx5_0:1"), ("NCCL_DEBUG", "INFO"),
    ],
)  # fmt: skip
def test_valid_setting_gives_no_warning(name: str, value: str) -> None:
    assert warned(name, value) == []
