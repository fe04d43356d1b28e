"""Model calls of other programs, with exact tokens: reads their requests, samples, and writes their answers.

In the process that serves the model's routes, over one ``EnginePool``. Each wire (``responses``, ``chat_completions``,
``messages``) is one module. ``normalize_body`` and ``read_call`` are for the model server, which refuses what it does
not honour; ``read_lenient`` for programs in rollouts; ``write_answer`` for both. The tokens are in
``inference.tokens``. May import ``inference``; imports no NeMo Gym.
"""
