"""Records in the shapes that trainers read.

Imports pydantic, and numpy on first use: usable inside a trainer's environment.
"""
