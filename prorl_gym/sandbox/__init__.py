"""Sandboxes: rootless isolation of untrusted code, with a persistent shell and nothing left behind.

A folder is a process. ``service``: the service's process, with its privileges. ``spawner``: the process that forks
sandboxes, as an unprivileged uid, up to pid 1 of a sandbox; ``backends``: what differs between backends there.
``guest``: inside the sandbox, next to hostile programs. ``images``: the image store, and its unpacking process.
This folder holds what all of them share (``protocol``, ``limit_breach``, ``syscalls``, ``tree_removal``,
``cancellation``) and what other packages open sandboxes with: ``config``, ``backend_selection``.
Imports go one way: guest <- spawner <- backends <- service.
"""
