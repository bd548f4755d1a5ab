"""From the core graph to kernels over buffers: operands, strides, memory, launch order."""
