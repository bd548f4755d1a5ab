"""Models by name: paths, built-in models, and models on the Hugging Face hub."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from npu_compiler.support import progress
from npu_compiler.support.errors import InputError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
MODEL_FILES = (".json", ".safetensors", ".gguf", ".jinja", ".model")
_fetchers: dict[str, Callable[[], Path]] = {}


def register_model(name: str, fetch: Callable[[], Path]) -> None:
    """Make ``LLM.load(name)`` load the checkpoint whose path ``fetch`` returns. ``fetch`` may download it."""
    _fetchers[name] = fetch


def is_registered(name: str) -> bool:
    """Whether ``name`` is that of a built-in model."""
    return name in _fetchers


def is_hub_id(name: str) -> bool:
    """Return True if ``name`` has the form of a model's id on the Hugging Face hub: 'owner/model'."""
    return bool(_HUB_ID.fullmatch(name)) and not name.endswith((".gguf", ".npubin", ".json"))


def find_model(model: str | os.PathLike[str]) -> Path:
    """Return the local path of a model: a directory or file, else a built-in model or one on the Hugging Face hub,
    which is downloaded.

    Raises:
        InputError: there is no such model, or it cannot be downloaded.
    """
    if not isinstance(model, str | os.PathLike):
        raise InputError(f"a model is the path or the name of one, not a {type(model).__name__}")
    path = Path(model)
    try:
        if path.exists():
            return path.resolve()
    except (OSError, ValueError) as error:  # a name that no file can have
        raise InputError(f"{str(path)[:100]!r}: {error}") from None
    name = os.fspath(model)
    if name in _fetchers:
        return _fetchers[name]()
    known = f"the built-in models are {', '.join(_fetchers)}" if _fetchers else "no built-in models are registered"
    if not is_hub_id(name):
        raise InputError(f"{name}: there is no such file or directory; {known}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(
            f"{name}: there is no such directory; if it is a model on the Hugging Face hub, pip install "
            f"huggingface_hub or download it yourself. {known[0].upper()}{known[1:]}"
        ) from None
    try:
        with progress.step(f"downloading {name}") as step:
            patterns = [f"*{suffix}" for suffix in MODEL_FILES]
            return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=hub_progress(step)))
    except (OSError, ValueError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"{name}: not a local directory, and the Hugging Face hub did not give it: {reason}") from None


def hub_progress(step: progress.Step) -> Any:
    """Return a class of progress bars for huggingface_hub that prints nothing and reports the bytes to ``step``."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def display(self, *args: Any, **options: Any) -> None:
            if self.unit == "B":
                step.total, step.unit = int(self.total or 0) or None, "B"
                step.update(done=int(self.n))

    return Bar
