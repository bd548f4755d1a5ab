"""Constants that stand both in kernels and in the Python code that sizes memory for them: they are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from npu_compiler import targets
from npu_compiler.support import env
from npu_compiler.targets.cpu import limbs
from npu_compiler.targets.cpu.devices import CONFIG
from npu_compiler.targets.cuda import tile_selection, tma_conv
from npu_compiler.targets.simt.kernels import attention_decode
from npu_compiler.weights import block_rows, format, packing

FOLDER = Path(targets.__file__).parent
PAIRS = [
    ("cpu/kernels/storage.h", "PANEL", format.PANEL),
    ("cpu/kernels/pool.cpp", "MAX_THREADS", env.MAX_THREADS),
    ("cpu/kernels/vectors.h", "VL", CONFIG.vector_lanes),  # the first is the widest
    ("cpu/kernels/amx_tile.h", "AMX_UNITS", packing._GROUP // 2),
    ("cpu/kernels/amx_tile.h", "AMX_UNITS", limbs._GROUP // 2),
    ("simt/kernels/attention_decode.h", "HEADS", attention_decode.HEADS),
    ("simt/kernels/gemv_blocks_mma.h", "QUAD", block_rows.QUAD),
    ("cuda/kernels/tma_result_stages.h", "SUBTILE", tile_selection.SUBTILE),
    ("cuda/kernels/tma_thread_stores.h", "PARTS_PAD", tile_selection.PAD),
    ("cuda/kernels/tma_conv.h", "LINE_BLOCK", tma_conv.BLOCK),
]


@pytest.mark.parametrize(("file", "name", "value"), PAIRS)
def test_kernels_and_the_code_that_sizes_memory_agree(file: str, name: str, value: int) -> None:
    text = (FOLDER / file).read_text(encoding="utf-8")
    found = re.search(rf"(?:constexpr|CONSTANTS) (?:int|long) (?:\w+ = \d+, )*{name} = (\d+)\b", text)
    assert found is not None and int(found[1]) == value
