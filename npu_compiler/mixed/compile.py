"""Compiling a partition plan: a program for every NPU partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Unpack

from ..artifact.program import CompiledProgram
from ..partitioning.plan import NPU, PartitionPlan
from ..pipeline import Options, check_weight_names, compile_entries, compile_ir, main_dtype
from ..target_config import target_config
from .program import MixedProgram

__all__ = ["assemble", "compile_plan"]


def compile_plan(
    plan: PartitionPlan, target: str = "cpu", dtype: Any = None, **options: Unpack[Options]
) -> CompiledProgram | MixedProgram:
    """Compile the NPU partitions of ``plan``, which was made for ``target``.

    Returns a :class:`CompiledProgram` if one NPU partition computes the whole model, else a :class:`MixedProgram`, in
    which the entry point of partition n is named 'pn'. ``options`` are the keyword arguments of
    :func:`npu_compiler.compile`, and ``dump``: the directory where every phase writes its graph, and code generation
    the sources (default ``NPU_DUMP``). The errors are those of :func:`npu_compiler.compile`.
    """
    if plan.on_npu:
        return compile_ir(plan.ir, target, dtype, **options)
    check_weight_names([plan.ir], options.get("weights"))
    compiled = {
        part.id: compile_entries({f"p{part.id}": part.ir}, target, dtype, **options)
        for part in plan.partitions
        if part.device == NPU
    }
    return assemble(plan, compiled, target)


def assemble(
    plan: PartitionPlan, programs: Mapping[int, CompiledProgram], target: str
) -> CompiledProgram | MixedProgram:
    """Combine the programs of the NPU partitions of ``plan``, by partition id, into the result of
    :func:`compile_plan`."""
    if plan.on_npu:
        return programs[plan.partitions[0].id]
    config = target_config(target)
    devices = [p.device for p in programs.values()]
    devices.append(config.name if config.device is None else config.device.spec)
    dtypes = Counter(p.dtype for p in programs.values()) or Counter([main_dtype(plan.ir)])
    return MixedProgram(plan, dict(programs), config.name, dtypes.most_common(1)[0][0], devices[0])
