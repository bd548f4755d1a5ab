"""Objective-C names of the Metal backend exist, with as many arguments: checked against a table made from pyobjc and
metal-cpp. The table's own facts are checked against values that Apple documents."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from .selectors import ROOT, problems, python_names, table

BACKENDS = ROOT / "npu_runtime" / "backends"
FILES = sorted({*BACKENDS.glob("metal*.py"), *(BACKENDS / "metal").rglob("*.py")})
_MODULES = ("npu_runtime/**", "npu_compiler/support", "npu_compiler/artifact", "npu_compiler", "npu_compiler/targets",
            "npu_compiler/targets/metal", "npu_compiler/targets/simt/lang")  # fmt: skip
PYTHON_SOURCES = [path.read_text() for folder in _MODULES for path in sorted(ROOT.glob(f"{folder}/*.py"))]

GOOD = """
import Metal

def load(text):
    device = Metal.MTLCreateSystemDefaultDevice()
    options = Metal.MTLCompileOptions.alloc().init()
    options.setMathMode_(Metal.MTLMathModeSafe)
    library, error = device.newLibraryWithSource_options_error_(text, options, None)
    if error is not None:
        raise RuntimeError(error.localizedDescription())
    queue = device.newCommandQueue()
    encoder = queue.commandBuffer().computeCommandEncoderWithDispatchType_(Metal.MTLDispatchTypeConcurrent)
    dispatch, barrier = encoder.dispatchThreadgroups_threadsPerThreadgroup_, encoder.memoryBarrierWithScope_
    dispatch(Metal.MTLSizeMake(1, 1, 1), Metal.MTLSize(32, 1, 1))
    barrier(Metal.MTLBarrierScopeBuffers)
    made = device.newIndirectCommandBufferWithDescriptor_maxCommandCount_options_(options, 1, 0)
    options.setCommandTypes_(Metal.MTLIndirectCommandTypeConcurrentDispatch)
    command = made.indirectComputeCommandAtIndex_(0)
    command.setKernelBuffer_offset_atIndex_(text, 0, 0)
    command.setBarrier()
    encoder.executeCommandsInBuffer_withRange_(made, (0, 1))
    cpu, gpu = device.sampleTimestamps_gpuTimestamp_(None, None)
    encoder.endEncoding()
    if device.respondsToSelector_("newResidencySetWithDescriptor:error:"):
        return getattr(queue, "addResidencySet_")
    return library
"""
# What to replace in GOOD, by what, and a part of the message.
MUTATIONS = [
    ("newLibraryWithSource_options_error_", "newLibraryWithSource_option_error_", "no class of Metal has the selector"),
    ("endEncoding", "endEncodings", "no class of Metal has the selector endEncodings"),
    ("newCommandQueue()", "newComandQueue()", "no class of Metal has the selector newComandQueue"),
    ("(text, options, None)", "(text, options)", "newLibraryWithSource:options:error: takes 3 arguments, not 2"),
    ("(text, options, None)", "(text, options, text)", "pass None there"),
    ("library, error =", "library =", "returns a tuple"),
    ("newCommandQueue()", "newCommandQueue(64)", "newCommandQueue takes 0 arguments, not 1"),
    ("error.localizedDescription()", "error.localizedDescription", "is a method: call it"),
    ("MTLMathModeSafe", "MTLMathModeStrict", "MTLMathModeStrict is not a constant, function, struct or class of Metal"),
    ("MTLSizeMake(1, 1, 1)", "MTLSizeMake(1, 1)", "MTLSizeMake takes 3 arguments, not 2"),
    ("MTLSize(32, 1, 1)", "MTLSize(32)", "MTLSize takes 3 arguments, not 1"),
    ("barrier(Metal.MTLBarrierScopeBuffers)", "barrier()", "memoryBarrierWithScope: takes 1 arguments, not 0"),
    (
        "MTLCompileOptions",
        "MTLCompilerOptions",
        "MTLCompilerOptions is not a constant, function, struct or class of Metal",
    ),
    ("newResidencySetWithDescriptor:error:", "newResidencySet:error:", "no class of Metal has the selector"),
    ("addResidencySet_", "addResidencySets_", "no class of Metal has the selector addResidencySets:"),
    ("setBarrier()", "setBarriers()", "no class of Metal has the selector setBarriers"),
    ("setKernelBuffer_offset_atIndex_", "setKernelBuffer_atIndex_", "no class of Metal has the selector"),
    ("withRange_(made, (0, 1))", "withRange_(made)", "executeCommandsInBuffer:withRange: takes 2 arguments, not 1"),
    ("sampleTimestamps_gpuTimestamp_(None, None)", "sampleTimestamps_gpuTimestamp_(text, None)", "pass None there"),
    (
        "MTLIndirectCommandTypeConcurrentDispatch",
        "MTLIndirectCommandTypeDispatch",
        "is not a constant, function, struct",
    ),
]


@pytest.fixture(scope="module")
def python() -> frozenset[str]:
    return python_names(PYTHON_SOURCES)


@pytest.mark.metal
@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(BACKENDS)))
def test_every_name_of_the_backend_is_known(path: Path, python: frozenset[str]) -> None:
    assert problems(path.read_text(), python) == []


@pytest.mark.metal
def test_correct_use_has_no_problems(python: frozenset[str]) -> None:
    assert problems(GOOD, python) == []


@pytest.mark.metal
@pytest.mark.parametrize(("name", "mutated", "message"), MUTATIONS, ids=[f"{a}->{b}" for a, b, _ in MUTATIONS])
def test_a_wrong_name_or_count_is_found(name: str, mutated: str, message: str, python: frozenset[str]) -> None:
    assert name in GOOD
    [problem] = problems(GOOD.replace(name, mutated, 1), python)
    assert message in problem


@pytest.mark.metal
@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(BACKENDS)))
def test_every_selector_of_the_backend_is_noticed_when_misspelt(path: Path, python: frozenset[str]) -> None:
    """All selectors and constants in a file are misspelt; each is found in that file."""
    source = misspelt = path.read_text()
    used = [s for s in table().selectors if f".{s.replace(':', '_')}(" in source and s.replace(":", "_") not in python]
    for selector in used:
        name = selector.replace(":", "_")
        misspelt = misspelt.replace(f".{name}(", f".x{name}(")
    constants = set(re.findall(r"\.(MTL\w+)", source))
    misspelt = re.sub(r"\.(MTL\w+)", r".\1X", misspelt)
    found = problems(misspelt, python)
    missed = [s for s in used if not any(p.endswith(f" x{s}") for p in found)]
    missed += [c for c in constants if not any(f" {c}X is no" in p for p in found)]
    assert not missed and (used or path.name in ("__init__.py", "hazards.py"))


def test_the_table_has_values_that_apple_documents() -> None:
    t = table()
    documented = {
        "MTLResourceStorageModeShared": 0, "MTLGPUFamilyApple7": 1007, "MTLGPUFamilyMetal3": 5001, "MTLMathModeSafe": 0,
        "MTLLanguageVersion3_1": 3 << 16 | 1, "MTLCommandBufferStatusCompleted": 4, "MTLDispatchTypeConcurrent": 1,
    }  # fmt: skip
    assert {name: t.constants[name] for name in documented} == documented
    assert t.returned["newLibraryWithSource:options:error:"] == [2]
    assert t.functions["MTLSizeMake"] == 3


@pytest.mark.skipif(sys.platform != "darwin", reason="asks the Metal framework of a Mac")
def test_the_table_agrees_with_this_mac() -> None:
    metal = pytest.importorskip("Metal")
    known = {name: value for name, value in table().constants.items() if value is not None}
    found = {name: getattr(metal, name) for name in known if hasattr(metal, name)}
    assert len(found) > len(known) // 2
    assert found == {name: known[name] for name in found}
