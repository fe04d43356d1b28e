"""Registries: the reading half of the OCI distribution specification.

``oci_format``: the answers of registries, read strictly; ``http``: one request, with redirects, proxies, retries and
logins; ``client``: manifests and blobs, verified. Nothing that a registry sends is trusted. Imports nothing else of
``images``.
"""
