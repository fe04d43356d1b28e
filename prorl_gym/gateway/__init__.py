"""Model calls of other programs, with exact tokens: reads their requests, samples, and writes their answers.

In the process that serves the model's routes, over one ``EnginePool``. Each wire (``responses``, ``chat_completions``)
is one module: ``normalize_body``, ``read_call`` and ``write_answer``. What all wires share is in ``gateway``, the
tokens are in ``inference.tokens``. May import ``inference``; imports no NeMo Gym.
"""
