"""A scripted policy behind the wire of vLLM: it knows the gold answers of the example rows."""
