"""Results as pictures."""

from swiftsure.report.figures import policy_figure, save_figure, study_figure

__all__ = ["policy_figure", "save_figure", "study_figure"]
