r"""Mathematical questions with one checkable answer in ``\boxed{}``."""
