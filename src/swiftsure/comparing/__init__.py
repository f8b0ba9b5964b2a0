"""Compare columns of scores: a full model and its cheaper variants, tried on the same samples.

`compare` certifies the cheapest variant; `columns` makes a record of tables, and `eval_logs` reads
the logs of lm-evaluation-harness and inspect-ai.
"""

from swiftsure.comparing.certifying import compare
from swiftsure.comparing.columns import Columns
from swiftsure.comparing.eval_logs import read_columns

__all__ = ["Columns", "compare", "read_columns"]
