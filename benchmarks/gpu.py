"""npusim beside PyTorch (eager, CUDA graph, torch.compile) on one NVIDIA GPU, in turns within one run, on random data.

    python benchmarks/gpu.py compile [PART …]        compile the missing programs (needs no GPU)
    python benchmarks/gpu.py bandwidth decode-128 decode-32000 prefill-128 resnet50-1 cold-start …
    python benchmarks/gpu.py all                     everything; each part is merged into benchmarks/results/h200.json
    python benchmarks/gpu.py table                   put the table into README.md and docs/performance.md

Times are medians of device events around bursts of back-to-back runs. Every part reports our error against float32
(ResNet: float64) beside PyTorch eager's in the same dtype, and runs in a process of its own. Several parts prepare at
the same time, since compiling PyTorch's models takes minutes, and then measure one after the other. Parts that tune
kernels on the GPU run alone.
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
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from gpu_measure import Contender, Ours, bursts, compare, verdict
from gpu_table import AUTOTUNE, EAGER, GRAPH, OVERHEAD, merged, table
from readme import write_section

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
INT8_ERROR = 0.05  # largest error of 8-bit networks, relative to the largest score


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


# -- the parts -----------------------------------------------------------------------------------------------------
def bandwidth(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the read bandwidth: 4 GiB with 16-byte loads and nothing else."""
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

        def run(grid: int = 132 * blocks) -> None:
            addresses = [data.data_ptr(), out.data_ptr()]
            driver().launch("read", function, grid, 256, 0, stream.cuda_stream, addresses, False)

        times = bursts({"read": Contender(run, stream)}, 0.3)["read"]
        found[blocks] = data.numel() * 4 / statistics.median(times) / 1e9
    return {"read_tb_per_s": max(found.values()), "by_blocks_per_sm": found}


def qwen(args: argparse.Namespace, length: int, format: str) -> tuple[Ours, dict[str, Any]]:
    """Return our program with caches of ``length`` and weights in ``format`` (see ``compile_qwen``), and the weights
    that it computes with."""
    import torch
    from gpu_models import Quantized, qwen_weights

    from npu_compiler.weights.format import BlockFormat, weight_format

    weights, chosen = qwen_weights(), weight_format(format.partition("+")[0] or None)
    name = f"qwen-{format}_{length}" if format else f"qwen_{length}"
    if not isinstance(chosen, BlockFormat):
        return Ours(args.work, name, {k: v.cpu() for k, v in weights.items()}), weights
    source = Quantized(weights, chosen)
    del weights
    torch.cuda.empty_cache()
    return Ours(args.work, name, source), source.decoded()


def decode(args: argparse.Namespace, position: int, format: str = "") -> dict[str, Any]:
    """Measure decoding one token after ``position`` others."""
    import torch
    from gpu_models import cache_length, decoder

    length = cache_length(position)
    theirs_length = 256 if position < 256 else length
    ours, weights = qwen(args, length, format)
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

    measured = compare(ours, model, (ids, at), args)
    cache = position * sum(b.size_bytes // length for b in ours.executor.state.values())
    read = ours.executor.entry.product_bytes + cache
    return {"rows": measured, "verdict": checked, "bytes_read": read, **ours.facts()}


def prefill(args: argparse.Namespace, tokens: int, format: str = "") -> dict[str, Any]:
    """Measure a prompt of ``tokens``: from an empty cache to the logits of its last token."""
    import torch
    from gpu_models import SHORT, decoder, quantise_rows

    ours, weights = qwen(args, SHORT, format)
    prompts = np.random.default_rng(0).integers(0, 150000, (2, 1, tokens))
    rest = np.arange(tokens), np.array([tokens - 1])
    ours.bind(f"prefill_{tokens}", [prompts[0], *rest])
    model, exact = (decoder(weights, tokens, t) for t in (torch.bfloat16, torch.float32))
    for m in (model, exact) if "+" in format else ():
        quantise_rows(m)
    ids, at = torch.from_numpy(prompts[0]).cuda(), torch.arange(tokens, device="cuda")
    found: list[list[np.ndarray]] = [[], [], []]
    for prompt in prompts:
        found[0].append(ours.result(prompt, *rest)[0])
        for out, m in zip(found[1:], (model, exact), strict=True):
            out.append(m(ids.copy_(torch.from_numpy(prompt)), at)[0].double().cpu().numpy())
    checked = verdict(*(np.stack(x) for x in found), top=1)
    del exact
    torch.cuda.empty_cache()

    measured = compare(ours, model, (ids, at), args)
    flops = sum(call.flops for call in ours.executor.entry.calls if call.kind.startswith("gemm"))
    return {"rows": measured, "verdict": checked, "flops": flops, **ours.facts()}


def image(args: argparse.Namespace, name: str, batch: int) -> dict[str, Any]:
    """Measure a ResNet in float16; PyTorch runs it in channels-last layout."""
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

    measured = compare(ours, model, (theirs,), args)
    return {"rows": measured, "verdict": checked, "batch": batch, **ours.facts()}


def quantised_image(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Measure a ResNet that ``npusim quantize``'s code quantised to 8 bits; PyTorch runs the network in float16.

    The verdict compares results with those of the CPU target, which have to be equal, and with the network in float32.
    """
    import torch
    from gpu_int8 import BATCH, CHECKED, files, verdict
    from gpu_models import resnet
    from torch._inductor import config as inductor

    from npu_compiler.artifact.program import CompiledProgram
    from npu_runtime.model import weights_beside

    inductor.freezing = True
    torch.backends.cudnn.benchmark = True
    program, checks = files(args.work, name)
    ours = Ours(args.work, name, weights_beside(program), CompiledProgram.load(program))
    expected = np.load(checks)
    x = np.concatenate([expected["images"]] * (BATCH // CHECKED))
    ours.bind("main", [x])
    checked = verdict(ours.result(x)[:CHECKED], expected, INT8_ERROR)

    theirs = torch.randn(x.shape, device="cuda").half().to(memory_format=torch.channels_last)
    measured = compare(ours, resnet(name).to(memory_format=torch.channels_last), (theirs,), args)
    return {"rows": measured, "verdict": checked, "batch": BATCH, **ours.facts()}


def denoised(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Measure a model of ``gpu_denoisers``; PyTorch runs it in channels-last layout."""
    import torch
    from gpu_denoisers import DENOISERS, Positional, denoiser, tensors

    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = True, False
    model, inputs = denoiser(name)
    weights = {k: v.contiguous() for k, v in model.state_dict().items()}
    ours = Ours(args.work, f"{name}_{DENOISERS[name]}", weights)
    held = tensors(inputs)
    ours.bind("main", [t.numpy() for t in held])
    theirs = Positional(model.cuda().to(memory_format=torch.channels_last), inputs)
    given = tuple(t.cuda() for t in held)
    found = ours.result(*(t.numpy() for t in held)), theirs(*given).double().cpu().numpy()
    wide = Positional(copy.deepcopy(model).float(), inputs)
    exact = wide(*(t.float() if t.is_floating_point() else t for t in given)).double().cpu().numpy()
    checked = verdict(*(x.reshape(DENOISERS[name], -1) for x in (*found, exact)), top=1)
    del wide
    torch.cuda.empty_cache()

    measured = compare(ours, theirs, given, args)
    flops = sum(call.flops for call in ours.executor.entry.calls)
    return {"rows": measured, "verdict": checked, "flops": flops, **ours.facts()}


def cold_start(args: argparse.Namespace) -> dict[str, Any]:
    """Measure from the start of a process to the first token of a compiled Qwen2.5-1.5B with cached packed weights."""
    import safetensors.torch
    from gpu_models import SHORT, programs, qwen_weights

    args.turn()
    program = programs(args.work)[f"qwen_{SHORT}"]
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
    """Print the seconds since the process was started at each step, and the decoding speed after the first token."""
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
    **{f"decode-{n}": (decode, (n,), [GRAPH, OVERHEAD]) for n in (1000, 32000)},
    "decode-128": (decode, (128,), [EAGER, GRAPH, AUTOTUNE]),
    **{f"decode-128-{f}": (decode, (128, f), []) for f in ("int4_g128", "q4_k", "q8_0", "fp8_e4m3")},
    **{
        f"prefill-{n}-{f}": (prefill, (n, f), []) for n in (128, 2048) for f in ("bf16c12", "int4_g128", "fp8_e4m3+fp8")
    },
    **{
        f"{name}-{batch}": (image, (name, batch), [GRAPH, OVERHEAD])
        for name in ("resnet50", "resnet18")
        for batch in (1, 256)
    },
    **{f"{name}-256-int8": (quantised_image, (name,), [GRAPH, OVERHEAD]) for name in ("resnet50", "resnet18")},
    "sd15unet-2": (denoised, ("sd15unet",), [GRAPH, OVERHEAD]),
    "sdvae-1": (denoised, ("sdvae",), [GRAPH, OVERHEAD]),
    "ditxl-8": (denoised, ("ditxl",), [GRAPH, OVERHEAD]),
    "cold-start": (cold_start, (), []),
}
READY = "ready to measure"


def measure_all(names: list[str], args: argparse.Namespace) -> None:
    """Run each part in a process of its own.

    Parts that neither tune nor time their own start prepare at the same time. Images prepare apart from the others,
    because cuDNN times its kernels.
    """
    groups: dict[Any, list[str]] = {}
    for name in names:
        peers = PARTS[name][2] if args.peers is None else args.peers
        alone = AUTOTUNE in peers or name == "cold-start"
        groups.setdefault(name if alone else PARTS[name][0] in (image, quantised_image, denoised), []).append(name)
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
    """Print what the child prints, up to the line ``until``. Return whether that line came."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.rstrip() == until:
            return True
        print(line, end="", flush=True)
    return False


def measure_one(name: str, args: argparse.Namespace) -> None:
    """In the child: prepare, wait for standard input to end, measure, merge the results into the file."""
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
    part |= {"peers": args.peers, "took_s": round(time.perf_counter() - start, 1), "date": date.today().isoformat()}
    show(name, part)
    with merged(args.out) as results:
        results |= environment()
        results["parts"][name] = part


def environment() -> dict[str, Any]:
    """Return the GPU, its driver and the versions of packages."""
    import cupy
    import torch

    from npu_runtime.backends.cuda.driver import driver

    names = {"torch": torch.__version__, "cupy": cupy.__version__, "numpy": np.__version__}
    return {
        "hardware": driver().devices()[0].name, "driver": ".".join(map(str, driver().version)), "versions": names,
    }  # fmt: skip


def show(name: str, part: dict[str, Any]) -> None:
    """Print the results of a part."""
    if "rows" not in part:
        print(name, json.dumps({k: v for k, v in part.items() if k != "starts"}), flush=True)
        return
    v = part["verdict"]
    passed = "ok" if v["within_gate"] and v["top_kept"] else "FAILS THE GATE"
    of = {k: v[k] for k in ("eager_error", "equal_to_cpu", "top1_agreement") if k in v}
    errors = "".join(f", {k.replace('_', ' ')} {x:.3g}" for k, x in of.items())
    print(f"{name}: {passed} (error {v['error']:.3g}{errors}), host {part['host_us']:.1f} us")
    for row in part["rows"]:
        print(f"  {row['contender']:32s} {row['median_ms']:9.4f} ms  (min {row['min_ms']:.4f})", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", metavar="part", help="compile, all, table, or parts as above")
    parser.add_argument("--work", type=Path, default=Path("gpu_programs"), help="where compiled programs are kept")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time per contender")
    parser.add_argument("--peers", nargs="*", help=f"of {EAGER!r}, {GRAPH!r}, {OVERHEAD!r}, {AUTOTUNE!r}")
    parser.add_argument("--hold", type=Path, help="prepare, but measure only once this file is gone")
    parser.add_argument("--since", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    only_compile = args.parts[0] == "compile"
    parts = args.parts[only_compile:]
    if parts != ["all"] and (only_compile or parts not in (["table"], ["cold-child"])):
        unknown = [part for part in parts if part not in PARTS]
        if unknown:
            parser.error(f"no part is called {' or '.join(unknown)}; the parts are {', '.join(PARTS)}")
    if args.parts == ["table"]:
        results = json.loads(args.out.read_text())
        write_section("gpu", table(results), short=table(results, compared=True))
    elif args.parts == ["cold-child"]:
        cold_child(args)
    elif args.one:
        measure_one(args.parts[0], args)
    else:
        from gpu_models import compile_missing

        parts = list(PARTS) if parts in (["all"], []) else parts
        compile_missing(args.work, parts)
        if not only_compile:
            measure_all(parts, args)


if __name__ == "__main__":
    main()
