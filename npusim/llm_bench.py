"""Prefill and decode speed of a language model, alone or in turns with PyTorch eager."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.support import env
from npu_compiler.support.errors import InputError

from .console import Result, Status, Table
from .generate import load_model

if TYPE_CHECKING:
    from npu_runtime.llm.model import LLM

HEADER = ("", "prefill ms", "tokens/s", "decode ms/token", "tokens/s", "rounds")
_LEAST_ROUNDS = 3


@dataclass
class Speed:
    """Seconds of every round's prefill, and of every decoded token."""

    prompt: int
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, float]:
        prefill, decode = float(np.median(self.prefill)), float(np.median(self.decode))
        return {
            "prefill_ms": prefill * 1e3, "prefill_tokens_per_second": self.prompt / prefill,
            "decode_ms": decode * 1e3, "decode_tokens_per_second": 1 / decode, "rounds": len(self.prefill),
        }  # fmt: skip

    def row(self, name: str) -> tuple[object, ...]:
        d = self.to_dict()
        shown = (f"{v:.1f}" for k, v in d.items() if k != "rounds")
        return (name, *shown, len(self.prefill))


# One round: a prompt of token ids and a number of tokens to decode -> seconds of prefill, and of each decoded token.
Round = Callable[[list[int], int], tuple[float, list[float]]]


def measure(rounds: dict[str, Round], prompt: list[int], generate: int, seconds: float) -> dict[str, Speed]:
    """Rounds in turns for about ``seconds``, after one that does not count: what disturbs the machine disturbs all."""
    speeds = {name: Speed(len(prompt)) for name in rounds}
    for run in rounds.values():
        run(prompt, min(generate, 2))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(speeds.values())).prefill) < _LEAST_ROUNDS:
        for name, run in rounds.items():
            prefill, decode = run(prompt, generate)
            speeds[name].prefill.append(prefill)
            speeds[name].decode += decode
    return speeds


def native_round(llm: LLM) -> Round:
    def run(prompt: list[int], generate: int) -> tuple[float, list[float]]:
        llm.forget()
        generation = llm.generate(prompt, max_tokens=generate + 1, ignore_eos=True)
        decode, t = [], generation.timings
        for _ in generation:
            decode.append(t.decode_seconds)
        return t.prefill_seconds, list(np.diff(decode))

    return run


def torch_round(path: Any, dtype: str | None, max_len: int, threads: int) -> Round:
    """The same checkpoint in PyTorch eager, with preallocated caches written in place."""
    import torch

    from npu_compiler.frontend.llm import load_decoder, open_checkpoint

    torch.set_num_threads(threads)
    decoder = load_decoder(open_checkpoint(path, dtype), max_len)

    def step(tokens: list[int], start: int) -> int:
        positions = torch.arange(start, start + len(tokens))
        logits = decoder(torch.tensor([tokens]), positions, torch.tensor([len(tokens) - 1]))
        return int(logits[0].argmax())

    def run(prompt: list[int], generate: int) -> tuple[float, list[float]]:
        with torch.inference_mode():
            times = [time.perf_counter()]
            token = step(prompt, 0)
            times.append(time.perf_counter())
            for i in range(generate):
                token = step([token], len(prompt) + i)
                times.append(time.perf_counter())
        seconds = np.diff(times).tolist()
        return seconds[0], seconds[1:]

    return run


def run(args: argparse.Namespace, status: Status) -> Result:
    """Greedy generation after a random prompt, end tokens ignored."""
    needed = args.prompt_len + args.gen_len
    if args.max_len is None and not args.model.endswith(".npubin"):
        args.max_len = needed
    if args.batch != 1:
        raise InputError("language models run one sequence at a time: leave out --batch")
    llm = load_model(args, status)
    if needed > llm.max_len:
        raise InputError(f"--prompt-len and --gen-len make {needed} tokens, but the context holds {llm.max_len}")
    threads = args.threads or env.num_threads()
    rounds: dict[str, Round] = {"npusim": native_round(llm)}
    if args.vs == "torch":
        if llm.path.suffix == ".npubin":
            raise InputError("--vs torch needs the checkpoint itself, not a .npubin")
        with status("loading the model into PyTorch"):
            rounds["torch eager"] = torch_round(llm.path, args.dtype, llm.max_len, threads)
    prompt = np.random.default_rng(0).integers(0, llm.vocab, args.prompt_len).tolist()
    with status(f"measuring {llm.card.name}"):
        speeds = measure(rounds, prompt, args.gen_len, args.seconds)
    return report(llm, speeds, threads, args.gen_len)


def report(llm: LLM, speeds: dict[str, Speed], threads: int, generated: int) -> Result:
    from npu_compiler.support.text import si

    results = {name: speed.to_dict() for name, speed in speeds.items()}
    ours = results["npusim"]
    prompt = speeds["npusim"].prompt
    rate = llm.program.entries["decode"].product_bytes / ours["decode_ms"] * 1e3
    data: dict[str, Any] = {
        **llm.facts(), "threads": threads, "prompt_tokens": prompt, "generated_tokens": generated,
        "weight_bytes_per_second": rate, "results": results,
    }  # fmt: skip
    head = (
        f"{llm.card.name}, {llm.program.dtype}, {threads} thread(s), prompt {prompt}, {generated} tokens decoded; "
        f"weights {si(llm.weights.nbytes, 'B')}, loaded in {llm.load_seconds:.2f} s"
    )
    table = Table(HEADER, [speed.row(name) for name, speed in speeds.items()])
    blocks: list[str | Table] = [head, table, f"decoding reads weights at {si(rate, 'B/s')}"]
    if "torch eager" in results:
        other = results["torch eager"]
        data["speedup"] = {k: other[f"{k}_ms"] / ours[f"{k}_ms"] for k in ("prefill", "decode")}
        blocks.append(
            "{prefill:.2f} × the speed of PyTorch eager in prefill, {decode:.2f} × in decode "
            "(medians, alternating in one run)".format(**data["speedup"])
        )
    return Result(data, blocks)
