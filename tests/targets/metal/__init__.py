"""npu_compiler.targets.metal."""
