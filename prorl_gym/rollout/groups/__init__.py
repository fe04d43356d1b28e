"""Groups of rollouts: which are needed, which are stopped, kept or completed. Rules in ``prorl_gym.demand``.

In the service's process. The scheduler is pure (no event loop, no clock); the controller applies its actions.
"""
