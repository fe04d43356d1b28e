"""A scripted engine, and the conformance kit of engine adapters."""
