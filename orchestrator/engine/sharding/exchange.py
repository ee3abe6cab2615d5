"""Exchange shards for whole tensors, each of which one rank owns, and give the shards back.

All ranks of a shard group send each other what they have in one message (all-to-all), as long as
what one of them sends is not more than PER_MESSAGE. That also bounds what is whole at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

PER_MESSAGE = 64 << 20  # bytes


def is_cut(tensor: Tensor) -> bool:
    """Tell whether each rank of a group has a part of it."""
    return isinstance(tensor, DTensor) and isinstance(tensor.placements[-1], Shard)


class Exchange:
    """Some tensors in shards of one mesh, by their places in a list, and who owns each of them."""

    def __init__(
        self,
        mesh: DeviceMesh,
        shapes: Sequence[torch.Size],
        axes: Sequence[int],  # along which they are cut
        owners: Sequence[int],
    ) -> None:
        self.group = mesh.get_group(mesh.ndim - 1)
        self.size, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        self.device = torch.device(mesh.device_type)
        self.shapes, self.axes, self.owners = list(shapes), list(axes), list(owners)
        self.mine = [i for i, owner in enumerate(owners) if owner == self.rank]

    def to_owners(self, parts: Sequence[Tensor]) -> Callable[[], dict[int, Tensor]]:
        """Send this rank's parts, which are of one dtype; the result waits for those that it owns
        to be whole."""
        order = [i for owner in range(self.size) for i in self._of(owner)]
        sent = [sum(parts[i].numel() for i in self._of(owner)) for owner in range(self.size)]
        came = [sum(self._numel(i, rank) for i in self.mine) for rank in range(self.size)]
        wait = self._send([parts[i] for i in order], sent, came, parts[0].dtype)
        return functools.partial(self._whole, wait)

    def _whole(self, wait: Callable[[], list[Tensor]]) -> dict[int, Tensor]:
        pieces: dict[int, list[Tensor]] = {i: [] for i in self.mine}
        for rank, flat in enumerate(wait()):
            flats = torch.split(flat, [self._numel(i, rank) for i in self.mine])
            for i, piece in zip(self.mine, flats, strict=True):
                pieces[i].append(piece.view(self._shape(i, rank)))
        return {i: torch.cat(own, self.axes[i]) for i, own in pieces.items()}

    def to_shards(
        self, whole: Mapping[int, Tensor], dtype: torch.dtype
    ) -> Callable[[], list[Tensor]]:
        """Send the parts of what this rank owns; the result waits for its parts of all tensors."""
        parts, sent = [], []
        for rank in range(self.size):
            own = [self._part(whole[i], i, rank) for i in self.mine]
            sent.append(sum(part.numel() for part in own))
            parts += own
        came = [
            sum(self._numel(i, self.rank) for i in self._of(owner)) for owner in range(self.size)
        ]
        return functools.partial(self._shards, self._send(parts, sent, came, dtype))

    def _shards(self, wait: Callable[[], list[Tensor]]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for owner, flat in enumerate(wait()):
            own = self._of(owner)
            flats = torch.split(flat, [self._numel(i, self.rank) for i in own])
            found |= {i: f.view(self._shape(i, self.rank)) for i, f in zip(own, flats, strict=True)}
        return [found[i] for i in range(len(self.shapes))]

    def _send(
        self, parts: Sequence[Tensor], sent: list[int], came: list[int], dtype: torch.dtype
    ) -> Callable[[], list[Tensor]]:
        """Begin one all-to-all; the result waits for it, and gives what came from each rank."""
        flat = [part.reshape(-1) for part in parts]
        outgoing = torch.cat(flat) if flat else torch.empty(0, dtype=dtype)
        outgoing = outgoing.to(self.device, dtype)
        incoming = outgoing.new_empty(sum(came))
        work = dist.all_to_all_single(
            incoming, outgoing, came, sent, group=self.group, async_op=True
        )

        going = [(work, incoming)]

        def wait() -> list[Tensor]:
            work, incoming = going.pop()  # so that what has come is held by who asked for it alone
            if work is not None:
                work.wait()
            return list(torch.split(incoming, came))

        return wait

    def _of(self, owner: int) -> list[int]:
        return [i for i, own in enumerate(self.owners) if own == owner]

    def _rows(self, i: int, rank: int) -> tuple[int, int]:
        """Give where a rank's part begins and how long it is, as torch.chunk cuts."""
        whole = self.shapes[i][self.axes[i]]
        each = -(-whole // self.size)
        start = min(whole, rank * each)
        return start, min(whole, start + each) - start

    def _shape(self, i: int, rank: int) -> list[int]:
        shape = list(self.shapes[i])
        shape[self.axes[i]] = self._rows(i, rank)[1]
        return shape

    def _numel(self, i: int, rank: int) -> int:
        return torch.Size(self._shape(i, rank)).numel()

    def _part(self, whole: Tensor, i: int, rank: int) -> Tensor:
        return whole.narrow(self.axes[i], *self._rows(i, rank))


def exchange_of(like: Sequence[DTensor], owners: Sequence[int]) -> Exchange:
    """Make one for tensors that lie as these do."""
    shapes = [tensor.shape for tensor in like]
    return Exchange(like[0].device_mesh, shapes, [axis_of(tensor) for tensor in like], owners)


def axis_of(tensor: DTensor) -> int:
    last = tensor.placements[-1]
    assert isinstance(last, Shard)
    return last.dim


def messages(shapes: Sequence[torch.Size], each: int, size: int) -> Iterator[list[int]]:
    """Put tensors together that go in one message, by their places: the largest first, those of
    one shape side by side. Each of `size` ranks sends its part, `each` bytes for an element."""
    message: list[int] = []
    room = PER_MESSAGE
    for i in sorted(range(len(shapes)), key=lambda i: (-shapes[i].numel(), tuple(shapes[i]))):
        nbytes = shapes[i].numel() * each // size  # alike on all ranks, whose parts may not be
        if message and nbytes > room:
            yield message
            message, room = [], PER_MESSAGE
        message.append(i)
        room -= nbytes
    if message:
        yield message


def dealt(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Choose an owner for each: the costliest first, each to whoever has least to do so far."""
    owners = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[i]] += costs[i]
    return owners
