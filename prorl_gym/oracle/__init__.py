"""An engine that knows the answers: a scripted policy behind vLLM's route, for the demo and for ``validate``.

It is no model. It finds the row in the prompt ids and plays its gold trajectory or, as often as it is told, a wrong
one; its log-probs are invented. What is real is everything around it: ids in, ids out, tools, sandboxes, grading.
"""
