"""npu_runtime: programs as they run."""
