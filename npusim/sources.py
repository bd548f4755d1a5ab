"""The MODEL argument of the verbs: a built-in model, a .pt2 file, an IR file or a language model."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npu_compiler.aten.ir import IRGraph
from npu_compiler.support.errors import InputError
from npu_compiler.support.progress import step
from npu_compiler.target_config import default_target

from .builtin import BUILTINS, captured

if TYPE_CHECKING:
    from npu_runtime.llm.model import LLM

LANGUAGE = ("max_len", "kv_cache", "prompt_len", "gen_len", "cache_len")
COMPILING = (
    "target", "dtype", "disable", "batch", "force_cpu", "minimise_transfers", "fallback", "weight_format",
    "activations", "speed_over_memory",
)  # fmt: skip


def read_model(name: str, batch: int) -> tuple[IRGraph, Mapping[str, np.ndarray] | None, Any]:
    """Return the graph of a MODEL argument, with its weights and its PyTorch module if there are any.

    Args:
        name: a built-in model or 'module:function' (which have weights and module), a .pt2 file (which has weights) or
            an IR JSON file. The function is called without arguments and returns (module, example inputs[, kwargs]).
        batch: images at once, of a built-in model.

    Raises:
        InputError: there is no such model or file, or reading it needs PyTorch.
        IRError, CaptureError: the file is malformed, or its graph is not supported.
    """
    if name in BUILTINS:
        module, ir, weights = captured(name, batch)
        return ir, weights, module
    if batch != 1:
        raise InputError(f"--batch is an option of the built-in models: export {name} for {batch} images instead")
    from npu_compiler.aten.json_reader import load_ir

    if is_python_name(name):
        return _from_python(name)
    if not os.path.exists(name):  # also False for a name that is too long for a file
        raise InputError(
            f"{name:.200}: there is no such file, and no built-in model has that name: {', '.join(BUILTINS)}"
        )
    if Path(name).suffix in (".pt2", ".pt", ".pth", ".bin", ".ckpt"):
        return (*_read_exported(name), None)
    if Path(name).suffix == ".npubin":
        raise InputError(f"{name} is compiled already: run, bench, profile and describe take it; this wants the model")
    return load_ir(name), None, None


def is_python_name(name: str) -> bool:
    """True for 'package.module:function'."""
    module, colon, function = name.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _from_python(name: str) -> tuple[IRGraph, Mapping[str, np.ndarray], Any]:
    """The model that a function of a module returns: (module, example inputs), or with keyword arguments as a third."""
    module, _, function = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name}: {error}; name a function of a module that Python can import from here") from None
    except Exception as error:
        raise _failed(name, f"module {module!r}", error) from error
    from npu_compiler.aten.json_reader import graph_weights_used
    from npu_compiler.frontend import capture, state_dict_numpy

    try:
        made = make()
    except Exception as error:
        raise _failed(name, "the function", error) from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise InputError(f"{name}: the function has to return (module, example inputs) or (module, inputs, kwargs)")
    ir = capture(made[0], made[1], example_kwargs=made[2] if len(made) == 3 else None)
    return ir, state_dict_numpy(made[0], needed=graph_weights_used(ir)), made[0]


def _failed(name: str, what: str, error: Exception) -> InputError:
    """Return the error for the user's code that raised ``error``, with the line that did."""
    ours = (__file__, "<frozen ")  # the latter: of Python's importer
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return InputError(f"{name}: {what} failed{where}: {type(error).__name__}: {error}")


def _read_exported(path: str) -> tuple[IRGraph, Mapping[str, np.ndarray]]:
    from npu_compiler.aten.json_reader import graph_weights_used

    try:
        from npu_compiler.frontend import capture, state_dict_numpy
        from npu_compiler.frontend.exported_file import load_exported
    except ImportError:
        raise InputError(f"{path}: reading it needs PyTorch; install npusim[torch]") from None
    program = load_exported(path)
    name = os.fsencode(Path(path).stem).decode(errors="replace")  # programs hold names in UTF-8
    ir = capture(program, name=name)
    return ir, state_dict_numpy(program, needed=graph_weights_used(ir))


def is_language_model(model: str) -> bool:
    """Return True if ``model`` names a language model: a directory, a GGUF file, a .npubin with a manifest, a built-in
    one or an id on the Hugging Face hub."""
    from npu_runtime.llm.find_model import is_hub_id, is_registered
    from npu_runtime.llm.loader import companions

    from .models import llm_weights

    path = Path(model)
    if path.suffix == ".npubin":
        return companions(path)[1].exists()
    if os.path.exists(path) or path.suffix == ".gguf":
        return path.suffix == ".gguf" or path.is_dir()
    llm_weights.register()
    return is_registered(model) or is_hub_id(model)


def activations(args: argparse.Namespace) -> str | None:
    """Return the type of activations of a model that is not a language model: it has none of its own."""
    return None if args.activations == "auto" else args.activations


def refuse(args: argparse.Namespace, options: Collection[str], why: str) -> None:
    """Raise ``InputError`` if one of ``options`` (names of attributes of ``args``) is given; ``why`` says why it does
    not apply."""
    for name in options:
        if name in args.given:
            raise InputError(f"{args.given[name]} {why}")


def refuse_compiling(args: argparse.Namespace) -> None:
    """Raise ``InputError`` for options of compiling, which a .npubin does not take."""
    refuse(args, COMPILING, f"takes effect when a model is compiled, and {args.model} is compiled already")


def refuse_language_options(args: argparse.Namespace, *more: str) -> None:
    """Raise ``InputError`` for options of language models, and ``more`` of this verb's, that are given for another
    model."""
    refuse(args, (*LANGUAGE, *more), f"is an option of language models, and {args.model} is not one")


def load_language_model(args: argparse.Namespace) -> LLM:
    """Load the language model that the arguments of a verb describe. Raises as ``LLM.load``."""
    from . import LLM

    with step(f"loading {args.model}"):
        return LLM.load(
            args.model,
            target=args.target or default_target(),
            dtype=args.dtype,
            max_len=args.max_len,
            threads=args.threads,
            cache=not args.no_cache,
            weights=args.weight_format or "auto",
            speed_over_memory=args.speed_over_memory,
            kv_cache=args.kv_cache,
            activations=args.activations,
        )
