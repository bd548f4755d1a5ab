"""Ours beside PyTorch on one NVIDIA GPU: eager, CUDA graph, torch.compile; in turns within one run, on random data.

    python benchmarks/gpu.py compile                 compile the programs (needs no GPU), unless they are there
    python benchmarks/gpu.py bandwidth decode-128 decode-32000 prefill-128 resnet50-1 cold-start …
    python benchmarks/gpu.py all                     everything; each part is merged into benchmarks/results/h200.json
    python benchmarks/gpu.py table                   put the table into README.md

Times are medians of device events around bursts of runs that follow each other without waiting. Every part says how
large our error against float32 (ResNet: float64) is, beside PyTorch eager's in the same dtype. Each runs in a process
of its own. Several get ready together, since compiling PyTorch's models takes minutes, and then measure one after the
other; those that tune kernels on the GPU are alone from their start.
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
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from gpu_table import AUTOTUNE, EAGER, GRAPH, OURS, OVERHEAD, merged, table
from readme import write_section

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
BURST_MS, MIN_BURSTS = 25.0, 9


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
    while time.perf_counter() < end or min(map(len, times.values())) < MIN_BURSTS:
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

        from npu_compiler.artifact.program import CompiledProgram
        from npu_runtime import load_weights
        from npu_runtime.backends.cuda import CUDABackend

        self.backend = CUDABackend()
        self.program = CompiledProgram.load(programs(work)[name])
        self.weights = load_weights(self.program, weights, self.backend)
        self.stream = torch.cuda.ExternalStream(self.backend.stream.ptr)

    def bind(self, entry: str, inputs: list[np.ndarray], state: Any = None) -> None:
        from npu_compiler.support import dtypes
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
    from npu_runtime.backends.cuda.driver import driver

    data = torch.randint(0, 1 << 30, (1 << 30,), dtype=torch.int32, device="cuda")
    out, stream = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.cuda.current_stream()
    cubin = find_nvrtc().compile(READ.replace("COUNT", str(data.numel() // 4)), "read", "sm_90a").cubin
    _, function = driver().load(cubin, "read", 0)
    args.turn()
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
        if "_cache." in key:
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
    args.turn()
    times = bursts(contenders, args.seconds)
    cache = position * sum(b.size_bytes // length for b in ours.executor.state.values())
    read = ours.executor.entry.product_bytes + cache
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
    args.turn()
    times = bursts(contenders, args.seconds)
    flops = sum(call.flops for call in ours.executor.entry.calls if call.kind == "gemm")
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
    args.turn()
    times = bursts(contenders, args.seconds)
    return {"rows": rows(times, contenders), "verdict": checked, "batch": batch, **ours.facts()}


def cold_start(args: argparse.Namespace) -> dict[str, Any]:
    """From the start of a process to the first token of a compiled Qwen2.5-1.5B, with packed weights cached."""
    import safetensors.torch
    from gpu_models import LENGTHS, NEAR, programs, qwen_weights

    args.turn()
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
    from npu_runtime.llm.model import LLM

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


# -- running the parts ------------------------------------------------------------------------------------------------
PARTS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Any, ...], list[str]]] = {
    "bandwidth": (bandwidth, (), []),
    **{f"prefill-{n}": (prefill, (n,), [EAGER, OVERHEAD]) for n in (128, 512, 2048)},
    "decode-32000": (decode, (32000,), [GRAPH, OVERHEAD]),
    "decode-128": (decode, (128,), [EAGER, GRAPH, AUTOTUNE]),
    **{
        f"{name}-{batch}": (image, (name, batch), [GRAPH, OVERHEAD])
        for name in ("resnet50", "resnet18")
        for batch in (1, 256)
    },
    "cold-start": (cold_start, (), []),
}
READY = "ready to measure"


def measure_all(names: list[str], args: argparse.Namespace) -> None:
    """Each part in a process of its own; those that neither tune nor time their own start get ready together, but
    images (cuDNN tries its kernels out) apart from the rest."""
    groups: dict[Any, list[str]] = {}
    for name in names:
        peers = PARTS[name][2] if args.peers is None else args.peers
        alone = AUTOTUNE in peers or name == "cold-start"
        groups.setdefault(name if alone else PARTS[name][0] is image, []).append(name)
    for group in groups.values():
        children = {name: _child(name, args, len(group)) for name in group}
        waiting = {name: child for name, child in children.items() if _forward(child, READY)}
        while args.hold is not None and args.hold.exists():
            time.sleep(0.2)
        for child in waiting.values():
            assert child.stdin is not None
            child.stdin.close()  # its turn
            _forward(child, None)
        for name, child in children.items():
            if child.wait():
                print(f"{name}: ended with status {child.returncode}", flush=True)


def _child(name: str, args: argparse.Namespace, together: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, name, "--one", "--work", str(args.work), "--out", str(args.out)]
    command += ["--seconds", str(args.seconds), *([] if args.peers is None else ["--peers", *args.peers])]
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // together))}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | threads)


def _forward(child: subprocess.Popen[str], until: str | None) -> bool:
    """Print what the child prints, up to the line ``until``; whether it came."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.rstrip() == until:
            return True
        print(line, end="", flush=True)
    return False


def measure_one(name: str, args: argparse.Namespace) -> None:
    """In the child: get ready, wait for standard input to end, measure, merge the results into the file."""
    import torch

    def turn() -> None:
        print(READY, flush=True)
        sys.stdin.read()

    measure, arguments, peers = PARTS[name]
    args.turn, args.peers = turn, peers if args.peers is None else args.peers
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    start = time.perf_counter()
    with torch.no_grad():
        part = measure(args, *arguments)
    part |= {"peers": args.peers, "took_s": round(time.perf_counter() - start, 1)}
    show(name, part)
    with merged(args.out) as results:
        results |= environment()
        results["parts"][name] = part


def environment() -> dict[str, Any]:
    import cupy
    import torch

    from npu_runtime.backends.cuda.driver import driver

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", help="compile, all, table, or parts as above")
    parser.add_argument("--work", type=Path, default=Path("gpu_programs"), help="where compiled programs are kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each contender")
    parser.add_argument("--peers", nargs="*", help=f"of {EAGER!r}, {GRAPH!r}, {OVERHEAD!r}, {AUTOTUNE!r}")
    parser.add_argument("--hold", type=Path, help="get ready, but measure only once this file is gone")
    parser.add_argument("--since", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parts == ["table"]:
        write_section("gpu", table(json.loads(args.out.read_text())))
    elif args.parts == ["cold-child"]:
        cold_child(args)
    elif args.one:
        measure_one(args.parts[0], args)
    else:
        from gpu_models import compile_all

        compile_all(args.work)
        if args.parts != ["compile"]:
            measure_all(list(PARTS) if args.parts == ["all"] else args.parts, args)


if __name__ == "__main__":
    main()
