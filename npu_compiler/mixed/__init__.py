"""Mixed models: NPU programs, the partitions that run on the host, and the plan that joins them, in one file."""
