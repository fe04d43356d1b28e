"""HTTP routes, metrics and pages of the service."""
