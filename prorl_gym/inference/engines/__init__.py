"""Adapters of inference engines: one dialect for each kind of server, on one HTTP exchange.

In the service's process. What engines answer is hostile: ``response_validator`` checks it. To add an engine, write
a dialect (``dialect``), add its case to ``inference/config.py`` and run the conformance kit. May import
``inference.protocol`` and ``inference.strict_json``.
"""
