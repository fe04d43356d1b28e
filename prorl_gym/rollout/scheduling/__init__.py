"""From an accepted rollout to its terminal record: queue, stage pools, dispatcher, runner, attempts.

In the service's process, on its event loop. May import ``rollout.ledger``.
"""
