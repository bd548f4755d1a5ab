"""A whole target in a few files: the SIMT kernels in C++ on the host. ``docs/porting.md`` walks through it."""
