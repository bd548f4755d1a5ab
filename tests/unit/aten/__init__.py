"""npu_compiler.aten."""
