"""Whole models against PyTorch."""
