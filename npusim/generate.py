"""``npusim generate``, and what the other verbs need to know about language models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_compiler.support.errors import InputError, NPUError
from npu_compiler.target_config import default_target

from .console import Result, Status

if TYPE_CHECKING:
    from npu_runtime.llm.generation import Generation
    from npu_runtime.llm.model import LLM

_DEFAULT_TOKENS = 256
_HELP = "type a message; /reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C ends an answer"


def is_language_model(model: str) -> bool:
    """Whether ``model`` names a language model rather than an IR file, another program or a built-in image model."""
    from npu_runtime.llm.loader import companions, is_hub_id, is_registered

    from .models import llm_weights

    path = Path(model)
    if path.suffix == ".npubin":
        return companions(path)[1].exists()
    if path.exists() or path.suffix == ".gguf":
        return path.suffix == ".gguf" or path.is_dir()
    llm_weights.register()
    return is_registered(model) or is_hub_id(model)


def load_model(args: argparse.Namespace, status: Status) -> LLM:
    """The model that the options of a verb ask for."""

    from . import LLM

    with status(f"loading {args.model}"):
        return LLM.load(
            args.model,
            target=args.target or default_target(),
            dtype=args.dtype,
            max_len=args.max_len,
            threads=args.threads,
            cache=not args.no_cache,
            weights=args.weight_format or "auto",
            progress=status.downloading,
            status=status.update,
        )


def run(args: argparse.Namespace, status: Status) -> Result:
    """Text on standard output as it comes; with --stats, the times on standard error."""
    prompt = args.prompt
    if prompt is None and not (args.chat and sys.stdin.isatty()):
        if sys.stdin.isatty():
            raise InputError("there is no prompt: pass --prompt TEXT, pipe one in, or talk with --chat")
        prompt = sys.stdin.read()
    if prompt is None and args.json:
        raise InputError("--json needs --prompt: a conversation has no single answer")
    llm = load_model(args, status)
    if prompt is None:
        return _talk(llm, args)
    tokens = llm.encode(_conversation(args.system, prompt) if args.chat else prompt)
    generation = llm.generate(tokens, max_tokens=_limit(llm, len(tokens), args.max_tokens), **_options(args))
    stream(generation, quiet=args.json)
    data = {
        "text": generation.text, "tokens": generation.tokens, "finish_reason": generation.finish_reason,
        "timings": generation.timings.to_dict(), **llm.facts(),
    }  # fmt: skip
    if args.stats and not args.json:
        print(f"loaded in {llm.load_seconds:.2f} s; {generation.timings}", file=sys.stderr)
    return Result(data)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
    return {name: getattr(args, name) for name in names}


def _limit(llm: LLM, prompt: int, asked: int | None) -> int:
    """Tokens to generate: what was asked for, else a default that fits."""
    return asked if asked is not None else max(1, min(_DEFAULT_TOKENS, llm.max_len - prompt + 1))


def _conversation(system: str | None, prompt: str) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]


def stream(generation: Generation, quiet: bool = False) -> None:
    """Show the tokens as they come."""
    show: Callable[[str], Any] = (lambda text: None) if quiet else sys.stdout.write
    live = sys.stdout.isatty()
    for token in generation:
        show(token.text)
        if live:
            sys.stdout.flush()
    show("\n")
    sys.stdout.flush()


def _talk(llm: LLM, args: argparse.Namespace) -> Result:
    """A conversation on the terminal."""
    print(_HELP, file=sys.stderr)
    messages = _conversation(args.system, "")[:-1]
    turns = 0
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return Result({"turns": turns})
        if line.strip() == "/quit":
            return Result({"turns": turns})
        if line.strip() == "/reset":
            messages = _conversation(args.system, "")[:-1]
            llm.reset()
            continue
        if line.strip():
            turns += _answer(llm, args, messages, line)


def _answer(llm: LLM, args: argparse.Namespace, messages: list[dict[str, str]], line: str) -> int:
    """One turn; 1 if there was an answer, else 0 and the conversation is as before."""
    messages.append({"role": "user", "content": line})
    try:
        tokens = llm.encode(messages)
        generation = llm.generate(tokens, max_tokens=_limit(llm, len(tokens), args.max_tokens), **_options(args))
    except NPUError as error:
        del messages[-1]
        print(f"npusim: {error}; /reset forgets the conversation", file=sys.stderr)
        return 0
    try:
        stream(generation)
    except KeyboardInterrupt:
        print()
    messages.append({"role": "assistant", "content": generation.text})
    if args.stats:
        print(generation.timings, file=sys.stderr)
    return 1


def compile_model(args: argparse.Namespace, status: Status) -> Result:
    """``npusim compile`` for a language model: program, weights and card."""
    from npu_compiler.artifact.describe import totals
    from npu_compiler.support.text import si
    from npu_runtime.llm.loader import Loader, save_card

    from .model import emit_source, save_program

    if args.until or args.dump or args.disable:
        raise InputError("--until, --dump and --disable show one graph; a language model is compiled from several")
    target = args.target or default_target()
    weights = args.weight_format or "auto"
    loader = Loader(target, args.dtype, args.max_len, None, True, status.downloading, status.update, weights)
    with status(f"compiling {args.model}"):
        program, weights, card = loader.compile(args.model)
    output = Path(args.output or f"{Path(args.model).name.removesuffix('.gguf')}.npubin")
    with status("writing weights"):
        files = [*save_program(program, weights, output)]
    files.append(save_card(card, files[0]))
    t = totals(program)
    written = ", ".join(f"{f} ({si(f.stat().st_size, 'B')})" for f in files)
    kernels = ", ".join(f"{name} {len(entry.calls)}" for name, entry in program.entries.items())
    data = {"program": card.name, "target": target, "max_len": card.max_len, "files": [str(f) for f in files], **t}
    lines = [f"{card.name}: context {card.max_len}; kernels: {kernels}", f"wrote {written}"]
    return Result(data, [*lines, *emit_source(program, args.emit_source)])
