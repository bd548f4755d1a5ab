"""npu_compiler.targets.simt."""
