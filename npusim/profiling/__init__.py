"""Profiles: collecting them, and one file for each view (:mod:`report` has the records that all views are made of)."""
