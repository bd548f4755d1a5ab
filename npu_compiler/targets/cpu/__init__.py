"""The CPU target: C++17 with explicit vectors, compiled by the system compiler into one shared object."""
