"""Measurements of a service: the /metrics page, figures over time for the dashboard, a trace per rollout.

Runs on the service's event loop and only reads: of records as they finish, and of snapshots of the service and its
pools. It imports no route.
"""
