"""Exact tokens of a conversation: tokenizer, chat templates, deltas between turns, trajectory and session.

In the service's process. Tokens of a rollout are appended in ``token_stream`` only; ``segment_cache`` keeps those of
the gateway's callers. May import ``inference.toolcalls`` and ``inference.balance``.
"""
