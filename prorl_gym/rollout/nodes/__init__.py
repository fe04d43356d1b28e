"""Runners on other machines: the head places attempts on nodes and exchanges messages with them over HTTP."""
