"""The service over HTTP: routes, bearer token, limits of connections and bodies, metrics, configuration.

``service_process`` is the entry of ``prorl-gym serve``; ``build`` puts the packages together. ``http`` is what every
route shares, ``routes`` the routes under ``/v1``, ``monitoring`` what is measured of the service.
"""
