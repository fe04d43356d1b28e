"""Put our component roots on NeMo Gym's search path, at interpreter start.

A ``.pth`` file imports this module, so it may import only ``os`` and ``sys``, must never raise and must not change
anything but one environment variable. Gym reads ``NEMO_GYM_EXTRA_ROOTS`` when it lists and starts components.
Set ``PRORL_GYM_NO_BOOTSTRAP=1`` to opt out; ``export NEMO_GYM_EXTRA_ROOTS=$(prorl-gym root)`` is the other way.
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


def register() -> None:
    """Append our roots to ``NEMO_GYM_EXTRA_ROOTS`` once; appended, so that a user's own roots win by name."""
    if os.environ.get("PRORL_GYM_NO_BOOTSTRAP", "") not in ("", "0"):
        return
    ours = component_roots()
    others = [root for root in os.environ.get("NEMO_GYM_EXTRA_ROOTS", "").split(os.pathsep) if root not in ("", *ours)]
    os.environ["NEMO_GYM_EXTRA_ROOTS"] = os.pathsep.join([*others, *ours])


register()
