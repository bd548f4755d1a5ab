"""The ``npusim`` command line. Only argparse is imported here; each verb imports what it needs."""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NoReturn

SCHEMA_VERSION = 1
_DTYPE = "{float32,float16,bfloat16}"
OK, USER_ERROR, INTERNAL, POLICY = 0, 1, 2, 3

_EPILOG = "exit status: 0 done, 1 wrong input, 2 a bug in npusim, 3 refused by --no-fallback, 4 slower than --compare"


class _Parser(argparse.ArgumentParser):
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


def parser() -> _Parser:
    """Return the parser of the whole command line. ``verbs/NAME.py`` does the work of the verb NAME."""
    top = _Parser(prog="npusim", description="Compile PyTorch models to native programs and run them.", epilog=_EPILOG)
    top.add_argument("--version", action="store_true", help="print the version")
    verbs = top.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        p = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        p.set_defaults(parser=p)
        p.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        p.add_argument("-q", "--quiet", action="store_true", help="no progress bars, and log nothing but errors")
        text = "log the compiler's phases; -vv also kernels, -vvv graphs, -vvvv generated sources"
        p.add_argument("-v", "--verbose", action="count", default=0, help=text)
        return p

    def model(p: argparse.ArgumentParser, what: str) -> None:
        p.add_argument("model", help=what)
        p.add_argument(
            "--target", help="cpu, cuda or metal, or a device of one like cuda:sm_80 (default: NPU_TARGET, else cpu)"
        )

    def compiling(p: argparse.ArgumentParser) -> None:
        p.add_argument("--dtype", type=_storage_dtype, metavar=_DTYPE, help="store float32 tensors in this type")
        p.add_argument(
            "--disable",
            type=_names,
            default=(),
            metavar="NAMES",
            help="passes and rewrites to skip, separated by commas; 'help' lists them",
        )
        p.add_argument("--batch", type=_positive, default=1, help="images per run, for a built-in model")

    def placing(p: argparse.ArgumentParser) -> None:
        p.add_argument(
            "--force-cpu",
            type=_names,
            action="extend",
            default=[],
            metavar="OPS",
            help="run these ops or nodes on the host, in PyTorch; separated by commas, in the spelling of the IR "
            "(aten.relu_.default) or of the functional variant (aten.relu.default)",
        )
        p.add_argument(
            "--minimise-transfers",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="move cheap neighbours of host nodes to the host, too, if that saves transfers (default); with --no-… "
            "only what is excluded or unsupported moves",
        )
        p.add_argument(
            "--fallback",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="nodes that cannot run on the NPU run on the host, in PyTorch (default, as in npusim.build, so that "
            "every model runs); with --no-fallback, exit with status 3 and the reasons: what is written then runs "
            "without PyTorch",
        )

    def weights(p: argparse.ArgumentParser, default: str) -> None:
        text = "weight format of the matrices of products: bf16c12 is lossless, q8_0 rounds to 8 bits; or none"
        text = f"{text} (default: {default})"
        p.add_argument("--weights", dest="weight_format", metavar="FORMAT", help=text)

    def speed(p: argparse.ArgumentParser) -> None:
        text = "on GPUs, also store the elements of weights in a format, so that prompts need not decode them"
        p.add_argument("--speed-over-memory", action="store_true", help=text)

    def storage(p: argparse.ArgumentParser) -> None:
        about = "type of weights and caches (default: the model's own)"
        p.add_argument("--dtype", type=_storage_dtype, metavar=_DTYPE, help=about)
        weights(p, "the blocks that the file holds, else bf16c12")

    def kv_cache(p: argparse.ArgumentParser) -> None:
        about = "type of a language model's KV caches: 8-bit integers or floats, a scale a row (default: --dtype)"
        p.add_argument("--kv-cache", type=_kv_cache, metavar="{int8,fp8}", help=about)

    def activations(p: argparse.ArgumentParser) -> None:
        about = "fp8: round rows of prompts to 8 bits in front of matrices in an fp8 format; or none (default: what a "
        about += "checkpoint says, on GPUs that multiply such rows)"
        p.add_argument("--activations", type=_activations, default="auto", metavar="fp8", help=about)

    def threads(p: argparse.ArgumentParser) -> None:
        p.add_argument("--threads", type=_positive, help="default: NPU_NUM_THREADS, else all cores")

    def precision(p: argparse.ArgumentParser) -> None:
        p.add_argument(
            "--float32-precision",
            choices=("highest", "tf32"),
            default="highest",
            help="tf32: products and convolutions of float32 round their operands to 10 bits of fraction, on an NVIDIA "
            "GPU (default: highest)",
        )

    def language(p: argparse.ArgumentParser) -> None:
        p.set_defaults(speed_over_memory=False)
        kv_cache(p)
        activations(p)
        p.add_argument("--max-len", type=_positive, help="tokens of a language model's context (default: at most 4096)")
        p.add_argument("--no-cache", action="store_true", help="do not cache a language model for the next start")

    names = "resnet18, resnet50 (random weights), resnet50-imagenet or efficientnet-lite0 (trained ones)"
    language_names = "a directory with a language model, a .gguf file, smollm2-135m or tinystories-15m"
    p = verb("demo", "classify two photographs and end a sentence, with real weights")
    p.add_argument("--dir", default=".demo", help="the folder to write the program into (default: .demo)")
    p.add_argument("--dtype", type=_storage_dtype, metavar=_DTYPE, help="store float32 tensors in this type")
    threads(p)

    p = verb("compile", "compile a model to a .npubin file")
    model(p, f"a .pt2 file (torch.export.save), an IR JSON file, {names}; {language_names}")
    compiling(p)
    p.add_argument("--max-len", type=_positive, help="tokens of a language model's context (default: at most 4096)")
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

    p = verb("run", "run a .npubin file")
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

    p = verb("generate", "generate text with a language model")
    model(p, f"{language_names}, a .npubin file, or an id on the Hugging Face hub")
    p.add_argument("-p", "--prompt", help="the text to continue, or with --chat to answer (default: standard input)")
    p.add_argument("--chat", action="store_true", help="use the model's chat template; without --prompt, converse")
    p.add_argument("--system", metavar="TEXT", help="the system message of --chat")
    p.add_argument("--max-tokens", type=_positive, help="tokens to generate (default: 256, or what fits the context)")
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

    p = verb("perplexity", "measure how well a language model predicts a text, and what a weight format costs")
    model(p, f"{language_names}, or an id on the Hugging Face hub")
    p.add_argument("text", metavar="TEXT", help="a file with UTF-8 text, or - for standard input")
    storage(p)
    kv_cache(p)
    activations(p)
    about = "compare with the same model in this weight format (none, auto or as above), with KV caches and "
    about += "activations of --dtype"
    p.add_argument("--against", metavar="FORMAT", help=about)
    about = "tokens of a window (default: what the model was made for, at most 2048)"
    p.add_argument("--context", type=_positive, metavar="N", help=about)
    p.add_argument(
        "--stride", type=_positive, metavar="N", help="tokens between the windows (default: half of the context)"
    )
    threads(p)
    p.add_argument("--no-cache", action="store_true", help="do not cache the compiled program for the next start")

    p = verb("quantize", "quantise a convolutional network to 8 bits")
    model(p, f"a .pt2 file (torch.export.save), MODULE:FUNCTION, {names}")
    p.add_argument(
        "--calibrate",
        required=True,
        metavar="FOLDER",
        help="a folder with typical inputs: images, or .npy and .npz files",
    )
    p.add_argument("--images", type=_positive, default=64, metavar="N", help="how many of them to use (default: 64)")
    p.add_argument(
        "--method",
        choices=["minmax", "mse", "percentile"],
        default="minmax",
        help="the range of an activation: all values (default), the one with the smallest squared error, or all but "
        "one in 10,000 values",
    )
    p.add_argument("-o", "--output", required=True, help="the .npubin file to write, with its weights beside it")

    p = verb("bench", "measure latency and throughput")
    model(p, f"a .npubin file, {names}; {language_names}")
    compiling(p)
    placing(p)
    language(p)
    p.add_argument("--prompt-len", type=_positive, default=128, help="language models: tokens of the prompt (128)")
    p.add_argument("--gen-len", type=_positive, default=32, help="language models: tokens to generate (32)")
    p.add_argument("--weights", help="weights of a .npubin (default: as for run, else random)")
    p.set_defaults(weight_format=None)
    threads(p)
    p.add_argument("--seconds", type=_seconds, default=3.0, help="how long to measure (default: 3)")
    p.add_argument("--vs", choices=["torch"], help="alternate with PyTorch eager (not for a .npubin)")

    p = verb("profile", "measure every kernel and show where the time goes")
    model(p, f"a .npubin file, a .pt2 file, an IR JSON file, MODULE:FUNCTION, {names}; {language_names}")
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
    p.add_argument("--threshold", type=_fraction, default=0.05, help="how much slower is still the same (default: 5%%)")
    p.add_argument("--runs", type=_positive, default=20, help="measured runs (default: 20)")
    p.add_argument("--warmup", type=_positive, default=3, help="runs before these (default: 3)")
    p.add_argument("--prompt-len", type=_positive, default=128, help="language models: tokens of the prompt (128)")
    p.add_argument(
        "--cache-len", type=_positive, default=128, help="language models: tokens before a decode step (128)"
    )
    p.add_argument("--weights", help="weights of a .npubin or an IR file (default: as for run, else random)")
    p.add_argument(
        "--weight-format", metavar="FORMAT", help="weight format of the matrices of products, as for compile"
    )
    threads(p)

    p = verb("describe", "show what a .npubin file or a checkpoint of a language model holds")
    p.add_argument("program", help="a .npubin file, a model directory or a .gguf file")
    p.add_argument("--counts", action="store_true", help="count launches, barriers, bytes and shared memory of a run")

    p = verb("explain", "say which nodes run on the NPU, which do not, and why")
    model(p, f"a .pt2 file (torch.export.save), an IR JSON file, or {names}")
    p.add_argument("--plan", action="store_true", help="show the partitions and transfers, too")
    placing(p)

    p = verb("ops", "list the native operators")
    p.add_argument("--markdown", action="store_true", help="as a page for the documentation")
    p.add_argument("pattern", nargs="?", default="", help="show only the ops whose name contains this text")

    p = verb("completion", "print the completion script for a shell")
    p.epilog = "bash: source <(npusim completion bash); zsh and fish: see docs/usage.md"
    p.add_argument("shell", choices=["bash", "zsh", "fish"])

    p = verb("doctor", "check compiler, CPU, packages and settings")
    p.add_argument("--markdown", action="store_true", help="the environment variables as a page for the documentation")
    return top


def _activations(text: str) -> str | None:
    from npu_compiler.support.dtypes import ACTIVATIONS

    if text not in (*ACTIVATIONS, "auto", "none"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(ACTIVATIONS)}, auto, none")
    return None if text == "none" else text


def _kv_cache(text: str) -> str:
    from npu_compiler.support.dtypes import KV_CACHES

    if text not in KV_CACHES:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(KV_CACHES)}")
    return text


def _storage_dtype(text: str) -> str:
    from npu_compiler.support.dtypes import storage_dtype
    from npu_compiler.support.errors import ConfigError

    try:
        return storage_dtype(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0, at most 86400")
    return value


def _fraction(text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a percentage like 5% nor a fraction like 0.05")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with the arguments ``argv`` (default: ``sys.argv[1:]``) and return the exit status."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    top = parser()
    _Parser.as_json = "--json" in (sys.argv[1:] if argv is None else argv)
    args, unknown = top.parse_known_args(argv)
    if unknown:
        (args.parser if args.verb else top).unknown(unknown)
    if args.version:
        from npu_compiler import __version__

        print(f"npusim {__version__}")
        return OK
    if args.verb is None:
        top.print_help()
        return USER_ERROR
    args.given = _given(args)
    try:
        return _finish(_run(args), args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone, as with `| head`
        _drop_output()
        return OK
    except OSError as error:  # the output goes to a full disk
        _drop_output()
        print(f"npusim: {error.filename or 'the output'} cannot be written: {error.strerror or error}", file=sys.stderr)
        return USER_ERROR


def _given(args: argparse.Namespace) -> dict[str, str]:
    """Return the options that differ from their defaults, by the name of their attribute."""
    actions = [a for a in args.parser._actions if a.option_strings and hasattr(args, a.dest)]
    return {a.dest: a.option_strings[0] for a in actions if getattr(args, a.dest) != a.default}


def _drop_output() -> None:
    """Let the interpreter write what is left of the output to nowhere when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: argparse.Namespace) -> Any:
    from npu_compiler.support import env, log
    from npu_compiler.support.errors import CompileError, NPUError

    from .bars import progress_bars
    from .console import Result

    try:
        least = logging.ERROR if args.quiet else log.level(max(args.verbose, env.debug()))
        bars = nullcontext() if args.quiet or args.json or args.verbose else progress_bars()
        with warnings.catch_warnings(), log.shown(least), bars:
            warnings.showwarning = _warn
            return import_module(f"npusim.verbs.{args.verb}").run(args)
    except NPUError as error:
        refused = isinstance(error, CompileError) and not getattr(args, "fallback", True) and bool(error.reasons)
        code = POLICY if refused else USER_ERROR
        return Result(_error(error, getattr(error, "reasons", [])), [f"npusim: {error}"], code)
    except BrokenPipeError:  # not a bug: main() handles it
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # not a bug either: files are written by name, so it is the output
        if args.verbose or os.environ.get("NPU_DEBUG", "0") not in ("", "0"):
            raise
        text = f"npusim: internal error: {type(error).__name__}: {error}\n-v shows where; please report it"
        return Result(_error(error, []), [text], INTERNAL)


def _warn(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    """Print a warning, which is about the caller's data, as one line without the place where it was raised. What
    libraries will change is not about that data."""
    if not issubclass(category, DeprecationWarning | PendingDeprecationWarning | FutureWarning):
        print(f"npusim: warning: {message}", file=sys.stderr)


def _error(error: Exception, reasons: Sequence[Any]) -> dict[str, Any]:
    listed = [{"node": n, "op": o, "rule": r.rule, "detail": r.detail, "fix": r.fix} for n, o, r in reasons]
    return {"error": {"type": type(error).__name__, "message": str(error), "reasons": listed}}


def _finish(result: Any, args: argparse.Namespace) -> int:
    from .console import show

    if args.json:
        from npu_compiler.support.text import json_safe

        data = {"schema_version": SCHEMA_VERSION, "command": args.verb, **result.data}
        print(json.dumps(json_safe(data), allow_nan=False))
    else:
        show(result.blocks, sys.stderr if "error" in result.data else sys.stdout)
    sys.stdout.flush()
    code: int = result.code
    return code


if __name__ == "__main__":
    sys.exit(main())
