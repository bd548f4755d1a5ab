"""Helpers that every level of the package may use."""
