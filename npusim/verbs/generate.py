"""``npusim generate``: text from a language model, once or in a conversation."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from npu_compiler.support.errors import InputError, NPUError

from ..console import Result, stream
from ..sources import load_language_model

if TYPE_CHECKING:
    from npu_runtime.llm.model import LLM

_DEFAULT_TOKENS = 256
_HELP = "type a message; /reset starts a new conversation, /quit or Ctrl-D leaves, Ctrl-C ends an answer"


def run(args: argparse.Namespace) -> Result:
    """Stream the answer to standard output; with --stats, write timings to standard error."""
    prompt = args.prompt
    if prompt is None and not (args.chat and sys.stdin.isatty()):
        if sys.stdin.isatty():
            raise InputError("there is no prompt: pass --prompt TEXT, pipe one in, or start a conversation with --chat")
        prompt = sys.stdin.read()
    if prompt is None and args.json:
        raise InputError("--json needs --prompt: a conversation has no single answer")
    llm = load_language_model(args)
    if prompt is None:
        return _talk(llm, args)
    tokens = llm.encode(_conversation(args.system, prompt) if args.chat else prompt)
    generation = llm.generate(tokens, max_tokens=_limit(llm, len(tokens), args.max_tokens), **_options(args))
    stream((token.text for token in generation), quiet=args.json)
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
    """The number of tokens to generate: as requested, else a default that fits the context."""
    return asked if asked is not None else max(1, min(_DEFAULT_TOKENS, llm.max_len - prompt + 1))


def _conversation(system: str | None, prompt: str) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": prompt}]


def _talk(llm: LLM, args: argparse.Namespace) -> Result:
    """Hold a conversation on the terminal."""
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
    """One turn of the conversation. Returns 1; after an error 0, and the conversation is unchanged."""
    messages.append({"role": "user", "content": line})
    try:
        tokens = llm.encode(messages)
        generation = llm.generate(tokens, max_tokens=_limit(llm, len(tokens), args.max_tokens), **_options(args))
    except NPUError as error:
        del messages[-1]
        print(f"npusim: {error}; /reset starts a new conversation", file=sys.stderr)
        return 0
    try:
        stream(token.text for token in generation)
    except KeyboardInterrupt:
        print()
    messages.append({"role": "assistant", "content": generation.text})
    if args.stats:
        print(generation.timings, file=sys.stderr)
    return 1
