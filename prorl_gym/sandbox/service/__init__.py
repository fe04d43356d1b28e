"""The part in the service's process: backends, handles of running sandboxes, the warm pool, the checks of the doctor.

``operations`` holds the operations of a running sandbox. Asynchronous, with the privileges of the service (which may be
root). Nothing here runs code of a payload; what comes back from a guest is hostile. May import the other folders of
``sandbox``.
"""
