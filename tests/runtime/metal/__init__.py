"""npu_runtime.backends.metal, through a stand-in for Apple's frameworks."""
