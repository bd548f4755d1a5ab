"""The parser of the ``npusim`` command line: a function for each verb."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from .options import (
    DTYPE,
    activations,
    compiling,
    fraction,
    kv_cache,
    language,
    model,
    placing,
    positive,
    precision,
    seconds,
    speed,
    storage,
    storage_dtype,
    threads,
    weights,
)
from .quantization import METHODS

SCHEMA_VERSION = 1
OK, USER_ERROR, INTERNAL, POLICY = 0, 1, 2, 3
MODELS = "resnet18, resnet50 (random weights), resnet50-imagenet or efficientnet-lite0 (trained ones)"
LANGUAGE_MODELS = "a directory with a language model, a .gguf file, smollm2-135m or tinystories-15m"

_EPILOG = "exit status: 0 done, 1 wrong input, 2 a bug in npusim, 3 refused by --no-fallback, 4 slower than --compare"


class Parser(argparse.ArgumentParser):
    """``as_json``: whether errors are also printed as a JSON object on standard output."""

    as_json = False

    def unknown(self, arguments: Sequence[str]) -> NoReturn:
        """Exit with an error for arguments that this verb does not have; suggest an option of similar spelling."""
        name = arguments[0].partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unrecognized arguments: {' '.join(arguments)}{hint}")

    def error(self, message: str) -> NoReturn:
        if self.as_json:
            error = {"type": "UsageError", "message": message, "reasons": []}
            print(json.dumps({"schema_version": SCHEMA_VERSION, "error": error}))
        self.print_usage(sys.stderr)
        self.exit(USER_ERROR, f"{self.prog}: {message}\n")


def _demo(p: argparse.ArgumentParser) -> None:
    p.add_argument("--dir", default=".demo", help="the folder to write the program into (default: .demo)")
    p.add_argument("--dtype", type=storage_dtype, metavar=DTYPE, help="store float32 tensors in this type")
    threads(p)


def _compile(p: argparse.ArgumentParser) -> None:
    model(p, f"a .pt2 file (torch.export.save), an IR JSON file, {MODELS}; {LANGUAGE_MODELS}")
    compiling(p)
    p.add_argument("--max-len", type=positive, help="tokens of a language model's context (default: at most 4096)")
    kv_cache(p)
    activations(p)
    weights(p, "none; for a language model the blocks that its file holds, else bf16c12")
    speed(p)
    text = "show each matrix in a lossy format: bytes, bits a weight, error beside the original weights"
    p.add_argument("--weight-errors", action="store_true", help=text)
    precision(p)
    p.add_argument("-o", "--output", help="the file to write (default: the model's name.npubin)")
    p.add_argument(
        "--until", metavar="PHASE", help="stop after this phase or rewrite and show what is there; 'help' lists them"
    )
    p.add_argument("--dump", metavar="DIR", help="write the graph after every phase, and the sources, into DIR")
    p.add_argument("--emit-source", metavar="DIR", help="write the generated source of every kernel into DIR")
    placing(p)


def _run(p: argparse.ArgumentParser) -> None:
    p.epilog = (
        "A .npubin is native code: run only what you trust. --from-source runs what the sources in the file say, which "
        "can be read (see compile --emit-source), but is code all the same. Weights, arrays and images are data."
    )
    p.add_argument(
        "program", help="a .npubin file from a source you trust: it is native code; weights and inputs are data"
    )
    p.add_argument("--weights", help="safetensors or npz (default: PROGRAM.safetensors, if it exists)")
    p.add_argument(
        "--input", action="append", default=[], metavar="[NAME=]FILE", help=".npy, .npz or an image; repeatable"
    )
    p.add_argument("--output", metavar="FILE", help="write all outputs to an .npz file")
    p.add_argument("--from-source", action="store_true", help="compile the sources in the file and ignore its binary")
    p.add_argument("--labels", metavar="FILE", help="class names, one per line (default: PROGRAM.labels.txt)")
    threads(p)


def _generate(p: argparse.ArgumentParser) -> None:
    model(p, f"{LANGUAGE_MODELS}, a .npubin file, or an id on the Hugging Face hub")
    p.add_argument("-p", "--prompt", help="the text to continue, or with --chat to answer (default: standard input)")
    p.add_argument("--chat", action="store_true", help="use the model's chat template; without --prompt, converse")
    p.add_argument("--system", metavar="TEXT", help="the system message of --chat")
    p.add_argument("--max-tokens", type=positive, help="tokens to generate (default: 256, or what fits the context)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 (the default) takes the most likely token")
    p.add_argument("--top-k", type=int, default=0, help="sample among the k most likely tokens")
    p.add_argument("--top-p", type=float, default=1.0, help="sample among the fewest tokens with this probability")
    p.add_argument("--min-p", type=float, default=0.0, help="sample among tokens this likely relative to the best")
    p.add_argument("--repetition-penalty", type=float, default=1.0, help="above 1: avoid tokens in the context")
    p.add_argument("--seed", type=int, help="seed of the random numbers; equal seeds give equal answers")
    p.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; repeatable")
    p.add_argument("--stats", action="store_true", help="show timings on standard error")
    storage(p)
    speed(p)
    threads(p)
    language(p)


def _perplexity(p: argparse.ArgumentParser) -> None:
    model(p, f"{LANGUAGE_MODELS}, or an id on the Hugging Face hub")
    p.add_argument("text", metavar="TEXT", help="a file with UTF-8 text, or - for standard input")
    storage(p)
    kv_cache(p)
    activations(p)
    about = "compare with the same model in this weight format (none, auto or as above), with KV caches and "
    about += "activations of --dtype"
    p.add_argument("--against", metavar="FORMAT", help=about)
    about = "tokens of a window (default: what the model was made for, at most 2048)"
    p.add_argument("--context", type=positive, metavar="N", help=about)
    p.add_argument(
        "--stride", type=positive, metavar="N", help="tokens between the windows (default: half of the context)"
    )
    threads(p)
    p.add_argument("--no-cache", action="store_true", help="do not cache the compiled program for the next start")


def _quantize(p: argparse.ArgumentParser) -> None:
    model(p, f"a .pt2 file (torch.export.save), MODULE:FUNCTION, {MODELS}")
    p.add_argument(
        "--calibrate",
        required=True,
        metavar="FOLDER",
        help="a folder with typical inputs: images, or .npy and .npz files",
    )
    p.add_argument("--images", type=positive, default=64, metavar="N", help="how many of them to use (default: 64)")
    p.add_argument(
        "--method",
        choices=METHODS,
        default="minmax",
        help="the range of an activation: all values (default), the one with the smallest squared error, or all but "
        "one in 10,000 values",
    )
    p.add_argument("-o", "--output", required=True, help="the .npubin file to write, with its weights beside it")


def _bench(p: argparse.ArgumentParser) -> None:
    model(p, f"a .npubin file, {MODELS}; {LANGUAGE_MODELS}")
    compiling(p)
    placing(p)
    language(p)
    p.add_argument("--prompt-len", type=positive, default=128, help="language models: tokens of the prompt (128)")
    p.add_argument("--gen-len", type=positive, default=32, help="language models: tokens to generate (32)")
    p.add_argument("--weights", help="weights of a .npubin (default: as for run, else random)")
    p.set_defaults(weight_format=None)
    threads(p)
    p.add_argument("--seconds", type=seconds, default=3.0, help="how long to measure (default: 3)")
    p.add_argument("--vs", choices=["torch"], help="alternate with PyTorch eager (not for a .npubin)")


def _profile(p: argparse.ArgumentParser) -> None:
    model(p, f"a .npubin file, a .pt2 file, an IR JSON file, MODULE:FUNCTION, {MODELS}; {LANGUAGE_MODELS}")
    compiling(p)
    placing(p)
    language(p)
    p.add_argument(
        "-o", "--output", action="append", default=[], metavar="FILE", help="write a .html page or .json; repeatable"
    )
    p.add_argument("--trace", action="append", default=[], metavar="FILE", help="write a trace for Perfetto")
    p.add_argument("--model-explorer", action="append", default=[], metavar="FILE", help="write a Model Explorer graph")
    p.add_argument("--accuracy", action="store_true", help="compare each kernel with float64, too (not of a .npubin)")
    p.add_argument("--compare", metavar="OLD.json", help="compare with an earlier profile; exit with 4 if it is slower")
    p.add_argument("--threshold", type=fraction, default=0.05, help="how much slower is still the same (default: 5%%)")
    p.add_argument("--runs", type=positive, default=20, help="measured runs (default: 20)")
    p.add_argument("--warmup", type=positive, default=3, help="runs before these (default: 3)")
    p.add_argument("--prompt-len", type=positive, default=128, help="language models: tokens of the prompt (128)")
    p.add_argument("--cache-len", type=positive, default=128, help="language models: tokens before a decode step (128)")
    p.add_argument("--weights", help="weights of a .npubin or an IR file (default: as for run, else random)")
    p.add_argument(
        "--weight-format", metavar="FORMAT", help="weight format of the matrices of products, as for compile"
    )
    threads(p)


def _describe(p: argparse.ArgumentParser) -> None:
    p.add_argument("program", help="a .npubin file, a model directory or a .gguf file")
    p.add_argument("--counts", action="store_true", help="count launches, barriers, bytes and shared memory of a run")


def _explain(p: argparse.ArgumentParser) -> None:
    model(p, f"a .pt2 file (torch.export.save), an IR JSON file, or {MODELS}")
    p.add_argument("--plan", action="store_true", help="show the partitions and transfers, too")
    placing(p)


def _ops(p: argparse.ArgumentParser) -> None:
    p.add_argument("--markdown", action="store_true", help="as a page for the documentation")
    p.add_argument("pattern", nargs="?", default="", help="show only the ops whose name contains this text")


def _completion(p: argparse.ArgumentParser) -> None:
    p.epilog = "bash: source <(npusim completion bash); zsh and fish: see docs/usage.md"
    p.add_argument("shell", choices=["bash", "zsh", "fish"])


def _doctor(p: argparse.ArgumentParser) -> None:
    p.add_argument("--markdown", action="store_true", help="the environment variables as a page for the documentation")


VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "demo": ("classify two photographs and end a sentence, with real weights", _demo),
    "compile": ("compile a model to a .npubin file", _compile),
    "run": ("run a .npubin file", _run),
    "generate": ("generate text with a language model", _generate),
    "perplexity": ("measure how well a language model predicts a text, and what a weight format costs", _perplexity),
    "quantize": ("quantise a convolutional network to 8 bits", _quantize),
    "bench": ("measure latency and throughput", _bench),
    "profile": ("measure every kernel and show where the time goes", _profile),
    "describe": ("show what a .npubin file or a checkpoint of a language model holds", _describe),
    "explain": ("say which nodes run on the NPU, which do not, and why", _explain),
    "ops": ("list the native operators", _ops),
    "completion": ("print the completion script for a shell", _completion),
    "doctor": ("check compiler, CPU, packages and settings", _doctor),
}


def parser() -> Parser:
    """Return the parser of the whole command line. ``verbs/NAME.py`` does the work of the verb NAME."""
    top = Parser(prog="npusim", description="Compile PyTorch models to native programs and run them.", epilog=_EPILOG)
    top.add_argument("--version", action="store_true", help="print the version")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    for name, (text, add_options) in VERBS.items():
        p = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        p.set_defaults(parser=p)
        p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        p.add_argument("-q", "--quiet", action="store_true", help="no progress bars, and log nothing but errors")
        text = "log the compiler's phases; -vv also kernels, -vvv graphs, -vvvv generated sources"
        p.add_argument("-v", "--verbose", action="count", default=0, help=text)
        add_options(p)
    return top
