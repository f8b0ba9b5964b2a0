"""Thinking and repeated sampling, stopped early with a guarantee.

| module | contents |
|---|---|
| `traces` | `TraceRecord`: what was thought, and answered on the way |
| `votes` | `VoteRecord`: several answers to each question, in order |
| `probe_scores` | confidences of answers on the way |
| `two_dials` | stops when sure, and gives up when hopeless |
| `outcomes` | either of them as an `ExitRecord` |
| `families`, `reading` | how models are asked to think; reads their answers |
| `clients` | `Reasoner`: a model behind an OpenAI-compatible API |
| `local` | `LocalReasoner`: a model of transformers in this process |
| `walking`, `collecting` | asks at checkpoints; `collect_traces`, `collect_votes` |
| `running` | `Thinker`, `Voter`: stop under a policy |
"""

from swiftsure.reasoning.clients import Reasoner, ThinkingClient
from swiftsure.reasoning.collecting import collect_traces, collect_votes
from swiftsure.reasoning.families import FAMILIES, ThinkingFamily
from swiftsure.reasoning.local import LocalReasoner
from swiftsure.reasoning.probe_scores import TRACE_FEATURES, probe_scores
from swiftsure.reasoning.running import Thinker, Thought, Vote, Voter
from swiftsure.reasoning.traces import Probe, Trace, TraceRecord
from swiftsure.reasoning.two_dials import giving_up
from swiftsure.reasoning.votes import VoteRecord, majority, vote_scores

__all__ = [
    "FAMILIES",
    "TRACE_FEATURES",
    "LocalReasoner",
    "Probe",
    "Reasoner",
    "Thinker",
    "ThinkingClient",
    "ThinkingFamily",
    "Thought",
    "Trace",
    "TraceRecord",
    "Vote",
    "VoteRecord",
    "Voter",
    "collect_traces",
    "collect_votes",
    "giving_up",
    "majority",
    "probe_scores",
    "vote_scores",
]
