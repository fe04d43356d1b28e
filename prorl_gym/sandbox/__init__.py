"""Sandboxes: rootless boxes for untrusted code, with a persistent shell and nothing left behind."""
