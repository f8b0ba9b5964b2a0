"""Results as pictures, and as one self-contained page."""

from swiftsure.report.comparison import exits_figure, models_figure
from swiftsure.report.figures import policy_figure, save_figure, study_figure
from swiftsure.report.page import policy_page
from swiftsure.report.scenes import scenes_figure

__all__ = [
    "exits_figure",
    "models_figure",
    "policy_figure",
    "policy_page",
    "save_figure",
    "scenes_figure",
    "study_figure",
]
