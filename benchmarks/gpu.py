"""Ours beside PyTorch on one NVIDIA GPU: eager, CUDA graph, torch.compile; in turns within one run, on random data.

    python benchmarks/gpu.py compile                 compile the programs (needs no GPU), unless they are there
    python benchmarks/gpu.py bandwidth decode-128 decode-32000 prefill-128 resnet50-1 cold-start …
    python benchmarks/gpu.py all                     everything; each part is merged into benchmarks/results/h200.json
    python benchmarks/gpu.py table                   put the table into README.md

Times are medians of device events around bursts of runs that follow each other without waiting. Every part says how
large our error against float32 (ResNet: float64) is, beside PyTorch eager's in the same dtype.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from readme import write_section

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
OURS, EAGER, GRAPH = "npusim", "eager", "eager + CUDA graph"
AUTOTUNE, OVERHEAD = "torch.compile max-autotune", "torch.compile reduce-overhead"
BURST_MS, LEAST_BURSTS = 25.0, 9


READ = r"""
extern "C" __global__ void read(const uint4* p, unsigned* out) {
  unsigned sum = 0;
  const long long step = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i + 3 * step < COUNT; i += 4 * step) {
    uint4 a = __ldcs(p + i), b = __ldcs(p + i + step), c = __ldcs(p + i + 2 * step), d = __ldcs(p + i + 3 * step);
    sum += (a.x ^ a.y ^ a.z ^ a.w) + (b.x ^ b.y ^ b.z ^ b.w) + (c.x ^ c.y ^ c.z ^ c.w) + (d.x ^ d.y ^ d.z ^ d.w);
  }
  if (sum == 1) *out = sum;
}"""


# -- measuring -----------------------------------------------------------------------------------------------------
@dataclass
class Contender:
    """``run`` puts one run on ``stream`` and returns its result, or None for ours."""

    run: Callable[[], Any]
    stream: Any
    compile_s: float = 0.0


def bursts(contenders: dict[str, Contender], seconds: float) -> dict[str, list[float]]:
    """Milliseconds a run, by burst; contenders take turns."""
    import torch

    def burst(c: Contender, count: int) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record(c.stream)
        for _ in range(count):
            c.run()
        last.record(c.stream)
        last.synchronize()
        return first.elapsed_time(last) / count

    counts = {name: max(1, round(BURST_MS / burst(c, 5))) for name, c in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + seconds * len(contenders)
    while time.perf_counter() < end or min(map(len, times.values())) < LEAST_BURSTS:
        for name, c in contenders.items():
            times[name].append(burst(c, counts[name]))
    return times


def rows(times: dict[str, list[float]], contenders: dict[str, Contender]) -> list[dict[str, Any]]:
    return [
        {"contender": name, "median_ms": statistics.median(t), "min_ms": min(t), "bursts": len(t),
         "compile_s": round(contenders[name].compile_s, 1)}
        for name, t in times.items()
    ]  # fmt: skip


def torch_contenders(call: Callable[[], Any], compiled: Callable[[str], Callable[[], Any]], kinds: list[str]) -> Any:
    """``call`` runs the model eagerly; ``compiled(mode)`` gives the same, compiled."""
    import torch

    def ready(kind: str) -> Callable[[], Any]:
        if kind == EAGER:
            return call
        if kind != GRAPH:
            torch._dynamo.reset()
            return compiled(kind.split()[-1])
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    found = {}
    for kind in kinds:
        start = time.perf_counter()
        try:
            run = ready(kind)
            for _ in range(8):
                run()
            torch.cuda.synchronize()
        except Exception as error:  # a peer that fails is not shown
            print(f"  {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        found[kind] = Contender(run, torch.cuda.current_stream(), time.perf_counter() - start)
        print(f"  {kind}: ready after {found[kind].compile_s:.1f} s", flush=True)
    return found


def verdict(ours: np.ndarray, eager: np.ndarray, exact: np.ndarray, top: int) -> dict[str, Any]:
    """RMS errors of rows of scores, and whether the ``top`` largest are the same where PyTorch's own error cannot turn
    them around."""
    error, eager_error = (float(np.sqrt(np.mean((x - exact) ** 2))) for x in (ours, eager))
    kept = True
    for want, got in zip(exact, ours, strict=True):
        order = np.argsort(-want)
        for k in {1, top}:
            if want[order[k - 1]] - want[order[k]] > 4 * eager_error:
                kept = kept and set(np.argsort(-got)[:k]) == set(order[:k])
    within = bool(error <= 1.1 * eager_error)
    return {"error": error, "eager_error": eager_error, "within_gate": within, "top_kept": bool(kept), "top": top}


def host_microseconds(run: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """What a launch costs the host, while the device has nothing to do."""
    times = []
    for _ in range(50):
        wait()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    wait()
    return statistics.median(times) * 1e6


class Ours:
    """A program on the GPU with one entry point bound."""

    def __init__(self, work: Path, name: str, weights: Any):
        import torch
        from gpu_models import programs

        from npu_compiler.compiled_program import CompiledProgram
        from npu_runtime import load_weights
        from npu_runtime.backends.cuda import CUDABackend

        self.backend = CUDABackend()
        self.program = CompiledProgram.load(programs(work)[name])
        self.weights = load_weights(self.program, weights, self.backend)
        self.stream = torch.cuda.ExternalStream(self.backend.stream.ptr)

    def bind(self, entry: str, inputs: list[np.ndarray], state: Any = None) -> None:
        from npu_compiler import dtypes
        from npu_runtime import Executor

        self.executor = Executor(self.program, self.weights, self.backend, entry, state)
        self.inputs = [self.backend.allocate_buffer(x) for x in inputs]
        (spec,) = self.executor.outputs
        self.output = self.backend.allocate_empty(spec.shape, dtypes.numpy_dtype(spec.dtype))
        self.run = self.executor.bind(self.inputs, [self.output])

    def contender(self) -> Contender:
        return Contender(self.run, self.stream)

    def result(self, *inputs: np.ndarray) -> np.ndarray:
        for buffer, value in zip(self.inputs, inputs, strict=True):
            self.backend.copy(buffer, value)
        self.run()
        self.run.finish()
        return self.output.to_numpy().astype(np.float64)

    def facts(self) -> dict[str, Any]:
        calls = self.executor.entry.calls
        return {"kernels": len(calls), "host_us": host_microseconds(self.run, self.run.finish)}


# -- the parts -----------------------------------------------------------------------------------------------------
def bandwidth(args: argparse.Namespace) -> dict[str, Any]:
    """Reading 4 GiB with 16-byte loads and nothing else."""
    import torch

    from npu_compiler.targets.cuda.nvrtc import find_nvrtc
    from npu_runtime.cuda_driver import driver

    data = torch.randint(0, 1 << 30, (1 << 30,), dtype=torch.int32, device="cuda")
    out, stream = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.cuda.current_stream()
    cubin = find_nvrtc().compile(READ.replace("COUNT", str(data.numel() // 4)), "read", "sm_90a").cubin
    _, function = driver().load(cubin, "read", 0)
    found = {}
    for blocks in (4, 8, 16):

        def run(groups: int = 132 * blocks) -> None:
            addresses = [data.data_ptr(), out.data_ptr()]
            driver().launch("read", function, groups, 256, 0, stream.cuda_stream, addresses, False)

        times = bursts({"read": Contender(run, stream)}, 0.3)["read"]
        found[blocks] = data.numel() * 4 / statistics.median(times) / 1e9
    return {"read_tb_per_s": max(found.values()), "by_blocks_a_core": found}


def decode(args: argparse.Namespace, position: int) -> dict[str, Any]:
    """One token behind ``position`` others."""
    import torch
    from gpu_models import LENGTHS, decoder, qwen_weights

    length = LENGTHS[position]
    theirs_length = length if position > 1024 else 256
    weights = qwen_weights()
    ours = Ours(args.work, f"qwen_{length}", {k: v.cpu() for k, v in weights.items()})
    ours.bind("decode", [np.zeros((1, 1), np.int64), np.array([position]), np.zeros(1, np.int64)])
    generator = torch.Generator("cuda").manual_seed(1)
    caches = {}
    for key, buffer in ours.executor.state.items():
        caches[key] = torch.from_dlpack(buffer).normal_(generator=generator)[:, :, :theirs_length]
    torch.cuda.synchronize()
    model, exact = (decoder(weights, theirs_length, t) for t in (torch.bfloat16, torch.float32))
    for m in (model, exact):
        for key, cache in caches.items():
            getattr(m, key.replace("_cache.", "")).copy_(cache)
    ids, at = torch.zeros((1, 1), dtype=torch.int64, device="cuda"), torch.tensor([position], device="cuda")
    found: list[list[np.ndarray]] = [[], [], []]
    for token in (5, 77, 1234, 100000):
        found[0].append(ours.result(np.array([[token]]), np.array([position]), np.zeros(1, np.int64))[0])
        for out, m in zip(found[1:], (model, exact), strict=True):
            out.append(m(ids.fill_(token), at)[0].double().cpu().numpy())
    checked = verdict(*(np.stack(x) for x in found), top=1)
    del exact
    torch.cuda.empty_cache()

    def compiled(mode: str) -> Callable[[], Any]:
        c = torch.compile(model, mode=mode, fullgraph=True)
        return lambda: c(ids, at)

    contenders = {OURS: ours.contender(), **torch_contenders(lambda: model(ids, at), compiled, args.peers)}
    times = bursts(contenders, args.seconds)
    read = ours.weights.nbytes + position * sum(b.size_bytes // length for b in ours.executor.state.values())
    return {"rows": rows(times, contenders), "verdict": checked, "bytes_read": read, **ours.facts()}


def prefill(args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """A prompt from an empty cache, to the logits behind its last token."""
    import torch
    from gpu_models import LENGTHS, NEAR, decoder, qwen_weights

    weights = qwen_weights()
    ours = Ours(args.work, f"qwen_{LENGTHS[NEAR]}", {k: v.cpu() for k, v in weights.items()})
    prompts = np.random.default_rng(0).integers(0, 150000, (2, 1, tokens))
    rest = np.arange(tokens), np.array([tokens - 1])
    ours.bind(f"prefill_{tokens}", [prompts[0], *rest])
    model, exact = (decoder(weights, tokens, t) for t in (torch.bfloat16, torch.float32))
    ids, at = torch.from_numpy(prompts[0]).cuda(), torch.arange(tokens, device="cuda")
    found: list[list[np.ndarray]] = [[], [], []]
    for prompt in prompts:
        found[0].append(ours.result(prompt, *rest)[0])
        for out, m in zip(found[1:], (model, exact), strict=True):
            out.append(m(ids.copy_(torch.from_numpy(prompt)), at)[0].double().cpu().numpy())
    checked = verdict(*(np.stack(x) for x in found), top=1)
    del exact
    torch.cuda.empty_cache()

    def compiled(mode: str) -> Callable[[], Any]:
        c = torch.compile(model, mode=mode, fullgraph=True)
        return lambda: c(ids, at)

    contenders = {OURS: ours.contender(), **torch_contenders(lambda: model(ids, at), compiled, args.peers)}
    times = bursts(contenders, args.seconds)
    flops = 2 * tokens * sum(w.numel() for k, w in weights.items() if "embed" not in k)
    return {"rows": rows(times, contenders), "verdict": checked, "flops": flops, **ours.facts()}


def image(args: argparse.Namespace, name: str, batch: int) -> dict[str, Any]:
    """A ResNet in float16, channels last for PyTorch."""
    import torch
    from gpu_models import resnet
    from torch._inductor import config as inductor

    inductor.freezing = True
    torch.backends.cudnn.benchmark = True
    model = resnet(name).to(memory_format=torch.channels_last)
    ours = Ours(args.work, f"{name}_{batch}", {k: v.cpu().contiguous() for k, v in model.state_dict().items()})
    x = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1)).half()
    ours.bind("main", [x.numpy()])
    theirs = x.cuda().to(memory_format=torch.channels_last)
    wide = copy.deepcopy(model).double()
    some = min(batch, 16)
    found = ours.result(x.numpy())[:some], model(theirs)[:some].double().cpu().numpy()
    checked = verdict(*found, wide(x[:some].double().cuda()).cpu().numpy(), top=5)

    def compiled(mode: str) -> Callable[[], Any]:
        c = torch.compile(model, mode=mode)
        return lambda: c(theirs)

    contenders = {OURS: ours.contender(), **torch_contenders(lambda: model(theirs), compiled, args.peers)}
    times = bursts(contenders, args.seconds)
    return {"rows": rows(times, contenders), "verdict": checked, "batch": batch, **ours.facts()}


def cold_start(args: argparse.Namespace) -> dict[str, Any]:
    """From the start of a process to the first token of a compiled Qwen2.5-1.5B, with packed weights cached."""
    import safetensors.torch
    from gpu_models import LENGTHS, NEAR, programs, qwen_weights

    program = programs(args.work)[f"qwen_{LENGTHS[NEAR]}"]
    weights = program.with_suffix(".safetensors")
    if not weights.exists():
        safetensors.torch.save_file({k: v.cpu() for k, v in qwen_weights().items()}, weights)
    starts = [_start(program) for _ in range(4)]
    return {"first_start": starts[0], "starts": starts[1:], "seconds": min(s["first_token"] for s in starts[1:])}


def _start(program: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "cold-child", "--work", str(program), "--since", str(time.time())]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(" ", done.stdout.splitlines()[-1], flush=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cold_child(args: argparse.Namespace) -> None:
    """Prints seconds since the process was started, and what the tokens after the first take."""
    marks = {"python": time.time() - args.since}
    from npu_runtime.llm import LLM

    marks["import"] = time.time() - args.since
    llm = LLM.load(args.work, target="cuda")
    marks["loaded"] = time.time() - args.since
    prompt = np.random.default_rng(0).integers(0, 150000, 100).tolist()
    answer = llm.generate(prompt, max_tokens=101, ignore_eos=True)
    next(answer)
    marks["first_token"] = time.time() - args.since
    answer.run()
    maps = Path("/proc/self/maps").read_text()
    compiler = "libnvrtc" in maps or "npu_compiler.targets.cuda.nvrtc" in sys.modules
    found = {k: round(v, 3) for k, v in marks.items()}
    print(json.dumps({**found, "tokens_per_second": answer.timings.decode_per_second, "nvrtc_loaded": compiler}))


# -- the file and the table ----------------------------------------------------------------------------------------
def parts() -> dict[str, tuple[Callable[..., dict[str, Any]], tuple[Any, ...], list[str]]]:
    """Name -> what measures it, with which arguments, beside which peers."""
    from gpu_models import FAR, NEAR, PREFILLS, RESNETS

    found: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Any, ...], list[str]]] = {
        "bandwidth": (bandwidth, (), []),
        "cold-start": (cold_start, (), []),
        f"decode-{NEAR}": (decode, (NEAR,), [EAGER, GRAPH, OVERHEAD, AUTOTUNE]),
        f"decode-{FAR}": (decode, (FAR,), [GRAPH, OVERHEAD, AUTOTUNE]),
    }
    found |= {f"prefill-{n}": (prefill, (n,), [EAGER, OVERHEAD]) for n in PREFILLS}
    for name, batch in RESNETS:
        found[f"{name}-{batch}"] = (image, (name, batch), [GRAPH, AUTOTUNE if batch == 1 else OVERHEAD])
    return found


@contextmanager
def merged(out: Path) -> Iterator[dict[str, Any]]:
    """The results so far; what is added is written."""
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"parts": {}}
    yield results
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


def environment() -> dict[str, Any]:
    import cupy
    import torch

    from npu_runtime.cuda_driver import driver

    names = {"torch": torch.__version__, "cupy": cupy.__version__, "numpy": np.__version__}
    return {
        "hardware": driver().devices()[0].name, "driver": ".".join(map(str, driver().version)), "versions": names,
        "date": date.today().isoformat(),
    }  # fmt: skip


def show(name: str, part: dict[str, Any]) -> None:
    if "rows" not in part:
        print(name, json.dumps({k: v for k, v in part.items() if k != "starts"}), flush=True)
        return
    v = part["verdict"]
    passed = "ok" if v["within_gate"] and v["top_kept"] else "FAILS THE GATE"
    print(f"{name}: {passed} (error {v['error']:.3g}, eager {v['eager_error']:.3g}), host {part['host_us']:.1f} us")
    for row in part["rows"]:
        print(f"  {row['contender']:32s} {row['median_ms']:9.4f} ms  (min {row['min_ms']:.4f})", flush=True)


def table(results: dict[str, Any]) -> str:
    kinds = [AUTOTUNE, OVERHEAD, GRAPH, EAGER]
    lines = ["| | npusim | " + " | ".join(kinds) + " |", "|---|" + "---:|" * (len(kinds) + 1)]
    for name, part in results["parts"].items():
        if "rows" not in part:
            continue
        by = {r["contender"]: r["median_ms"] for r in part["rows"]}
        best = min((ms for kind, ms in by.items() if kind != OURS), default=float("nan"))
        v = part["verdict"]
        mark = "" if v["within_gate"] and v["top_kept"] else " ✗"
        ours = f"**{by[OURS]:.3f}** (×{best / by[OURS]:.2f}{_rate(name, part, by[OURS])}){mark}"
        cells = [ours, *(f"{by[k]:.3f}" if k in by else "" for k in kinds)]
        lines.append(f"| {_label(name)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _caption(results)])


def _label(name: str) -> str:
    kind, _, number = name.partition("-")
    if kind == "decode":
        return f"Qwen2.5-1.5B, bfloat16, one token at position {int(number):,}"
    if kind == "prefill":
        return f"Qwen2.5-1.5B, bfloat16, a prompt of {number}"
    return f"{kind.replace('resnet', 'ResNet-')}, float16, batch {number}"


def _rate(name: str, part: dict[str, Any], ms: float) -> str:
    if "bytes_read" in part:
        return f"; {1000 / ms:.0f} tokens/s, {part['bytes_read'] / ms / 1e9:.2f} TB/s"
    if "flops" in part:
        return f"; {part['flops'] / ms / 1e9:.0f} TFLOP/s"
    return f"; {part['batch'] * 1000 / ms:,.0f} images/s" if part["batch"] > 1 else ""


def _caption(results: dict[str, Any]) -> str:
    found, versions = results["parts"], ", ".join(f"{k} {v}" for k, v in results["versions"].items())
    text = [
        f"Median milliseconds, {results['hardware']}, CUDA {results['driver']} driver, {results['date']}; in brackets "
        "how many times as fast as the fastest of the others. Random weights and inputs. Errors against float32 "
        "(ResNet: float64) are at most 1.1 × PyTorch eager's in the same dtype, and the largest scores the same, "
        "unless marked ✗."
    ]
    host = [p["host_us"] for p in found.values() if "host_us" in p]
    if host:
        text.append(f"A launch takes {min(host):.0f} to {max(host):.0f} µs of the host.")
    if "bandwidth" in found:
        text.append(f"Reading alone runs at {found['bandwidth']['read_tb_per_s']:.2f} TB/s.")
    if "cold-start" in found:
        text.append(
            f"A process that loads the compiled Qwen2.5-1.5B with its packed weights cached has its first token after "
            f"{found['cold-start']['seconds']:.1f} s and calls no compiler."
        )
    return " ".join([*text, f"Versions: {versions}. Command: `python benchmarks/gpu.py all`."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", help="compile, all, table, or parts as above")
    parser.add_argument("--work", type=Path, default=Path("gpu_programs"), help="where compiled programs are kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each contender")
    parser.add_argument("--peers", nargs="*", help=f"of {EAGER!r}, {GRAPH!r}, {OVERHEAD!r}, {AUTOTUNE!r}")
    parser.add_argument("--since", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parts == ["table"]:
        write_section("gpu", table(json.loads(args.out.read_text())))
        return
    if args.parts == ["cold-child"]:
        cold_child(args)
        return
    import gpu_models
    import torch

    gpu_models.compile_all(args.work)
    if args.parts == ["compile"]:
        return
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    known, asked = parts(), args.parts
    for name in known if asked == ["all"] else asked:
        measure, arguments, peers = known[name]
        part_args = argparse.Namespace(**{**vars(args), "peers": peers if args.peers is None else args.peers})
        start = time.perf_counter()
        with torch.no_grad():
            part = measure(part_args, *arguments)
        part |= {
            "command": " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
            "took_s": time.perf_counter() - start,
        }
        show(name, part)
        with merged(args.out) as results:
            results |= environment()
            results["parts"][name] = part
        torch.cuda.empty_cache()


if __name__ == "__main__":
    os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    main()
