"""New weights of a policy: pause, refresh, and the check that every engine holds them.

In the service's process. May import ``inference.balance``.
"""
