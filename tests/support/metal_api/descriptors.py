"""Objects that only have setters: what is to be made, and how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from .faults import require
from .names import CONSTANTS

if TYPE_CHECKING:
    from .commands import Queue
    from .resources import Archive, CounterSampleBuffer, CounterSet


class NSURL:
    def __init__(self, path: str):
        self.path = Path(path)

    @classmethod
    def fileURLWithPath_(cls, path: str) -> NSURL:
        return cls(path)


class _Plain:
    """An object that is made by ``alloc().init()``."""

    @classmethod
    def alloc(cls) -> Self:
        return cls()

    def init(self) -> Self:
        return self


class MTLCompileOptions(_Plain):
    version = mode = -1

    def setLanguageVersion_(self, version: int) -> None:
        self.version = version

    def setMathMode_(self, mode: int) -> None:
        self.mode = mode


class MTLComputePipelineDescriptor(_Plain):
    function: Any = None
    label = ""
    archives: Sequence[Archive] = ()
    indirect = False

    def setComputeFunction_(self, function: Any) -> None:
        self.function = function

    def setLabel_(self, label: str) -> None:
        self.label = label

    def setBinaryArchives_(self, archives: Sequence[Archive]) -> None:
        self.archives = archives

    def setSupportIndirectCommandBuffers_(self, indirect: bool) -> None:
        self.indirect = indirect

    @property
    def key(self) -> str:
        """What an archive finds the function by."""
        return f"{self.function.name}{'.indirect' * self.indirect}"


class MTLBinaryArchiveDescriptor(_Plain):
    url: NSURL | None = None

    def setUrl_(self, url: NSURL) -> None:
        self.url = url


class MTLResidencySetDescriptor(_Plain):
    pass


class MTLCommandBufferDescriptor(_Plain):
    options = 0

    def setErrorOptions_(self, options: int) -> None:
        require(options in (0, CONSTANTS["MTLCommandBufferErrorOptionEncoderExecutionStatus"]), "unknown error options")
        self.options = options


class MTLIndirectCommandBufferDescriptor(_Plain):
    types, pipeline_inherited, buffers_inherited, buffers = 0, True, True, 0

    def setCommandTypes_(self, types: int) -> None:
        self.types = types

    def setInheritPipelineState_(self, inherit: bool) -> None:
        self.pipeline_inherited = inherit

    def setInheritBuffers_(self, inherit: bool) -> None:
        self.buffers_inherited = inherit

    def setMaxKernelBufferBindCount_(self, count: int) -> None:
        self.buffers = count


class MTLCounterSampleBufferDescriptor(_Plain):
    counters: CounterSet | None = None
    count, storage = 0, -1

    def setCounterSet_(self, counters: CounterSet) -> None:
        self.counters = counters

    def setSampleCount_(self, count: int) -> None:
        self.count = count

    def setStorageMode_(self, mode: int) -> None:
        self.storage = mode


class _Attachment:
    samples: CounterSampleBuffer | None = None
    begin = end = -1

    def setSampleBuffer_(self, samples: CounterSampleBuffer) -> None:
        self.samples = samples

    def setStartOfEncoderSampleIndex_(self, index: int) -> None:
        self.begin = index

    def setEndOfEncoderSampleIndex_(self, index: int) -> None:
        self.end = index


class _Attachments:
    def __init__(self) -> None:
        self._items = [_Attachment() for _ in range(4)]

    def objectAtIndexedSubscript_(self, index: int) -> _Attachment:
        return self._items[index]


class MTLComputePassDescriptor:
    def __init__(self) -> None:
        self.kind, self.attachments = -1, _Attachments()

    @classmethod
    def computePassDescriptor(cls) -> MTLComputePassDescriptor:
        return cls()

    def setDispatchType_(self, kind: int) -> None:
        self.kind = kind

    def sampleBufferAttachments(self) -> _Attachments:
        return self.attachments


class MTLCaptureDescriptor(_Plain):
    def setCaptureObject_(self, queue: Queue) -> None:
        self.queue = queue

    def setDestination_(self, destination: int) -> None:
        require(destination == CONSTANTS["MTLCaptureDestinationGPUTraceDocument"], "a capture goes to a document")

    def setOutputURL_(self, url: NSURL) -> None:
        self.url = url
