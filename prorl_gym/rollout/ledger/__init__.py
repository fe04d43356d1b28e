"""The durable truth about rollouts: SQLite behind one writer thread, with group commit and retention.

In the service's process; statements run in the writer thread only. Does not depend on runners, groups or engines.
"""
