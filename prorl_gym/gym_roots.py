"""Where NeMo Gym finds our components: the directories that ``NEMO_GYM_EXTRA_ROOTS`` has to name.

Gym looks for components there, in the working directory and next to its own package. It offers no entry point for them.
"""

import os
import sys

_PACKAGE = os.path.dirname(os.path.abspath(__file__))


def gym_folder() -> str | None:
    """Return the folder of the module ``nemo_gym``, without importing it; ``None`` where it is not installed."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec and find_spec("nemo_gym", None)
        if spec is not None and spec.origin:
            return os.path.dirname(spec.origin)
    return None


def has_environment_servers() -> bool:
    """Whether the installed Gym knows environment servers, as 0.7 and newer do; true where there is no Gym."""
    folder = gym_folder()
    return folder is None or os.path.exists(os.path.join(folder, "base_environment_server.py"))


def component_roots() -> list[str]:
    """Return our roots. For an older Gym, one that hides the environment servers comes first: it would start them."""
    names = ["gym_root"] if has_environment_servers() else ["gym_root_before_0_7", "gym_root"]
    return [os.path.join(_PACKAGE, name) for name in names]
