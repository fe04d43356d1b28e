"""Commands that call a running service over HTTP: submit, watch, show, export, replay, evaluate, control.

They run in the user's process and reach the service through ``prorl_gym.client`` only (``service_connection``). What
else they do is here: ``replay`` plays the actions in a sandbox that it starts, and ``evaluate`` may start a service for
itself (``cli.temporary_service``).
"""
