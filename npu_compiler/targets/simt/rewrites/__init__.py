"""Rewrites of a schedule that SIMT targets run before memory is planned."""
