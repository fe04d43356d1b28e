"""Images: from registries, SIF files and directories to the read-only lower directories of a sandbox's root.

Runs in the service's process or the CLI's. Only the helper process, which has given root up, touches what is inside
images. May import what ``sandbox`` shares, and no other folder of it.
"""
