"""Code that runs inside a sandbox, next to hostile programs: server, process tree, terminal, watchdogs, confinement.

Root of the sandbox's user namespace, without privileges outside of it. ``pid1.serve`` is the loop of the sandbox's
pid 1 (``userns``) or of its neighbour (``apptainer``), entered from ``backends/*.run_init``; ``container_entry``
begins it where a container runtime makes pid 1 (``apptainer-plain``) and for ``local``. Standard library
and ptyprocess only, and everything is imported before the first fork. Imports nothing of the other folders.
"""
