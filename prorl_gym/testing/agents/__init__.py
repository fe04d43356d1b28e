"""A scripted model API for agent programs."""
