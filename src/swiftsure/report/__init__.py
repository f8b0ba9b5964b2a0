"""Figures, and self-contained HTML reports about a policy."""

from swiftsure.report.figures import policy_figure, save_figure, study_figure
from swiftsure.report.page import policy_page

__all__ = ["policy_figure", "policy_page", "save_figure", "study_figure"]
