"""Thinking and repeated sampling, stopped early with a guarantee.

| module | contents |
|---|---|
| `traces` | `TraceRecord`: what was thought, and answered on the way |
| `votes` | `VoteRecord`: several answers to each question, in order |
| `probe_scores` | confidences of answers on the way |
| `two_dials` | stops when sure, and gives up when hopeless |
| `outcomes` | either of them as an `ExitRecord` |
"""

from swiftsure.reasoning.probe_scores import TRACE_FEATURES, probe_scores
from swiftsure.reasoning.traces import Probe, Trace, TraceRecord
from swiftsure.reasoning.two_dials import giving_up
from swiftsure.reasoning.votes import VoteRecord, majority, vote_scores

__all__ = [
    "TRACE_FEATURES",
    "Probe",
    "Trace",
    "TraceRecord",
    "VoteRecord",
    "giving_up",
    "majority",
    "probe_scores",
    "vote_scores",
]
