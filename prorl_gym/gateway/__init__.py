"""Model calls of other programs, with exact tokens: reads their requests, samples, and writes their answers.

In the process that serves the model's routes, over one ``EnginePool``. Each wire is a module: ``responses``,
``chat_completions``. ``normalize_body`` and ``read_call`` are for the model server, which refuses what it does not
honour; ``write_answer`` is for programs in rollouts (``prorl_gym.harness``) too. The tokens are in
``inference.tokens``.
"""
