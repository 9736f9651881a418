"""Aside: the lines of a room whose first waiters cannot begin now: their worker has no slot or no token for them."""

from __future__ import annotations

import heapq
from collections import Counter


class Aside:
    """Those lines, by the groups of their first waiters; in each group the earliest place first.

    A room may have thousands of them, so a look at one costs nothing for the others.
    """

    def __init__(self) -> None:
        #: The group and the place of each line's first waiter.
        self._lines: dict[str, tuple[str, int]] = {}
        #: For each group a heap of places and lines, of which some are not aside any more.
        self._heaps: dict[str, list[tuple[int, str]]] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def counts(self) -> Counter[str]:
        """How many lines of each group are aside."""
        return self._counts

    def put(self, line: str, group: str, place: int) -> None:
        """Put `line` aside."""
        self.discard(line)
        self._lines[line] = group, place
        self._counts[group] += 1
        heap = self._heaps.setdefault(group, [])
        heapq.heappush(heap, (place, line))
        if len(heap) > 2 * self._counts[group] + 100:  # most of them are not aside any more
            heap[:] = sorted({entry for entry in heap if self._is_aside(group, *entry)})

    def discard(self, line: str) -> None:
        """`line` is aside no longer."""
        if line in self._lines:
            group, _ = self._lines.pop(line)
            self._counts[group] -= 1
            if not self._counts[group]:
                del self._counts[group], self._heaps[group]

    def heads(self) -> list[tuple[int, str]]:
        """The earliest place and its line, of each group, the earliest first."""
        heads = []
        for group, heap in self._heaps.items():
            while not self._is_aside(group, *heap[0]):
                heapq.heappop(heap)
            heads.append(heap[0])
        return sorted(heads)

    def _is_aside(self, group: str, place: int, line: str) -> bool:
        return self._lines.get(line) == (group, place)
