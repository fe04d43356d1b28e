"""Operations in a running sandbox: commands, the shell, the python session, interactive programs, files.

In the service's process, with its privileges. Each of them sends requests over the sandbox's guest channel and reads
what comes back on descriptors, all of which is hostile. May import ``service.guest_channel``, ``guest`` (for the wire)
and what ``sandbox`` shares; nothing else of ``service``.
"""
