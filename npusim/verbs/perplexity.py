"""``npusim perplexity``: how well a language model predicts a text, and what a weight format costs."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from npu_compiler.support.errors import InputError
from npu_compiler.support.progress import step
from npu_compiler.target_config import default_target
from npu_compiler.weights.format import weight_format

from ..console import Result, Table
from ..models import llm_weights

if TYPE_CHECKING:
    from npu_runtime.llm.scoring import Perplexity, Scorer

_AUTO = "auto"


def run(args: argparse.Namespace) -> Result:
    """Measure the perplexity of a text; with --against, also that of the same model in another weight format, with
    plain KV caches and activations, and the difference between the two."""
    from npu_runtime.llm import scoring

    chosen = [args.weight_format or _AUTO] + ([args.against] if args.against is not None else [])
    for name in chosen:
        if name != _AUTO:
            weight_format(name)  # an unknown name is an error before anything is loaded
    text = _text(args.text)
    llm_weights.register()
    model = _load(args, chosen[0], args.kv_cache, args.activations)
    tokens, stride = model.encode(text), scoring.checked_stride(model, args.stride)
    data = {
        "model": model.manifest.name, "target": model.program.target, "dtype": model.program.dtype,
        "context": model.max_len, "stride": stride, "text_tokens": len(tokens),
    }  # fmt: skip
    if args.against is None:
        found = scoring.perplexity(model, tokens, stride)
        rows = [(chosen[0], model, found)]
        difference = None
    else:
        reference = _load(args, chosen[1], None, None)
        found, theirs, difference = scoring.compare(model, reference, tokens, stride)
        rows = [(chosen[0], model, found), (chosen[1], reference, theirs)]
    results = [_result(*row) for row in rows]
    data |= {"scored_tokens": found.scored, **results[0]}
    summary = f"{data['model']}: {found.scored} of {len(tokens)} tokens scored, context {data['context']}, "
    blocks: list[str | Table] = [f"{summary}stride {data['stride']}", _table(results)]
    if difference is not None:
        data |= {"reference": results[1], "difference": asdict(difference)}
        blocks.append(
            f"KL divergence {difference.mean_kl:.6g} nats a token; the most likely token is the same for "
            f"{difference.same_top1:.2%}; RMS error of the logits {difference.rms_logits:.4g}"
        )
    return Result(data, blocks)


def _result(format: str, model: Scorer, found: Perplexity) -> dict[str, str | int | float]:
    from npu_runtime.llm.loader import cache_dtype

    return {
        "weights": format, "weight_bytes": model.weights.nbytes, "kv_cache": cache_dtype(model.program),
        "kv_cache_bytes": model.state_bytes, "perplexity": found.perplexity, "nll": found.nll,
    }  # fmt: skip


def _table(results: list[dict[str, str | int | float]]) -> Table:
    from npu_compiler.support.text import si

    header = ("weights", "bytes", "KV caches", "bytes", "perplexity", "nats a token")
    rows = [
        (
            r["weights"], si(int(r["weight_bytes"]), "B"), r["kv_cache"], si(int(r["kv_cache_bytes"]), "B"),
            f"{r['perplexity']:.4f}", f"{r['nll']:.6f}",
        )
        for r in results
    ]  # fmt: skip
    return Table(header, rows)


def _load(args: argparse.Namespace, weights: str, kv_cache: str | None, activations: str | None) -> Scorer:
    from npu_runtime.llm.scoring import Scorer

    with step(f"loading {args.model}, weights {weights}"):
        return Scorer.load(
            args.model,
            target=args.target or default_target(),
            dtype=args.dtype,
            context=args.context,
            threads=args.threads,
            cache=not args.no_cache,
            weights=weights,
            kv_cache=kv_cache,
            activations=activations,
        )


def _text(name: str) -> str:
    """The text of a file, or of standard input for '-'."""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode()
    except OSError as error:
        raise InputError(f"{name}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: byte {error.start} is not UTF-8; convert the text, or take another file") from None
    if not text.strip():
        raise InputError(f"{name}: the text is empty")
    return text
