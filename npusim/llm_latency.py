"""Prefill and decode speed of a language model, alone or in turns with PyTorch eager. Times are wall times in
seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .console import Result, Table

if TYPE_CHECKING:
    from npu_runtime.llm.model import LLM

HEADER = ("", "prefill ms", "tokens/s", "decode ms/token", "tokens/s", "rounds")
_MIN_ROUNDS = 3


@dataclass
class Speed:
    """The measurements of one implementation.

    Attributes:
        prompt: tokens of the prompt.
        prefill: seconds of each round's prefill.
        decode: seconds of each decoded token, of all rounds.
    """

    prompt: int
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, float]:
        """Return medians in milliseconds and in tokens per second, and the number of rounds."""
        prefill, decode = float(np.median(self.prefill)), float(np.median(self.decode))
        return {
            "prefill_ms": prefill * 1e3, "prefill_tokens_per_second": self.prompt / prefill,
            "decode_ms": decode * 1e3, "decode_tokens_per_second": 1 / decode, "rounds": len(self.prefill),
        }  # fmt: skip

    def row(self, name: str) -> tuple[object, ...]:
        """Return a row of the table whose header is ``HEADER``."""
        d = self.to_dict()
        shown = (f"{v:.1f}" for k, v in d.items() if k != "rounds")
        return (name, *shown, len(self.prefill))


# (token ids of a prompt, number of tokens to decode) -> (seconds of the prefill, seconds of each decoded token)
Round = Callable[[list[int], int], tuple[float, list[float]]]


def measure(rounds: dict[str, Round], prompt: list[int], generate: int, seconds: float) -> dict[str, Speed]:
    """Run the rounds in turns for about ``seconds``, at least three times each, after one warm-up round each.
    Disturbances of the machine affect all of them alike."""
    speeds = {name: Speed(len(prompt)) for name in rounds}
    for run in rounds.values():
        run(prompt, min(generate, 2))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(speeds.values())).prefill) < _MIN_ROUNDS:
        for name, run in rounds.items():
            prefill, decode = run(prompt, generate)
            speeds[name].prefill.append(prefill)
            speeds[name].decode += decode
    return speeds


def native_round(llm: LLM) -> Round:
    """Return a round of our runtime: greedy decoding from an empty context, end tokens ignored."""

    def run(prompt: list[int], generate: int) -> tuple[float, list[float]]:
        llm.forget()
        generation = llm.generate(prompt, max_tokens=generate + 1, ignore_eos=True)
        decode, t = [], generation.timings
        for _ in generation:
            decode.append(t.decode_seconds)
        return t.prefill_seconds, list(np.diff(decode))

    return run


def torch_round(path: Any, dtype: str | None, max_len: int, threads: int) -> Round:
    """Return a round of PyTorch eager on the same checkpoint, with preallocated caches that are written in place.

    Args:
        path: of the checkpoint.
        max_len: positions of the caches.
    """
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


def report(llm: LLM, speeds: dict[str, Speed], threads: int, generated: int) -> Result:
    """Return the result of a command that measured ``speeds``: of 'npusim', and maybe of 'torch eager'."""
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
        f"{llm.manifest.name}, {llm.program.dtype}, {threads} thread(s), prompt {prompt}, {generated} tokens decoded; "
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
