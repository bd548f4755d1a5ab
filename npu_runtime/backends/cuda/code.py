"""The kernels of a program on a GPU: selects the code that runs there, and loads it."""

from __future__ import annotations

import weakref
import zlib

from npu_compiler.artifact.program import CompiledProgram
from npu_compiler.support.errors import ArtifactError, BackendError
from npu_compiler.targets.cuda.devices import arch_of, capability_of, row_for
from npu_compiler.targets.simt.lang import program as simt

from .driver import DriverError, driver


class Code:
    """The kernels of a program on a GPU of compute capability ``capability``. ``entries``: launches by entry symbol;
    ``functions``: driver handles by name. Loading compiles only the PTX of kernels for a later GPU.

    Raises ``BackendError`` if the GPU or the driver cannot run the program, ``ArtifactError`` if its code is damaged.
    """

    def __init__(self, program: CompiledProgram, capability: tuple[int, int]):
        self.program = program
        self.entries, code = simt.unpack(program.binary)
        _check_driver(program)
        self.functions: dict[str, int] = {}
        shared: dict[str, int] = {}
        for launch in (x for launches in self.entries.values() for x in launches):
            shared[launch.function] = max(shared.get(launch.function, 0), launch.shared)
        modules: list[int] = []
        self._unload = weakref.finalize(self, _unload, modules)
        self._unload.atexit = False  # at exit the driver may be unloaded first
        try:
            native = _runs(code["arch"], capability)
            for name, (cubin, ptx) in code["modules"].items():
                if not native and not ptx:
                    here = row_for(capability).spec
                    raise BackendError(
                        f"program {program.name!r} was compiled for {program.device or code['arch']}, this GPU is "
                        f"{arch_of(capability)}; compile it again: npusim compile MODEL --target {here} (on a machine "
                        "with such a GPU, --target cuda will do)"
                    )
                image = cubin if native else zlib.decompress(ptx)
                module, self.functions[name] = driver().load(image, name, shared.get(name, 0))
                modules.append(module)
            if missing := shared.keys() - self.functions.keys() - {""}:
                raise ValueError(f"no module for {', '.join(sorted(missing))}")
        except (KeyError, TypeError, ValueError, zlib.error) as error:
            raise ArtifactError(f"binary: no CUDA code: {error!r}; compile the model again") from None
        except DriverError as error:
            raise BackendError(f"program {program.name!r}: {error}") from None


def _check_driver(program: CompiledProgram) -> None:
    """Raise ``BackendError`` if a compiler of a later major version than the driver's compiled the program."""
    made_by = str(program.build.get("compiler", "")).removeprefix("nvrtc ")
    major, known = made_by.partition(".")[0], driver().version
    if major.isdigit() and int(major) > known[0]:
        raise BackendError(
            f"program {program.name!r} was compiled with NVRTC {made_by}, and the NVIDIA driver is too old for it: "
            f"it supports CUDA {known[0]}.{known[1]}. Update the driver, or compile the model with an NVRTC {known[0]}"
        )


def _unload(modules: list[int]) -> None:
    for module in modules:
        driver().unload(module)


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether a cubin for ``arch`` runs on a GPU: one of the same major and an earlier or equal minor version, or, if
    ``arch`` ends in 'a', exactly that version."""
    major, minor = capability_of(arch)
    return (major, minor) == capability if arch[-1] == "a" else major == capability[0] and minor <= capability[1]
