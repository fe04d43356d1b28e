"""Rows from PyPI source distributions: unpack, run the tests, seed a fault, keep the tests that see it."""
