"""Inference: exact tokens in and out, over many engines."""
