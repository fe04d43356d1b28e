"""Inference: exact tokens in and out, over many engines.

In the service's process. ``engines``: one adapter for each kind of server. ``tokens``: templates, token stream,
sessions. ``toolcalls``: parsers. ``balance``: the pool of engines, placement, admission, health. ``weights``:
policy versions. ``config`` builds all of it.
"""
