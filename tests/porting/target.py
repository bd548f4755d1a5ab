"""The code generator: how the vocabulary is spelled, and how text becomes code."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from npu_compiler.schedule.kernel import Kernel, Loops
from npu_compiler.support.errors import Reason
from npu_compiler.target_config import TargetConfig
from npu_compiler.targets.simt.lang.device import GPU
from npu_compiler.targets.simt.lang.dialect import Array, Dialect, Param
from npu_compiler.targets.simt.target import SimtTarget

CXX = shutil.which("g++")


def entry(name: str, params: Sequence[Param], threads: int, resident: int) -> str:
    """A kernel is a function of its argument table, workgroup and thread."""
    lines = [f"static void {name}(void* table, int workgroup, int tid) {{"]
    lines.append("  const int lane = tid & 31, subgroup = tid >> 5;")
    lines.append("  (void)lane, (void)subgroup, (void)table, (void)workgroup;")
    for i, p in enumerate(params):
        ctype = f"{'' if p.writable else 'const '}{p.ctype}*"
        lines.append(f"  {ctype} const {p.name} = ({ctype})((void**)table)[{i}];")
    return "\n".join(lines)


def shared(arrays: Sequence[Array]) -> tuple[list[str], int]:
    lines, at = [], 0
    for a in arrays:
        lines.append(f"{a.ctype}* const {a.name} = ({a.ctype}*)(shared_memory + {at});")
        at += a.nbytes
    return lines, 0


DIALECT = Dialect(
    name="host",
    prelude=(Path(__file__).parent / "prelude.h").read_text(),
    entry=entry,
    shared=shared,
    device=GPU("host", compute_units=4, shared_bytes=160 << 10, registers=65536),
    matrix=(16, 8, 16),
    matrix_types=("float16", "bfloat16"),
    stages=3,
    fragment_access=True,
    grid_barrier=True,
)


class HostTarget(SimtTarget):
    name = "host"
    config = TargetConfig(
        "host",
        panel=0,
        buffer_align=256,
        pair_dtypes=(),
        prologue_rows=1,
        dual_gemm=True,
        bundles=True,
        image_row=32,
    )
    suffix = "cpp"
    dialect = DIALECT

    def build(self, functions: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]:
        exports = [
            f'extern "C" void run_{n}(void** table, int groups, int threads) '
            f"{{ run_groups({n}, table, groups, threads); }}"
            for n in functions
        ]
        exports.append('extern "C" void set_order(int b) { backwards = b; }')
        source = self.dialect.source([*functions.values(), *exports])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels.cpp"
            path.write_text(source)
            flags = "-std=c++17 -O0 -w -fwrapv -ffp-contract=off -fno-strict-aliasing -fPIC -shared".split()
            subprocess.run([CXX or "g++", *flags, str(path), "-o", f"{folder}/kernels.so"], check=True)
            return {"object": Path(folder, "kernels.so").read_bytes()}, (), {"compiler": "g++"}


class FirstStage(HostTarget):
    """The first day of a port: ``loops`` kernels alone. Nodes that need another kernel run on the host."""

    config = replace(HostTarget.config, bundles=False)

    def supports(self, kernel: Kernel) -> Reason | None:
        return None if isinstance(kernel, Loops) else Reason("no_kernel", f"no {kernel.kind} kernel yet")


TARGET = HostTarget()
