"""An engine with the answers: a scripted policy behind vLLM's route, for the demo and for ``validate``.

It is no model. It finds the row in the prompt ids and plays its gold trajectory or, at a configured rate, a wrong one;
its log-probs are invented. Everything around it is real: ids in, ids out, tools, sandboxes, grading.
"""
