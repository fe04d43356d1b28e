"""The dashboard: one page without data, which it fetches from the service that served it.

It reads ``/v1/status``, ``/v1/history``, ``/v1/analysis``, ``/v1/problems``, ``/v1/rollouts``,
``/v1/runs/{run}/groups`` and, for a selected rollout, ``/v1/rollouts/{id}/page``, in the forms of
``prorl_gym.client.wire_models``; fields that are missing are left out of the page.
"""

from functools import cache

from prorl_gym.pages import rollout_page
from prorl_gym.pages.html_page import load_assets, render_page

DASHBOARD_ASSETS = load_assets(
    ("base.css", "dashboard.css"),
    (
        *("dom.js", "stages.js", "api.js", "view.js", "charts.js", "panels.js", "versions.js", "causes.js"),
        *("problems.js", "groups.js", "rows.js", "list.js", "viewer.js", "dashboard.js"),
    ),
    "dashboard.html",
)


@cache
def render_dashboard() -> str:
    """Return the page. It prompts for the token, or takes it from the address's fragment (``#token=``)."""
    return render_page(DASHBOARD_ASSETS, "prorl-gym", framed=[rollout_page.ROLLOUT_ASSETS], may_connect=True)
