"""Parsers of tool calls in a model's text: one per format, one protocol for all. To add a format, see ``formats``."""
