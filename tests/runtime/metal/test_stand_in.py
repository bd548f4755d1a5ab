"""The stand-in for Apple's frameworks: it refuses what Metal refuses, and its methods are those of Apple's classes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from npu_runtime import Executor
from npu_runtime.backends.metal import MetalBackend
from npu_runtime.backends.metal.entry import MetalEntry

from ...support import metal_api
from ...support.metal_api import APIMisuse, MTLSize, commands, descriptors, encoders, faults, indirect, resources
from ...support.metal_api.device import Device, MTLCaptureManager
from .conftest import Model
from .selectors import TABLE, table

APPLE = {
    resources.Buffer: "MTLBuffer", resources.ResidencySet: "MTLResidencySet", resources.Fence: "MTLFence",
    resources.CompiledLibrary: "MTLLibrary", resources.Pipeline: "MTLComputePipelineState",
    resources.Archive: "MTLBinaryArchive", resources.CounterSet: "MTLCounterSet",
    resources.CounterSampleBuffer: "MTLCounterSampleBuffer", encoders.ComputeEncoder: "MTLComputeCommandEncoder",
    encoders.BlitEncoder: "MTLBlitCommandEncoder", commands.CommandBuffer: "MTLCommandBuffer",
    commands.Queue: "MTLCommandQueue", Device: "MTLDevice", MTLCaptureManager: "MTLCaptureManager",
    indirect.IndirectCommandBuffer: "MTLIndirectCommandBuffer",
    indirect.IndirectComputeCommand: "MTLIndirectComputeCommand", faults.NSError: "NSError",
    faults.NSDictionary: "NSDictionary", faults.EncoderInfo: "MTLCommandBufferEncoderInfo",
    descriptors._Attachment: "MTLComputePassSampleBufferAttachmentDescriptor",
    descriptors._Attachments: "MTLComputePassSampleBufferAttachmentDescriptorArray",
    **{each: name for name, each in vars(descriptors).items() if name.startswith("MTL")},
}  # fmt: skip


def selectors(name: str | None) -> Iterator[str]:
    classes = json.loads(TABLE.read_text())["classes"]
    while name in classes:
        yield from classes[name]["selectors"]
        name = classes[name]["base"]


@pytest.mark.parametrize("each", APPLE, ids=lambda c: c.__name__)
def test_methods_are_those_of_the_apple_class(each: type) -> None:
    """A method with Apple's spelling, or with the name of any selector, belongs to the class that the stand-in's class
    stands for, with as many arguments. So the runtime, which only has the stand-in's methods here, calls each on the
    right class."""
    own, found = set(selectors(APPLE[each])), 0
    for name, method in inspect.getmembers(each, inspect.isroutine):
        selector = name.replace("_", ":")
        if not name.startswith("_") and (name.endswith("_") or selector in table().selectors):
            parameters = [p for p in inspect.signature(method).parameters if p != "self"]
            assert selector in own, f"{APPLE[each]} has no {selector}"
            assert len(parameters) == selector.count(":"), name
            found += 1
    assert found or each in (resources.Fence, descriptors.MTLResidencySetDescriptor)


def test_a_network_with_every_access_watched(convnet: Model) -> None:
    with metal_api.installed(Device(checks=True)):
        (result,) = Executor(convnet.program, convnet.weights, MetalBackend()).run([convnet.x]).values()
    convnet.check(result)


@pytest.fixture
def parts(device: Device, convnet: Model) -> tuple[MetalBackend, Any, Any]:
    """A backend, a pipeline state with one or more arguments, and a buffer of 64 bytes."""
    backend = MetalBackend()
    entry = Executor(convnet.program, convnet.weights, backend)._loaded
    assert isinstance(entry, MetalEntry)
    return backend, next(iter(entry._code.pipelines.values())), device.newBufferWithLength_options_(64, 0)


def refused(*actions: Callable[[], object], match: str | None = None) -> None:
    for action in actions:
        with pytest.raises(APIMisuse, match=match):
            action()


def test_encoders_refuse_what_metal_refuses(parts: tuple[MetalBackend, Any, Any]) -> None:
    backend, pipeline, buffer = parts
    one, warp = MTLSize(1, 1, 1), MTLSize(32, 1, 1)
    work = backend.commands.queue.commandBuffer()
    encoder = work.computeCommandEncoderWithDispatchType_(1)
    dispatch = encoder.dispatchThreadgroups_threadsPerThreadgroup_
    refused(
        lambda: encoder.setBuffer_offset_atIndex_(buffer, 64, 0),
        lambda: encoder.setBuffer_offset_atIndex_(buffer, 0, 31),
        lambda: encoder.setBuffer_offset_atIndex_(np.zeros(4), 0, 0),
        lambda: dispatch(one, warp),
        lambda: encoder.memoryBarrierWithScope_(2),
        lambda: encoder.useResources_count_usage_([buffer], 2, 3),
        work.commit,
        work.blitCommandEncoder,
        work.waitUntilCompleted,
    )
    encoder.setComputePipelineState_(pipeline)
    refused(lambda: dispatch(one, warp), match="a buffer is missing")
    for index in range(31):
        encoder.setBuffer_offset_atIndex_(buffer, 0, index)
    encoder.setBuffer_offset_atIndex_(buffer, 2, 0)
    refused(lambda: dispatch(one, warp), match="offset 2 for elements of 4 bytes")
    encoder.setBuffer_offset_atIndex_(buffer, 0, 0)
    for groups, threads in ((0, 32), (1, 0), (1, 2048)):
        refused(lambda g=groups, t=threads: dispatch(MTLSize(g, 1, 1), MTLSize(t, 1, 1)))  # type: ignore[misc]
    encoder.endEncoding()
    work.commit()
    refused(encoder.endEncoding, work.commit, work.blitCommandEncoder)


def test_too_much_threadgroup_memory_is_refused(device: Device, backend: MetalBackend) -> None:
    text = """#include <metal_stdlib>
    [[kernel]] void large(device float* y [[buffer(0)]], uint t [[thread_position_in_threadgroup]]) {
        threadgroup float x[8193];
        x[8192 - t] = t;
        y[t] = x[8192 - t];
    }"""
    library, _ = device.newLibraryWithSource_options_error_(text, compile_options(), None)
    assert library is not None
    descriptor = descriptors.MTLComputePipelineDescriptor()
    descriptor.setComputeFunction_(library.newFunctionWithName_("large"))
    pipeline, _ = device.newComputePipelineStateWithDescriptor_options_reflection_error_(descriptor, 0, None, None)
    work = backend.commands.queue.commandBuffer()
    encoder = work.computeCommandEncoderWithDispatchType_(1)
    encoder.setComputePipelineState_(pipeline)
    encoder.setBuffer_offset_atIndex_(device.newBufferWithLength_options_(64, 0), 0, 0)
    encoder.dispatchThreadgroups_threadsPerThreadgroup_(MTLSize(1, 1, 1), MTLSize(4, 1, 1))
    encoder.endEncoding()
    work.commit()
    refused(work.waitUntilCompleted, match=r"large: \d+ bytes of threadgroup memory; Metal has 32768")


def compile_options() -> descriptors.MTLCompileOptions:
    options = descriptors.MTLCompileOptions()
    options.setMathMode_(0)
    options.setLanguageVersion_(0x30001)
    return options


def indirect_buffer(device: Device, count: int = 2, options: int = 0, **changes: int) -> Any:
    descriptor = descriptors.MTLIndirectCommandBufferDescriptor()
    descriptor.setCommandTypes_(changes.get("types", 32))
    descriptor.setInheritBuffers_(bool(changes.get("inherit", False)))
    descriptor.setInheritPipelineState_(False)
    descriptor.setMaxKernelBufferBindCount_(changes.get("buffers", 31))
    return device.newIndirectCommandBufferWithDescriptor_maxCommandCount_options_(descriptor, count, options)


def test_indirect_command_buffers_refuse_what_metal_refuses(
    device: Device, parts: tuple[MetalBackend, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, pipeline, buffer = parts
    for wrong in ({"count": 0}, {"count": 16385}, {"options": 32}, {"types": 1}, {"inherit": 1}, {"buffers": 32}):
        refused(lambda w=wrong: indirect_buffer(device, **w))  # type: ignore[misc]
    made = indirect_buffer(device, buffers=30)
    command = made.indirectComputeCommandAtIndex_(0)
    dispatch = command.concurrentDispatchThreadgroups_threadsPerThreadgroup_
    one, warp = MTLSize(1, 1, 1), MTLSize(32, 1, 1)
    monkeypatch.setattr(pipeline, "_indirect", False)
    refused(lambda: command.setComputePipelineState_(pipeline), match="is not for indirect command buffers")
    monkeypatch.undo()
    refused(
        lambda: made.indirectComputeCommandAtIndex_(2),
        lambda: command.setKernelBuffer_offset_atIndex_(buffer, 64, 0),
        lambda: command.setKernelBuffer_offset_atIndex_(buffer, 0, 30),
        lambda: dispatch(one, warp),
    )
    command.setComputePipelineState_(pipeline)
    refused(lambda: dispatch(one, warp), match="a buffer is missing")
    for index in range(30):
        command.setKernelBuffer_offset_atIndex_(buffer, 0, index)
    refused(
        lambda: dispatch(MTLSize(0, 1, 1), warp),
        lambda: dispatch(one, MTLSize(2048, 1, 1)),
    )
    dispatch(one, warp)
    work = backend.commands.queue.commandBuffer()
    encoder = work.computeCommandEncoderWithDispatchType_(1)
    execute = encoder.executeCommandsInBuffer_withRange_
    refused(lambda: execute(made, (0, 0)), lambda: execute(made, (1, 2)), match="indirect buffer of 2")
    refused(lambda: execute(made, (0, 2)), match="not encoded")
    execute(made, (0, 1))
    encoder.endEncoding()
    work.commit()
    refused(command.setBarrier, command.clearBarrier, command.reset, match="while the GPU may execute it")
    refused(work.waitUntilCompleted, match="memory of an indirect command is not resident")
    command.setBarrier()  # it has finished
    alive = device.newBufferWithLength_options_(64, 0)
    command.setKernelBuffer_offset_atIndex_(alive, 0, 0)
    del alive
    refused(lambda: dispatch(one, warp), match="a buffer of an indirect command was freed")


def test_sample_buffers_refuse_what_metal_refuses(device: Device) -> None:
    def made(count: int, name: int = 1, storage: int = 0) -> Any:
        descriptor = descriptors.MTLCounterSampleBufferDescriptor()
        descriptor.setCounterSet_(device.counterSets()[name])
        descriptor.setSampleCount_(count)
        descriptor.setStorageMode_(storage)
        return device.newCounterSampleBufferWithDescriptor_error_(descriptor, None)

    samples, error = made(4097)
    assert samples is None and "Expected at most 32768" in error.localizedDescription()
    refused(lambda: made(8, name=0), lambda: made(8, storage=2))
    samples, _ = made(8)
    refused(lambda: samples.resolveCounterRange_((0, 9)), lambda: samples.resolveCounterRange_((2, 0)))
    assert not device.supportsCounterSampling_(2)  # no samples between dispatches
