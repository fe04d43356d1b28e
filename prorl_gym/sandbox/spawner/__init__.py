"""Code of the spawner's process and its children, up to pid 1 of a sandbox: namespaces, mounts, root, limits.

Synchronous and single-threaded, as an unprivileged uid that root was given up for; pid 1 is root of its own user
namespace only. Everything is imported before root is given up. May import ``guest`` and what ``sandbox`` shares.
"""
