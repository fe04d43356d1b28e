"""Everything that the routes have in common: the server, limits of connections, the token, bodies, errors, OpenAPI.

Runs on the service's event loop. Nothing here holds rollouts, pools or a ledger, and it imports nothing else of
``api``: above the base only the wire model of errors, and the exceptions that have a status.
"""
