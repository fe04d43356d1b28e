"""Shared by ``math`` and ``stem``: the box, TeX's macros, units, numbers in words, and grading in worker processes.

Imports neither of them. ``units``, ``tex`` and ``number_words`` run in the workers, so they import only what is small.
"""
