"""Shared code for systems that run under a policy.

| module | contents |
|---|---|
| `auditing` | chooses requests to run in full, and feeds a monitor |
| `binding` | refuses a policy that was made for another system or model, or for other settings |
| `graphs` | what every captured runtime is made of: the only part that needs PyTorch |
| `options` | how a long run is stored, shown and spread over machines |
| `results` | what a run returns |
| `rules` | turns a policy, a rule or a bare threshold into the system's rule |
| `stages` | the loop over the stages of a network |
| `streaming` | gathers samples of several batches before a stage runs |
| `sweep` | runs a system on inputs at every setting and returns a `ThresholdRecord` |
"""

from swiftsure.records.checks import check_dtype
from swiftsure.run.binding import PolicyBinding, check_same
from swiftsure.run.options import RunOptions
from swiftsure.run.rules import Rule, ThresholdRule, same_exits, threshold_levels
from swiftsure.run.sweep import RunBatch, Runs, Sweep, sweep_grid

__all__ = [
    "PolicyBinding",
    "Rule",
    "RunBatch",
    "RunOptions",
    "Runs",
    "Sweep",
    "ThresholdRule",
    "check_dtype",
    "check_same",
    "same_exits",
    "sweep_grid",
    "threshold_levels",
]
