"""The compiled program: its parts, its file format, its checks and its description."""
