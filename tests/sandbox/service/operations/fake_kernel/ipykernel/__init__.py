"""Stands for ipykernel in tests: cells say what the kernel does, however wrong."""
