"""Fakes and conformance kits, for our tests and for those of your own backends, engines and ledgers.

No production module imports this folder.
"""
