"""A whole service in one thread on a virtual clock: head, nodes and engines as processes that fail by a seed.

Service, ledger, placement, engine pool and runners are real. Engines, sandboxes, network and time are simulated.
"""
