"""The Metal target: the SIMT kernels as Metal Shading Language, which the runtime's Mac compiles."""
