"""Compiles a model and packs its weights, each once.

Three caches make later starts fast. A manifest's key consists of the names, sizes and times of the checkpoint's files;
a program's key of the architecture, the options and the compiler's source; the key of packed weights of the checkpoint,
the recipes and the source of what packs them. If all three hit, neither torch nor the compiler is imported.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.artifact.serialize import graph_to_plain, program_from_plain, program_to_plain
from npu_compiler.support import dtypes, env, progress
from npu_compiler.support.cache import Cache, open_cache
from npu_compiler.support.errors import ArtifactError, IncompressibleError, InputError
from npu_compiler.support.files import write_atomic
from npu_compiler.support.numbers import whole_number
from npu_compiler.target_config import target_config
from npu_compiler.weights.files import read_document
from npu_compiler.weights.format import ALL_OTHERS, LOSSLESS, Weights, registered_identities, weight_format

from ..arrays import return_freed_memory
from ..backends.base import Backend, get_backend
from ..packed_weights import PackedFile, read_packed, write_packed
from ..weight_loader import WeightStore, load_weights
from .compile_process import CompileOptions, compile_apart, compile_checkpoint
from .find_model import MODEL_FILES, find_model
from .manifest import ModelManifest

if TYPE_CHECKING:
    from npu_compiler.frontend.llm import Checkpoint

_log = logging.getLogger(__name__)

_DEFAULT_MAX_LEN = 4096  # KV caches take memory for the whole context, whether it is used or not
_SCORING_MAX_LEN = 2048  # the context of most published perplexities
_DIGEST = 64
# The weight format that a checkpoint is stored in, if the target reads it, else a lossless one; the activations that it
# was made for, if the target multiplies them.
AUTO = "auto"


class Loader:
    """Loads or compiles models with the options of :meth:`LLM.load`, which documents them.

    Args:
        backend: None: :meth:`load` makes the target's; :meth:`compile` does not need one.
        scoring: compile the entry point ``score`` (see ``scoring_graphs``) instead of those that generate text. Its
            packed weights are not cached, since the cache holds those of the other entry points.

    Attributes:
        path: of the model that was loaded last.
    """

    def __init__(
        self,
        target: str,
        dtype: Any,
        max_len: int | None,
        backend: Backend | None = None,
        cache: bool = True,
        weights: str | None = AUTO,
        *,
        scoring: bool = False,
        speed_over_memory: bool = False,
        kv_cache: str | None = None,
        activations: str | None = AUTO,
    ):
        if max_len is not None:
            max_len = whole_number("max_len", max_len, 1)
        if kv_cache is not None and kv_cache not in dtypes.KV_CACHES:
            raise InputError(f"kv_cache={kv_cache!r}: it is one of {', '.join(dtypes.KV_CACHES)}, or None")
        if activations not in (None, AUTO, *dtypes.ACTIVATIONS):
            known = ", ".join(dtypes.ACTIVATIONS)
            raise InputError(f"activations={activations!r}: they can be {known}, 'auto' or None")
        self.target, self.max_len, self._backend, self._kv_cache = target, max_len, backend, kv_cache
        self._activations = activations
        self.dtype = None if dtype is None else dtypes.storage_dtype(dtype)
        self._format = weight_format(weights) if weights != AUTO else None  # refuses unknown names
        self.weights = AUTO if weights == AUTO else None if self._format is None else self._format.name
        self._programs = open_cache("programs", None if cache else 0)
        self._weights = open_cache("weights", env.weight_cache_size() if cache and not scoring else 0)
        self._scoring, self._fast = scoring, speed_over_memory
        self.path = Path()
        self._compiler = compiler_identity(target)
        self._reading: dict[str, Future[PackedFile]] = {}

    def load(self, model: str | os.PathLike[str]) -> tuple[CompiledProgram, WeightStore, ModelManifest]:
        """Return the program of a model, its packed weights on the backend, and its manifest.

        Raises as :meth:`LLM.load`.
        """
        self.path = find_model(model)
        source = self._source()
        try:
            return self._loaded(source)
        except IncompressibleError as error:
            if isinstance(source, _CompiledFile) or (self._format is not None and self._format.required):
                raise
            _log.warning("%s is compiled again without the weight format: %s", self.path, error)
        source.keep_plain()
        return self._loaded(source)

    def _source(self) -> _CheckpointFiles | _CompiledFile:
        if self.path.suffix != ".npubin":
            return self._checkpoint()
        if self._scoring:
            raise InputError(f"{self.path} is compiled to generate text; scoring needs the model that it was made of")
        return _CompiledFile(self.path)

    def _loaded(self, source: _CheckpointFiles | _CompiledFile) -> tuple[CompiledProgram, WeightStore, ModelManifest]:
        program, recipes, manifest = self._compiled(source, apart=True)
        return program, self._packed(source, program, recipes), manifest

    @property
    def backend(self) -> Backend:
        """The backend that was passed, or the target's, created at its first use. Raises ``BackendError`` if it is not
        available."""
        if self._backend is None:
            self._backend = get_backend(self.target)
        return self._backend

    def compile(self, model: str | os.PathLike[str]) -> tuple[CompiledProgram, Mapping[str, Any], ModelManifest]:
        """Return the program of a checkpoint, its tensors by the names of the program's inputs, and its manifest.

        Raises as :meth:`LLM.load`.
        """
        self.path = find_model(model)
        source = self._checkpoint()
        program, _, manifest = self._compiled(source, apart=False)
        return program, source.tensors(), manifest

    def _checkpoint(self) -> _CheckpointFiles:
        return _CheckpointFiles(self.path, self.dtype, self._programs, self._compiler, self.weights)

    def _compiled(
        self, source: _CheckpointFiles | _CompiledFile, apart: bool
    ) -> tuple[CompiledProgram, str, ModelManifest]:
        """The program, the digest of its recipes, and the manifest; ``apart``: see :func:`compile_apart`."""
        if isinstance(source, _CompiledFile):
            asked = {"weights": self.weights, "activations": self._activations, "speed_over_memory": self._fast}
            choices = {name: value for name, value in asked.items() if value not in (AUTO, False)}
            program, manifest = source.checked(self.target, self.dtype, self.max_len, self._kv_cache, choices)
            return program, _recipe_digest(program), manifest
        manifest = source.manifest
        if self.max_len is not None and manifest.limit and self.max_len > manifest.limit:
            raise InputError(f"max_len={self.max_len}: {manifest.name} was made for at most {manifest.limit} positions")
        default = _SCORING_MAX_LEN if self._scoring else _DEFAULT_MAX_LEN
        manifest = replace(manifest, max_len=self.max_len or min(manifest.limit or default, default))
        stored = source.stored_formats(self.target)
        activations = source.activations(self.target) if self._activations == AUTO else self._activations
        options = f"{manifest.max_len} {self._scoring} {self._fast} {self._kv_cache} {activations} {stored}"
        key = f"program {manifest.identity} {options} {self._compiler}"
        if (known := self._known(key, source)) is not None:
            return *known, manifest
        with self._programs.turn(key, f"compiling {manifest.name}"):
            if (known := self._known(key, source)) is not None:
                return *known, manifest
            with progress.step(f"compiling {manifest.name}"):
                own = (self._scoring, self._fast, self._kv_cache, stored, activations)
                wanted = CompileOptions(self.target, manifest.max_len, *own)
                program = source.compile(wanted, apart)
            recipes = _recipe_digest(program)
            self._programs.put(key, recipes.encode() + msgpack.packb(program_to_plain(program)))
        self._programs.trim()
        return program, recipes, manifest

    def _known(self, key: str, source: _CheckpointFiles) -> tuple[CompiledProgram, str] | None:
        """Return a program of the cache and the digest of its recipes, and begin to read its packed weights."""
        known = self._programs.get(key)
        if known is None:
            return None
        recipes = known[:_DIGEST].decode()
        self._begin_reading(_weight_key(source, recipes))
        # The cache has verified these bytes, so the checks of the file format are not needed.
        return program_from_plain(msgpack.unpackb(known[_DIGEST:]), CompiledProgram), recipes

    def _begin_reading(self, key: str) -> None:
        """Start reading packed weights, if the cache has them, in another thread while this one unpacks the program."""
        if key in self._reading:
            return
        file = self._weights.open(key)
        if file is not None:
            pool = ThreadPoolExecutor(1)
            self._reading[key] = pool.submit(read_packed, file, key, self.backend)
            pool.shutdown(wait=False)

    def _packed(self, source: _CheckpointFiles | _CompiledFile, program: CompiledProgram, recipes: str) -> WeightStore:
        key = _weight_key(source, recipes)
        self._begin_reading(key)
        if key in self._reading:
            try:
                return self._reading.pop(key).result().store(program)
            except OSError as error:  # the disk cannot read it now
                _log.warning("cannot read packed weights, they are made anew: %s", error)
            except ArtifactError as error:
                _log.warning("packed weights are made anew: %s", error)
                self._weights.drop(key)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            store = load_weights(program, source.tensors(), self.backend)
        for w in found:
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
        source.close()
        return_freed_memory()
        if not found and not store.state:  # the warning about NaN weights must come at each start
            with progress.step("keeping packed weights for the next start"):
                self._weights.put_file(key, store.nbytes, lambda file: write_packed(file, key, store, program))
            self._weights.trim()
        return store


class _CheckpointFiles:
    """A directory or a GGUF file, which is opened only after a cache miss."""

    def __init__(self, path: Path, dtype: str | None, cache: Cache, compiler: str, weights: str | None):
        self.path, self._dtype, self._cache, self._compiler = path, dtype, cache, compiler
        self.identity = f"{dtype} {file_identity(path)}"
        self._incompressible = f"incompressible {weights} {self.identity} {compiler}"
        self._plain = cache.get(self._incompressible) is not None
        self.weights = weights if weights == AUTO or not self._plain else None

    @cached_property
    def manifest(self) -> ModelManifest:
        """The manifest, with ``max_len`` 0."""
        key = f"manifest {self.identity} {self._compiler}"
        known = self._cache.get(key)
        if known is not None:
            return ModelManifest.from_json(known.decode(), str(self.path))
        manifest = make_manifest(self._checkpoint)
        self._cache.put(key, manifest.to_json().encode())
        return manifest

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        from npu_compiler.frontend.llm import open_checkpoint

        return open_checkpoint(self.path, self._dtype)

    def compile(self, options: CompileOptions, apart: bool) -> CompiledProgram:
        """Compile the checkpoint; ``apart``: in another process, if that saves memory."""
        program = compile_apart(self.path, self._dtype, options) if apart else None
        return program or compile_checkpoint(self._checkpoint, options)

    def stored_formats(self, target: str) -> Weights:
        """Return the formats in which a program for ``target`` stores the matrices."""
        return self.formats(target) if self.weights == AUTO else self.weights

    def formats(self, target: str) -> dict[str, str]:
        """Return the formats of the matrices that the files store in blocks which the target reads, by name, and a
        lossless one of all others."""
        held = self._stored[0]
        panel = target_config(target).panel
        readable = {n for n in set(held.values()) if (f := weight_format(n)) and f.layout(panel) is not None}
        others = "none" if self._plain else LOSSLESS
        return {n: format for n, format in held.items() if format in readable} | {ALL_OTHERS: others}

    def activations(self, target: str) -> str | None:
        """Return the type to which the model's makers quantised rows of activations, if all matrices in blocks have an
        fp8 format and the target multiplies such rows; else None."""
        held, declared = self._stored
        if self.weights != AUTO or dtypes.FLOAT8 not in target_config(target).matrix_dtypes:
            return None
        formats = [weight_format(name) for name in held.values()]
        return declared if held and all(f is not None and f.activations == declared for f in formats) else None

    @cached_property
    def _stored(self) -> tuple[dict[str, str], str | None]:
        """The formats of the matrices that the files store in blocks, by name, and the activations they were made
        for."""
        key = f"stored {self.identity} {self._compiler}"
        known = self._cache.get(key)
        if known is not None:
            held, activations = json.loads(known)
            return held, activations
        weights = self._checkpoint.weights
        found = weights.block_formats, weights.activations
        self._cache.put(key, json.dumps(found).encode())
        return found

    def keep_plain(self) -> None:
        """Store the elements of matrices that the files do not hold in blocks, now and at later starts."""
        self._plain = True
        if self.weights != AUTO:
            self.weights = None
        self._cache.put(self._incompressible, b"")

    def tensors(self) -> Mapping[str, Any]:
        return self._checkpoint.weights

    def close(self) -> None:
        """Release the checkpoint, because its mapped files count as memory of this process."""
        self.__dict__.pop("_checkpoint", None)


class _CompiledFile:
    """A ``.npubin``, and beside it the weights and the manifest."""

    def __init__(self, path: Path):
        self.path, self._weights, self._manifest = path, *companions(path)
        for file in (path, self._weights, self._manifest):
            if not file.is_file():
                raise InputError(f"{path}: there is no {file.name} beside it; write all three with npusim compile")
        self.identity = file_identity(self._weights)

    def checked(
        self, target: str, dtype: str | None, max_len: int | None, kv_cache: str | None, choices: Mapping[str, Any]
    ) -> tuple[CompiledProgram, ModelManifest]:
        """Return the program and its manifest. Raises ``InputError`` if it was compiled with other options than these;
        ``choices`` are those that only matter to the compiler, as far as they are not the defaults."""
        program = CompiledProgram.load(self.path)
        try:
            text = read_document(self._manifest)
        except OSError as error:
            raise ArtifactError(f"{self._manifest}: cannot be read: {error.strerror or error}") from None
        manifest = ModelManifest.from_json(text, str(self._manifest))
        asked = {"target": target, "dtype": dtype or program.dtype, "max_len": max_len or manifest.max_len}
        made_for = program.device if ":" in target else program.target
        fixed = {"target": made_for, "dtype": program.dtype, "max_len": manifest.max_len}
        if kv_cache is not None:
            asked["kv_cache"], fixed["kv_cache"] = dtypes.KV_CACHES[kv_cache], cache_dtype(program)
        for name, value in asked.items():
            if value != fixed[name]:
                raise InputError(f"{self.path} was compiled with {name}={fixed[name]}, not {value}; compile it again")
        for name, value in choices.items():
            raise InputError(f"{self.path} is compiled already, and {name}={value!r} is a choice of compiling")
        return program, manifest

    def tensors(self) -> Path:
        return self._weights

    def close(self) -> None:
        return None


def cache_dtype(program: CompiledProgram) -> str:
    """Return the dtype of the elements of a language model's KV caches."""
    return next((b.dtype for b in program.buffers if b.name == "k_cache.0"), program.dtype)


def companions(program: Path) -> tuple[Path, Path]:
    """Return the paths of the files beside a ``.npubin``: its weights and its manifest."""
    return program.with_suffix(".safetensors"), program.with_suffix(".llm.json")


def save_manifest(manifest: ModelManifest, program: Path) -> Path:
    """Write the manifest beside a program and return its path.

    Raises:
        ArtifactError: it cannot be written.
    """
    path = companions(program)[1]
    try:
        write_atomic(path, manifest.to_json().encode())
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


def make_manifest(checkpoint: Checkpoint) -> ModelManifest:
    """Return the manifest of a checkpoint, with ``max_len`` 0."""
    return ModelManifest(
        name=checkpoint.path.stem if checkpoint.path.is_file() else checkpoint.path.name,
        max_len=0,
        limit=checkpoint.config.max_position_embeddings,
        identity=checkpoint.config.identity(),
        tokenizer=checkpoint.tokenizer_json,
        chat_template=checkpoint.chat_template,
        special_tokens=checkpoint.special_tokens,
        bos_id=checkpoint.bos_id,
        eos_ids=checkpoint.eos_ids,
        defaults=checkpoint.generation,
    )


# -- keys -------------------------------------------------------------------------------------------------------
def file_identity(path: Path) -> str:
    """Return a text of the path, sizes, times and inodes of a model's files, which changes when the files do.

    Copying tools can restore a file's modification time (``cp -p``, ``rsync -t``, ``tar -x``), but not the change time
    of its inode.

    Raises:
        InputError: a file cannot be read.
    """
    try:
        files = sorted(p for p in path.iterdir() if p.suffix in MODEL_FILES) if path.is_dir() else [path]
        stats = [(p.name, p.stat()) for p in files]
    except OSError as error:  # no permission, or a link to nowhere
        raise InputError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from None
    return repr((str(path), [(n, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for n, s in stats]))


def compiler_identity(target: str) -> str:
    """Return a text that changes with everything that programs for ``target`` depend on: the compiler's files, the
    machine, the disabled passes, and the registered weight formats."""
    import npu_compiler

    made_by = _digest(Path(npu_compiler.__file__).parent)
    formats = registered_identities()
    return f"{target} {target_config(target).device!r} {made_by} {sorted(env.disabled())} {formats}"


@cache
def packing_identity() -> str:
    """Return a digest of the code that packs weights: another version of it may keep the names of layouts and recipes
    but not the order of bytes."""
    import npu_compiler

    root = Path(npu_compiler.__file__).parent
    return _digest(root / "graph", root / "weights", Path(__file__).parents[1] / "weight_loader.py")


def _digest(*places: Path) -> str:
    """Return the SHA-256 of source files, and of those in folders."""
    digest = hashlib.sha256()
    for place in places:
        files = sorted(f for f in place.rglob("*") if f.suffix in (".py", ".h", ".cpp")) if place.is_dir() else [place]
        for file in files:
            digest.update(f"{file.relative_to(place.parent)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _weight_key(source: _CheckpointFiles | _CompiledFile, recipes: str) -> str:
    return f"{source.identity} {recipes} {packing_identity()} {registered_identities()}"


def _recipe_digest(program: CompiledProgram) -> str:
    """Return ``_DIGEST`` hex digits of the SHA-256 of all that determines packed weights besides the tensors."""
    buffers = [(b.name, b.dtype, b.shape) for b in program.buffers if b.constant]
    return hashlib.sha256(msgpack.packb([buffers, graph_to_plain(program.recipes)])).hexdigest()
