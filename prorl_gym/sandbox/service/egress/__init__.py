"""The network of a sandbox that may reach listed hosts: the proxy that it sees, and the rules of what is listed.

In the service's process, with its privileges: the proxy opens the connections that a payload asks for, after the rules
allowed them. May import ``service.guest_channel`` (``rules``: nothing of ``service``) and what ``sandbox`` shares.
"""
