"""Profiles: their collection, their records (``records.py``), and one file for each view."""
