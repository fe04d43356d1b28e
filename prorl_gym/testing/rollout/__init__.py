"""Fakes of what a runner needs, and the conformance kit of ledgers."""
