"""Agents: the loop and its tools."""
