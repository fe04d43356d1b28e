"""Environments: task families. Each has ``init``, ``run`` and ``evaluate``, and proves its gold answers."""
