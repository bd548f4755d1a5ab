"""How long the parts of a start take: compiling and loading, in fresh processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

from readme import ROOT

STARTS = """
import json, sys, time
import npu_compiler, npu_runtime
from npu_compiler.aten.json_reader import load_ir
ir = load_ir(sys.argv[1])
t = time.perf_counter()
program = npu_compiler.compile(ir, dtype="float16")
compiled = time.perf_counter() - t
program.save(sys.argv[2])
import numpy as np
rng = np.random.default_rng(0)
weights = {w.key: rng.uniform(0.5, 1, w.shape).astype(w.dtype) for w in program.weights}
t = time.perf_counter()
npu_runtime.load(sys.argv[2], weights)
loaded = time.perf_counter() - t
print(json.dumps([compiled, loaded, program.entries["main"].arena_bytes]))
"""


def start_times() -> dict[str, float]:
    """Measure ResNet-50 in float16 in fresh processes: seconds to compile with an empty and with a filled cache,
    and to load the program with its weights; bytes of its arena. Medians of five, except for the empty cache."""
    source = ROOT / "tests" / "data" / "ir" / "resnet50.json"
    with tempfile.TemporaryDirectory() as cache:
        # Byte code is written, as for an installed package.
        settings = {"NPU_CACHE_DIR": cache, "PYTHONPYCACHEPREFIX": f"{cache}/python", "PYTHONPATH": str(ROOT)}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | settings
        command = [sys.executable, "-c", STARTS, str(source), f"{cache}/resnet50.npubin"]
        runs = [
            json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
            for _ in range(6)
        ]
    compiled, loaded, arena = (list(column) for column in zip(*runs, strict=True))
    return {
        "cold_s": compiled[0],
        "warm_s": statistics.median(compiled[1:]),
        "load_s": statistics.median(loaded[1:]),
        "arena_bytes_resnet50_float16_batch1": arena[0],
    }
