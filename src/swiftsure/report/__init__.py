"""Results as pictures."""

from swiftsure.report.comparison import exits_figure, models_figure
from swiftsure.report.figures import policy_figure, save_figure, study_figure

__all__ = ["exits_figure", "models_figure", "policy_figure", "save_figure", "study_figure"]
