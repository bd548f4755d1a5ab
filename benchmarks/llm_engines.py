"""One engine of the language-model benchmark, in a process of its own that reads orders from standard input.

Usage: ``python benchmarks/llm_engines.py NAME CHECKPOINT_FOLDER``. Each line is one of

``prefill N``         computes a prompt of N tokens from an empty cache
``decode P COUNT``    decodes COUNT tokens one by one, the first at position P (the cache is filled beforehand, untimed)
``logits N``          the logits after the last token of a prompt of N

The answer is a line of JSON: the seconds of each timed call, or the path of a file with the logits.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

THREADS = int(os.environ.get("NPU_BENCH_THREADS", "2"))
MAX_LEN = 4352
STEPS = 64  # positions that decoding may pass its nominal one before the cache is cut back


def prompt(length: int) -> list[int]:
    """Return random token ids, the same for all engines and within every model's vocabulary."""
    return np.random.default_rng(0).integers(0, 49000, MAX_LEN)[:length].tolist()


class Engine:
    """The interface of an engine, which runs tokens from a position on, and the timed loops that all engines share."""

    filled = -1  # positions of the prompt that the cache holds before a decode; -1: unknown

    def feed(self, tokens: list[int], start: int) -> Any:
        """Compute ``tokens`` as positions ``start``, ``start + 1``, …, over a cache that holds those before."""
        raise NotImplementedError

    def cut(self, length: int) -> None:
        """Drop all positions of the cache from ``length`` on."""
        raise NotImplementedError

    def logits(self, length: int) -> np.ndarray:
        """Return the logits float32[vocab] after the last of ``length`` tokens."""
        raise NotImplementedError

    def prefill(self, length: int) -> list[float]:
        """Return the seconds of a prompt of ``length`` tokens, from an empty cache."""
        self.cut(0)
        start = time.perf_counter()
        self.feed(prompt(length), 0)
        return [time.perf_counter() - start]

    def decode(self, position: int, count: int) -> list[float]:
        """Return the seconds of each of ``count`` decoded tokens, the first at ``position``."""
        self.fill(position)
        seconds = []
        for i in range(count):
            start = time.perf_counter()
            self.feed([7 + i], position + i)
            seconds.append(time.perf_counter() - start)
        return seconds

    def fill(self, position: int) -> None:
        """Make the cache hold ``position`` positions: cut it back if it was filled so far, else compute it."""
        if self.filled == position:
            self.cut(position)
        else:
            self.cut(0)
            self.feed(prompt(position), 0)
            self.filled = position


class Npusim(Engine):
    """This project, by default on the CPU."""

    def __init__(self, folder: Path, dtype: str | None = None, target: str = "cpu"):
        from npu_runtime.llm.model import LLM

        begin = time.perf_counter()
        model = folder if (folder / "config.json").exists() else folder / "model.gguf"
        self.llm = LLM.load(model, target=target, dtype=dtype, max_len=MAX_LEN, threads=THREADS)
        self.ready = time.perf_counter() - begin
        self.weight_bytes = self.llm.program.entries["decode"].product_bytes
        self.held: list[int] = []

    def feed(self, tokens: list[int], start: int) -> np.ndarray:
        del self.held[start:]
        self.held += tokens
        return self.llm._feed(self.held, start)

    def cut(self, length: int) -> None:
        del self.held[length:]
        self.llm.forget()
        self.filled = length if length else -1

    def logits(self, length: int) -> np.ndarray:
        self.cut(0)
        return np.array(self.feed(prompt(length), 0), np.float32).reshape(-1)


GGML_LOG_LEVEL_ERROR = 4  # of ggml.h


class LlamaCpp(Engine):
    """llama.cpp through its C API, with ``gpu_layers`` of the layers on the GPU (-1: all)."""

    def __init__(self, folder: Path, gpu_layers: int = 0):
        import llama_cpp

        self.api = api = llama_cpp
        self.buffers: list[str] = []
        self.log = api.llama_log_callback(self.note)  # kept, because the library calls it
        api.llama_log_set(self.log, None)
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.n_gpu_layers, params.use_mmap = gpu_layers, False
        self.model = api.llama_model_load_from_file(str(folder / "model.gguf").encode(), params)
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = MAX_LEN, 512, 512
        options.n_threads = options.n_threads_batch = THREADS
        options.flash_attn_type = 1
        self.context = api.llama_init_from_model(self.model, options)
        assert self.model and self.context, "llama.cpp could not load the model"
        self.memory = api.llama_get_memory(self.context)
        self.vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def note(self, level: int, text: bytes, data: Any) -> None:
        """Keep the lines of the log that say which kernels have which weights; print errors."""
        line = text.decode(errors="replace").strip()
        if "model buffer size" in line:
            self.buffers.append(" ".join(line.split()[1:]))
        elif level == GGML_LOG_LEVEL_ERROR:
            print(line, file=sys.stderr)

    def feed(self, tokens: list[int], start: int) -> None:
        for at in range(0, len(tokens), 512):
            part = tokens[at : at + 512]
            array = (self.api.llama_token * len(part))(*part)
            code = self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(part)))
            assert code == 0, code
        self.api.llama_synchronize(self.context)

    def fill(self, position: int) -> None:
        self.api.llama_set_n_threads(self.context, THREADS, len(os.sched_getaffinity(0)))  # it is not timed
        super().fill(position)
        self.api.llama_set_n_threads(self.context, THREADS, THREADS)

    def cut(self, length: int) -> None:
        self.api.llama_memory_seq_rm(self.memory, 0, length, -1)
        if not length:
            self.filled = -1

    def logits(self, length: int) -> np.ndarray:
        self.cut(0)
        self.feed(prompt(length), 0)
        row = self.api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(row, (self.vocab,)).copy()


class OpenVINO(Engine):
    """The stateful decoder that optimum-intel exports, weights in float16, arithmetic in bfloat16."""

    def __init__(self, folder: Path):
        import openvino

        settings = {
            "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": THREADS, "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": "bf16",
        }  # fmt: skip
        model = openvino.Core().read_model(str(folder / "openvino" / "openvino_model.xml"))
        compiled = openvino.Core().compile_model(model, "CPU", settings)
        self.at = 0
        self.request = compiled.create_infer_request()
        self.names = {n for i in compiled.inputs for n in i.get_names()}

    def feed(self, tokens: list[int], start: int) -> np.ndarray:
        n = len(tokens)
        feed = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, start + n), np.int64)}
        feed["position_ids"] = np.arange(start, start + n)[None]
        feed["beam_idx"] = np.zeros(1, np.int32)
        self.request.infer({k: v for k, v in feed.items() if k in self.names})
        return self.request.get_output_tensor(0).data

    def cut(self, length: int) -> None:
        """Compute the state anew, because OpenVINO's cannot be cut."""
        self.request.reset_state()
        self.filled = -1
        if length:
            self.feed(prompt(length), 0)
            self.filled = length

    def decode(self, position: int, count: int) -> list[float]:
        if self.filled != position or self.at + count > position + STEPS:
            self.cut(position)
            self.at = position
        seconds = []
        for i in range(count):
            start = time.perf_counter()
            self.feed([7 + i], self.at)
            seconds.append(time.perf_counter() - start)
            self.at += 1
        return seconds

    def logits(self, length: int) -> np.ndarray:
        self.cut(0)
        return np.array(self.feed(prompt(length), 0)[0, -1], np.float32)


class Torch(Engine):
    """transformers, eager, with a static cache."""

    POSITIONS = 256  # of the cache, but for longer prompts

    def __init__(self, folder: Path, dtype: str = "bfloat16", device: str = "cpu"):
        import torch
        from transformers import AutoModelForCausalLM, StaticCache

        torch.set_num_threads(THREADS)
        torch.set_grad_enabled(False)
        self.torch, self.device = torch, device
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
        self.static = StaticCache
        self.cache = StaticCache(config=self.model.config, max_cache_len=self.POSITIONS)

    def feed(self, tokens: list[int], start: int) -> Any:
        torch = self.torch
        if not start:  # attention reads all positions of a static cache, so it has as few as possible
            self.resize(max(self.POSITIONS, len(tokens)))
        ids = torch.tensor([tokens], device=self.device)
        at = torch.arange(start, start + len(tokens), device=self.device)[None]
        logits = self.model(
            input_ids=ids, position_ids=at, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits
        return logits.cpu()  # waits for a GPU

    def resize(self, positions: int) -> None:
        """Replace the cache unless it has that many positions."""
        if self.cache.max_cache_len != positions:
            self.cache = self.static(config=self.model.config, max_cache_len=positions)

    def cut(self, length: int) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length.fill_(length)
        if not length:
            self.cache.reset()
            self.filled = -1

    def logits(self, length: int) -> np.ndarray:
        ids = self.torch.tensor([prompt(length)], device=self.device)
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float().cpu().numpy()


class MLX(Engine):
    """mlx-lm, on the GPU of a Mac."""

    def __init__(self, folder: Path):
        import mlx.core
        from mlx_lm.models import cache
        from mlx_lm.utils import load_model

        self.core, self.caches = mlx.core, cache
        self.model, _ = load_model(folder)
        self.cache = cache.make_prompt_cache(self.model)

    def feed(self, tokens: list[int], start: int) -> Any:
        logits = self.model(self.core.array([tokens]), cache=self.cache)[0, -1].astype(self.core.float32)
        self.core.eval(logits)
        return logits

    def cut(self, length: int) -> None:
        self.caches.trim_prompt_cache(self.cache, self.cache[0].offset - length)
        if not length:
            self.filled = -1

    def logits(self, length: int) -> np.ndarray:
        self.cut(0)
        return np.array(self.feed(prompt(length), 0))


class Probe(Engine):
    """Memory bandwidth at this moment: the fastest of three patterns of reading 512 MiB on all threads."""

    BYTES = 512 << 20

    def __init__(self, folder: Path):
        from concurrent.futures import ThreadPoolExecutor

        from npu_compiler.targets.cpu.target import KERNELS
        from npu_compiler.targets.cpu.toolchain import build_shared
        from npu_runtime import CPUBackend
        from npusim.profiling.roofline import PROBE

        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(build_shared({"probe.cpp": PROBE.read_text()}, KERNELS))
            file.flush()
            self.read = ctypes.CDLL(file.name).read_all
        self.read.argtypes, self.read.restype = (ctypes.c_void_p, ctypes.c_long, ctypes.c_int), ctypes.c_float
        self.memory = CPUBackend(threads=1).allocate_empty((self.BYTES,), np.dtype(np.uint8)).to_numpy(copy=False)
        self.memory[:] = 1
        self.pool = ThreadPoolExecutor(THREADS)

    def decode(self, position: int, count: int) -> list[float]:
        """Return the seconds per byte of the fastest pattern."""
        part = self.BYTES // THREADS // 4096 * 4096
        starts = [self.memory.ctypes.data + t * part for t in range(THREADS)]
        best = float("inf")
        for streams in (1, 2, 4):
            for _ in range(2):
                begin = time.perf_counter()
                list(self.pool.map(lambda at, s=streams: self.read(at, part, s), starts))
                best = min(best, (time.perf_counter() - begin) / (part * THREADS))
        return [best]


ENGINES = {
    "npusim": Npusim, "llama.cpp": LlamaCpp, "openvino": OpenVINO, "torch": Torch, "probe": Probe,
    "torch float32": lambda folder: Torch(folder, "float32"),
    "npusim metal": lambda folder: Npusim(folder, target="metal"), "mlx": MLX,
    "torch mps": lambda folder: Torch(folder, device="mps"), "llama.cpp metal": lambda folder: LlamaCpp(folder, -1),
}  # fmt: skip


def resident() -> int:
    """Return the resident memory of this process in bytes; on a Mac, the most that it had."""
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Load an engine, print its facts, then answer orders until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries must not mix with the answers
    engine = ENGINES[sys.argv[1]](Path(sys.argv[2]))
    print(
        json.dumps(
            {
                "resident": resident(),
                "ready_s": getattr(engine, "ready", None),
                "weight_bytes": getattr(engine, "weight_bytes", 0),
                "buffers": getattr(engine, "buffers", []),
            }
        ),
        file=answers,
        flush=True,
    )
    for line in sys.stdin:
        order, *numbers = line.split()
        result: Any
        if order == "logits":
            result = f"{tempfile.mkdtemp()}/logits.npy"
            np.save(result, engine.logits(*map(int, numbers)))
        else:
            result = getattr(engine, order)(*map(int, numbers))
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
