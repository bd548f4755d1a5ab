"""``npusim demo``: real weights and photographs, compared with PyTorch, saved as one file of native code."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from npu_compiler.artifact.describe import totals
from npu_compiler.support.errors import ArtifactError, InputError
from npu_compiler.support.progress import step
from npu_compiler.support.text import si

from ..classes import top_classes
from ..console import Result, Table, show, stream
from ..latency import HEADER, Latencies, interleaved, torch_call

PROMPT, ANSWER = "The capital of France is", " Paris."
LANGUAGE_MODEL = "smollm2-135m"
PHOTOS = {"chelsea": "a cat", "coffee": "an espresso"}
MODEL = "efficientnet-lite0"


def run(args: argparse.Namespace) -> Result:
    """Classify two photographs, then complete a sentence."""
    photographs = classify(args)
    if not args.json:
        show([*photographs.blocks, ""])
        sys.stdout.flush()
    sentence = complete(args)
    return Result({**photographs.data, "language_model": sentence.data}, sentence.blocks)


def complete(args: argparse.Namespace) -> Result:
    """Complete a sentence with a language model, and measure its speed beside PyTorch's."""
    from npu_compiler.support import env

    from .. import LLM
    from ..llm_latency import measure, native_round, report, torch_round

    threads = args.threads or env.num_threads()
    with step(f"loading {LANGUAGE_MODEL}"):
        llm = LLM.load(LANGUAGE_MODEL, max_len=512, threads=threads)
    if not args.json:
        print(PROMPT, end="", flush=True)
    answer = llm.generate(PROMPT, max_tokens=20, stop=["\n"])
    stream((token.text for token in answer), quiet=args.json)
    rounds = {"npusim": native_round(llm), "torch eager": torch_round(llm.path, None, llm.max_len, threads)}
    prompt = np.random.default_rng(0).integers(0, llm.vocab, 128).tolist()
    with step("measuring"):
        speeds = measure(rounds, prompt, 32, seconds=3.0)
    result = report(llm, speeds, threads, 32)
    data = {"prompt": PROMPT, "answer": answer.text, "as_expected": answer.text == ANSWER, **result.data}
    return Result(data, ["", *result.blocks])


def classify(args: argparse.Namespace) -> Result:
    """Download EfficientNet-Lite0, compile it, classify two photographs beside PyTorch, and save the program.

    Raises:
        InputError: PyTorch is not installed.
        ArtifactError: a file cannot be written.
    """
    try:
        import torch
    except ImportError:
        raise InputError("the demo compares with PyTorch; install npusim[torch]") from None
    from npu_compiler.support import env

    from ..builder.model import build
    from ..builtin import module
    from ..models.images import efficientnet_lite0_input, photos
    from ..models.weights import imagenet_labels

    net = module(MODEL)
    pictures = photos(tuple(PHOTOS))
    names = imagenet_labels()
    threads = args.threads or env.num_threads()
    torch.set_num_threads(threads)
    arrays = {name: efficientnet_lite0_input(image) for name, (image, _) in pictures.items()}
    start = time.perf_counter()
    model = build(net, (torch.from_numpy(arrays["chelsea"]),), dtype=args.dtype, fallback=False, threads=threads)
    compile_seconds = time.perf_counter() - start

    answers = {name: _classify(model, net, array, names) for name, array in arrays.items()}
    latency = _measure(model, net, arrays["chelsea"], threads)
    files = _save(model, arrays, names, Path(args.dir))
    data = {
        "photos": answers,
        "latency": {name: times.to_dict(1) for name, times in latency.items()},
        "speedup": latency["torch eager"].median / latency["npusim"].median,
        "threads": threads, "partitions": len(model.plan.partitions), "compile_seconds": compile_seconds,
        "resident_bytes": _resident_bytes(), "files": [str(f) for f in files],
        "run": f"npusim run {files[0]} --input {files[2]}", **totals(model.programs[0]),
    }  # fmt: skip
    return Result(data, _blocks(data, latency))


def _blocks(data: dict[str, Any], latency: Mapping[str, Latencies]) -> list[str | Table]:
    """Return what ``classify`` found, for people."""
    blocks: list[str | Table] = []
    for name, photo in data["photos"].items():
        rows = [(f"{r['probability']:.4f}", f"{r['eager']:.4f}", r["class"], r["name"]) for r in photo["top5"]]
        blocks += [f"{PHOTOS[name]} ({name})", Table(("npusim", "PyTorch", "class", "name"), rows), ""]
    threads, compile_seconds = data["threads"], data["compile_seconds"]
    return [
        *blocks,
        Table(HEADER, [times.row(name, 1) for name, times in latency.items()]),
        f"{data['speedup']:.2f} × the speed of PyTorch eager on {threads} thread(s) (medians, alternating in one run)",
        f"{data['partitions']} partition, {data['kernels']} kernels, compiled in {compile_seconds:.1f} s",
        f"memory: arena {si(data['arena_bytes'], 'B')}, weights {si(data['weight_bytes'], 'B')}, "
        f"process {si(data['resident_bytes'], 'B')} resident (PyTorch included)",
        "",
        f"wrote {', '.join(data['files'])}",
        f"this needs neither PyTorch nor a compiler:  {data['run']}",
    ]


def _measure(model: Any, net: Any, array: np.ndarray, threads: int) -> dict[str, Latencies]:
    """Return the times of calls of the model and of PyTorch, which alternate."""
    (part,) = model.executor.programs
    executor = model.executor.executors[part]
    result = np.empty(executor.outputs[0].shape, np.float32)
    calls: dict[str, Callable[[], Any]] = {
        "npusim": executor.bind([array], [result]),
        "torch eager": torch_call(net, [array], threads),
    }
    with step("measuring"):
        return interleaved(calls, seconds=3.0)


def _classify(model: Any, net: Any, array: np.ndarray, names: list[str]) -> dict[str, Any]:
    """The five most likely classes with our probability and PyTorch's."""
    import torch

    with torch.no_grad():
        eager = net(torch.from_numpy(array)).numpy()[0]
    everything = {r["class"]: r["probability"] for r in top_classes(eager, None, eager.size)}
    logits = model(array)[0]
    top = [{**r, "eager": everything[r["class"]]} for r in top_classes(logits, names)]
    return {"top5": top, "largest_logit_difference": float(np.abs(logits - eager).max())}


def _save(model: Any, arrays: dict[str, np.ndarray], names: list[str], folder: Path) -> list[Path]:
    program, weights = model.save(folder / "efficientnet-lite0.npubin")
    labels, inputs = program.with_suffix(".labels.txt"), []
    try:
        labels.write_text("\n".join(names) + "\n", encoding="utf-8")
        for name, array in arrays.items():
            inputs.append(folder / f"{name}.npy")
            np.save(inputs[-1], array)
    except OSError as error:
        raise ArtifactError(f"{folder}: cannot be written: {error.strerror or error}") from None
    return [program, weights, *inputs, labels]


def _resident_bytes() -> int:
    """Resident memory of this process in bytes: the current one on Linux, elsewhere the peak."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
