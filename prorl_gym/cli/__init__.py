"""The prorl-gym command."""
