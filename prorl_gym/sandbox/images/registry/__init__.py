"""Registries: the reading half of the OCI distribution specification.

``oci_format``: what registries send, read strictly; ``http``: one request, with redirects, proxies and retries;
``auth``: logins; ``client``: manifests and blobs, verified. Nothing that a registry sends is trusted.
Imports nothing else of ``images``.
"""
