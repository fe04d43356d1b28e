"""Fake sandboxes, and the conformance kit of backends."""
