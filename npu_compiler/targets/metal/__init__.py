"""The Metal target: the SIMT kernels in the Metal Shading Language, which a Mac compiles when it loads a program."""
