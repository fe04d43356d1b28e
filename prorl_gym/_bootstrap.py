"""Put our component root on NeMo Gym's search path, at interpreter start.

A ``.pth`` file imports this module, so it may import only ``os``, must never raise and must not change
anything but one environment variable. Gym reads ``NEMO_GYM_EXTRA_ROOTS`` when it lists and starts components.
Set ``PRORL_GYM_NO_BOOTSTRAP=1`` to opt out; ``export NEMO_GYM_EXTRA_ROOTS=$(prorl-gym root)`` is the other way.
"""

import os


def register() -> None:
    """Append our root to ``NEMO_GYM_EXTRA_ROOTS`` once; appended, so that a user's own roots win by name."""
    if os.environ.get("PRORL_GYM_NO_BOOTSTRAP", "") not in ("", "0"):
        return
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gym_root")
    roots = [entry for entry in os.environ.get("NEMO_GYM_EXTRA_ROOTS", "").split(os.pathsep) if entry]
    if root not in roots:
        os.environ["NEMO_GYM_EXTRA_ROOTS"] = os.pathsep.join([*roots, root])


register()
