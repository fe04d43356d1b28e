"""NeMo Gym's sandbox provider ``prorl``: our sandboxes under every agent and environment of Gym."""
