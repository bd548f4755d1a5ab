"""The public types of a compiled program."""

from .artifact.program import BufferSpec, CompiledProgram, EntryPoint, IOSpec, KernelCall, WeightSpec

__all__ = ["BufferSpec", "CompiledProgram", "EntryPoint", "IOSpec", "KernelCall", "WeightSpec"]
