"""Mixed models: NPU programs, host partitions, and the plan that connects them, in one file."""
