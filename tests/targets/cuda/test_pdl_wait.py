"""Kernels start before the ones ahead of them have ended: what they read before they wait must not be theirs."""

from __future__ import annotations

import ctypes
import re
from functools import cache

import pytest

from npu_compiler.frontend.llm import llm_graphs
from npu_compiler.frontend.llm.config import LLMConfig
from npu_compiler.pipeline import run_phases
from npu_compiler.target_config import find_device
from npu_compiler.targets.cuda.devices import CUDADevice
from npu_compiler.targets.cuda.dialect import dialect_for
from npu_compiler.targets.cuda.nvrtc import FLAGS, find_nvrtc
from npu_compiler.targets.simt.emit import emit

from ...support import cuda_gpu
from ...support.sweeps import FULL

CARD = {
    "vocab_size": 4096, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 2, "hidden_act": "silu",
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def _ptx(source: str, arch: str) -> str:
    lib, program, size = find_nvrtc()._library, ctypes.c_void_p(), ctypes.c_size_t()
    assert not lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    flags = [f"--gpu-architecture={arch}".encode(), *(f.encode() for f in FLAGS)]
    status = lib.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    assert not status, find_nvrtc()._get(program, "ProgramLog")
    assert not lib.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    assert not lib.nvrtcGetPTX(program, text)
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return text.value.decode()


@cache
def _reads_before_it_waits(source: str, arch: str) -> frozenset[int] | None:
    """The parameters of a kernel through whose pointers it reads before it waits, by number; None if it never waits."""
    ptx = _ptx(source, arch)
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    of: dict[str, set[int]] = {}  # the parameters that a register's value was computed from
    read: set[int] = set()
    for line in before.split("{", 1)[1].splitlines():
        op, rest = (*line.split(None, 1), "", "")[:2]
        sources = set().union(*(of.get(r, set()) for r in re.findall(r"%rd\d+", rest)))
        sources |= {int(n) for n in re.findall(r"_param_(\d+)", rest)}
        if re.match(r"(ld|prefetch|cp)\b(?!\.(param|shared|local))", op) and "tensormap" not in op:
            read |= sources
        elif rest.startswith("%rd"):
            target = rest.split(",")[0]
            of[target] = of.get(target, set()) | sources
    return frozenset(read) if wait else None


ARCHS = (("sm_80", "compute_90"), ("sm_90", "compute_90a"))
CASES = [(*arch, model_type) for arch in ARCHS for model_type in ("qwen2", "qwen3")]


@cuda_gpu.compiles()
@pytest.mark.parametrize(("device", "arch", "model_type"), CASES if FULL else CASES[1:3])
def test_every_kernel_waits_before_it_reads_what_others_wrote(device: str, arch: str, model_type: str) -> None:
    """In the code that NVRTC makes of a device's kernels for one that can start them early."""
    row = find_device("cuda", device)
    assert isinstance(row, CUDADevice)
    dialect = dialect_for(row)
    config = LLMConfig.from_hf({**CARD, "model_type": model_type})
    chunks = (128,) if FULL or device == "sm_90" else ()  # sm_80 itself starts no kernel early
    graphs = llm_graphs(config, max_len=2048, chunks=chunks, device_sampling=True)
    for entry, ir in graphs.items():
        schedule = run_phases(ir, row.spec, None, until="memory").schedule
        assert schedule is not None
        written: set[int] = set()
        early = 0
        for kernel in schedule.kernels:
            e = emit(kernel, dialect)
            numbers = [*e.operands, *([None] if e.checks else []), *(number for number, _ in e.maps)]
            read = _reads_before_it_waits(dialect.source([e.text.replace("@NAME@", "kernel")]), arch)
            assert read is not None, f"{entry}: {kernel.name} does not wait, so no kernel behind it does"
            for number in (numbers[n] for n in read):
                if number is not None:
                    early += 1
                    operand = kernel.inputs[number] if number >= 0 else kernel.outputs[~number]
                    assert operand.buffer.id not in written, f"{entry}: {kernel.name} reads {operand} before it waits"
            written |= {o.buffer.id for o in kernel.outputs}
        assert early > 0 or entry.startswith("prefill")


def test_a_decode_step_is_at_most_five_kernels_a_layer() -> None:
    def kernels(layers: int) -> int:
        config = LLMConfig.from_hf({**CARD, "model_type": "qwen2", "num_hidden_layers": layers})
        schedule = run_phases(
            llm_graphs(config, max_len=2048, chunks=())["decode"], "cuda", None, until="memory"
        ).schedule
        assert schedule is not None
        return len(schedule.kernels)

    assert kernels(3) - kernels(2) == 5
