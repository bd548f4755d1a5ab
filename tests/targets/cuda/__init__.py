"""npu_compiler.targets.cuda."""
