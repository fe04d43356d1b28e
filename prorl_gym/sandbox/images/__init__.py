"""Images: from registries, SIF files and directories to the read-only lower directories of a sandbox's root."""
