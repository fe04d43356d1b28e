"""How each backend makes a sandbox, in the spawner's process: user namespaces, Apptainer, Apptainer alone.

Same process and privileges as ``spawner``; ``spawner_main`` is that process's entry. A backend is a module with
``run_init`` (pid 1 is ours) or ``build_command`` (a container runtime makes pid 1, and a supervisor watches it). To
add one, register it in ``spawner_main``, in ``BackendName``, in ``SandboxConfig.backend`` and in
``backend_selection``.
"""
