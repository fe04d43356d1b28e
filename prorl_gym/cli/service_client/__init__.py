"""Commands that call a running service over HTTP, through ``prorl_gym.client`` only (``service_connection``)."""
