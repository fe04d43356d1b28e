"""The rollout service, from an accepted request to its terminal record.

In the service's process. ``service`` is the facade and the way in; ``ledger`` is durable, ``scheduling``
runs attempts, ``groups`` decides which rollouts are still needed. docs/architecture.md shows the path of a rollout,
docs/scheduling.md every place where it can wait.
"""
