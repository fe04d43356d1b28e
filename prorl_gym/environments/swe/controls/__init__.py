"""Checks that a repair which passes the hidden tests passes them because of what it computes."""
