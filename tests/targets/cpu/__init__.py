"""npu_compiler.targets.cpu."""
