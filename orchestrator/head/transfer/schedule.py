"""Decide who gives files to whom: data in, orders out. Nothing is sent here, and nobody waited for.

Some nodes have all, or this machine has (HEAD). Each node that takes gives on to `width` others:
while it still takes, where what comes can be passed on at once (`streams`), else when it has all.
Who cannot take from another node is served by an origin, after a pause where the same one is to be
asked again, and in the end through this machine, where that is allowed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

HEAD = -1
WIDTH = 2  # nodes that the head sends to, and that each node passes on to


@dataclass(frozen=True)
class Order:
    """Let one node take all that it lacks from another, or from the head."""

    taker: int
    giver: int
    pause_seconds: float = 0.0  # before that: a line that broke may come back


@dataclass(frozen=True)
class Rules:
    """How files are spread."""

    width: int = WIDTH
    streams: bool = True  # who takes gives on meanwhile
    passes_on: bool = True  # else only the origins give
    pauses: tuple[float, ...] = ()  # before each other try with the last origin that is a node
    through_head: bool = True  # the last resort


@dataclass
class Schedule:
    """The state of one spreading. Ask for `orders`, and tell how each has ended."""

    takers: Sequence[int]
    origins: Sequence[int] = (HEAD,)
    rules: Rules = field(default_factory=Rules)
    sites: Mapping[int, str | None] = field(default_factory=dict)  # by taker

    def __post_init__(self) -> None:
        self.waiting = deque(self.takers)
        self.room = dict.fromkeys(self.origins, self.rules.width)  # takers it can yet serve
        self.giver_of: dict[int, int] = {}  # of those under way
        self.tries = Counter[int]()
        self.next: list[Order] = []  # of those that a giver has failed
        self.done: set[int] = set()
        self.given_up: set[int] = set()

    @property
    def is_over(self) -> bool:
        return not (self.waiting or self.giver_of or self.next)

    def orders(self) -> list[Order]:
        """Return what can begin now; each order is returned once."""
        orders = [self._begin(order) for order in self.next]
        self.next = []
        while self.waiting and (giver := self._free(self.waiting[0])) is not None:
            orders.append(self._begin(Order(self.waiting.popleft(), giver)))
        if self.waiting and not self.giver_of:  # whoever could give is gone
            for taker in self.waiting:
                self._try_origin(taker)
            self.waiting.clear()
            return self.orders()
        return orders

    def took(self, taker: int) -> None:
        """Note that a node has all."""
        self._leave(taker)
        self.done.add(taker)
        if not self.rules.streams:
            self._gives(taker)

    def failed(self, taker: int) -> None:
        """Note that a node could not take from the one that its order named."""
        giver = self._leave(taker)
        if giver == HEAD:
            self.given_up.add(taker)
        elif giver not in self.origins:
            self.room.pop(giver, None)  # whoever comes next is not sent to it
            self._try_origin(taker)
        elif self.tries[taker] < len(self.rules.pauses):
            pause = self.rules.pauses[self.tries[taker]]
            self.tries[taker] += 1
            self.next.append(Order(taker, giver, pause))
        elif self.rules.through_head:
            self.next.append(Order(taker, HEAD))
        else:
            self.given_up.add(taker)

    def lost(self, node: int) -> None:
        """Note that a node is gone: it takes nothing more, and nobody is sent to it."""
        self._leave(node)
        self.room.pop(node, None)
        if node not in self.done:
            self.given_up.add(node)

    def _try_origin(self, taker: int) -> None:
        """Let an origin serve a node that another has failed: the one with most room."""
        origin = max(self.origins, key=lambda origin: self.room.get(origin, 0))
        if origin in self.room or origin == HEAD:
            self.next.append(Order(taker, origin))
        elif self.rules.through_head:
            self.next.append(Order(taker, HEAD))
        else:
            self.given_up.add(taker)

    def _free(self, taker: int) -> int | None:
        """Return the first that can serve one more, of the taker's site where there is one."""
        free = [giver for giver, room in self.room.items() if room > 0]
        here = (giver for giver in free if self.sites.get(giver) == self.sites.get(taker))
        return next(here, free[0] if free else None)

    def _begin(self, order: Order) -> Order:
        self.giver_of[order.taker] = order.giver
        if order.giver in self.room:
            self.room[order.giver] -= 1
        if self.rules.streams:
            self._gives(order.taker)
        return order

    def _gives(self, node: int) -> None:
        if self.rules.passes_on:
            self.room.setdefault(node, self.rules.width)

    def _leave(self, taker: int) -> int:
        giver = self.giver_of.pop(taker, HEAD)
        if giver in self.room and not self.rules.streams:
            self.room[giver] += 1
        return giver
