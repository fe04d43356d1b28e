"""The agent: a loop of model turns and tool calls, and the tools.

In the service's process; tools run their commands in sandboxes. May import ``sandbox`` and ``inference``.
"""
