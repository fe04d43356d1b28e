"""Fakes of what a runner needs, and a ledger in memory."""
