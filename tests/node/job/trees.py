"""Files as the kernel shows them, below a directory that stands for a machine's root."""

from collections.abc import Mapping
from pathlib import Path

LOCAL = "fe80:0000:0000:0000:0ac0:ebff:fe12:3456"
EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"


def plant(root: Path, files: Mapping[str, str]) -> None:
    """path -> text; `-> target` makes a symbolic link, a path that ends in / a directory."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif text.startswith("-> "):
            path.symlink_to(text[3:])
        else:
            path.write_text(text + "\n")


def mapped(address: str) -> str:
    a, b, c, d = map(int, address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def hca(
    root: Path,
    device: str,
    *,
    link_layer: str = "InfiniBand",
    state: str = "4: ACTIVE",
    physical: str = "5: LinkUp",
    rate: str = "400 Gb/sec (4X NDR)",
    gids: Mapping[int, tuple[str, str, str]] | None = None,
    pci: str = "0000:1a:00.0",
    port: int = 1,
    netdev: str = "",
    top: str = "sys/class/infiniband",
) -> None:
    """One card as mlx5 shows it. gids: index -> (gid, type, net device)."""
    if gids is None:
        gids = {0: (f"fe80:0000:0000:0000:b8ce:f603:0012:{port:04x}", "IB/RoCE v1", "")}
    here = f"{top}/{device}/ports/{port}"
    files = {
        f"{top}/{device}/node_type": "1: CA",
        f"{top}/{device}/node_guid": "b8ce:f603:0012:3456",
        f"{top}/{device}/fw_ver": "28.39.1002",
        f"{top}/{device}/board_id": "MT_0000000838",
        f"{here}/link_layer": link_layer,
        f"{here}/state": state,
        f"{here}/phys_state": physical,
        f"{here}/rate": rate,
    }
    for index in range(max(gids, default=0) + 4):  # tables are longer than what is in them
        gid, kind, name = gids.get(index, (EMPTY, "", ""))
        files[f"{here}/gids/{index}"] = gid
        if kind:  # the kernel says EINVAL for those of empty entries
            files[f"{here}/gid_attrs/types/{index}"] = kind
            files[f"{here}/gid_attrs/ndevs/{index}"] = name
    plant(root, files)
    if not (root / top / device / "device").exists():
        plant(root, {f"sys/devices/pci0000:17/{pci}/numa_node": "1"})
        (root / top / device / "device").symlink_to(root / "sys/devices/pci0000:17" / pci)
    if netdev:
        plant(root, {f"sys/devices/pci0000:17/{pci}/net/{netdev}/dev_port": str(port - 1)})


def roce(root: Path, device: str, address: str, netdev: str, **more: str) -> None:
    """A RoCE port with the table of a card that has one address: v1 before v2."""
    kinds = ("IB/RoCE v1", "RoCE v2")
    pairs = [(gid, kind, netdev) for gid in (LOCAL, mapped(address)) for kind in kinds]
    rate = more.pop("rate", "100 Gb/sec (4X EDR)")
    gids = dict(enumerate(pairs))
    hca(root, device, link_layer="Ethernet", rate=rate, gids=gids, netdev=netdev, **more)
