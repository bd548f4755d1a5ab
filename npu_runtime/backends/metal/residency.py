"""Memory that stays mapped for the GPU between runs, so that the first run after a pause does not map it again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .buffers import Memory
from .device import frameworks


class Residency:
    """A residency set of a command queue, where macOS has them (from 15 on); elsewhere it does nothing, and Metal maps
    what a command buffer uses."""

    def __init__(self, device: Any, queue: Any):
        self._set: Any = None
        self._uses: Counter[int] = Counter()  # by the identity of the memory: entry points share weights
        self._lock = threading.RLock()
        if hasattr(device, "newResidencySetWithDescriptor_error_"):
            descriptor = frameworks().MTLResidencySetDescriptor.alloc().init()
            self._set, _ = device.newResidencySetWithDescriptor_error_(descriptor, None)
        if self._set is not None:
            queue.addResidencySet_(self._set)

    @property
    def exists(self) -> bool:
        """Whether there is a residency set."""
        return self._set is not None

    def add(self, memories: Iterable[Memory]) -> None:
        """Keep memory mapped until :meth:`remove` is called as often."""
        with self._lock:
            for memory in memories:
                self._uses[id(memory)] += 1
                if self._set is not None and self._uses[id(memory)] == 1:
                    self._set.addAllocation_(memory.buffer)
            if self._set is not None:
                self._set.commit()
                self._set.requestResidency()

    def remove(self, memories: Iterable[Memory]) -> None:
        """Undo one :meth:`add`."""
        with self._lock:
            for memory in memories:
                self._uses[id(memory)] -= 1
                if self._set is not None and not self._uses[id(memory)]:
                    self._set.removeAllocation_(memory.buffer)
            self._uses += Counter()  # drops zeros
            if self._set is not None:
                self._set.commit()
