"""Cascades of models that you may not own: functions, language-model APIs, scikit-learn, PyTorch.

| module | contents |
|---|---|
| `cascade` | `Cascade`: collect a record, calibrate, run |
| `answers` | `Answer`: an answer, its confidence and its cost |
| `models`, `endpoints` | functions, estimators, modules and OpenAI-compatible APIs as models |
| `providers` | `ProviderEndpoint`: Anthropic's API and Azure's |
| `confidences` | confidences of answers, by name |
| `answer_features` | what a confidence is learned from |
| `answer_losses` | losses of answers |
| `collecting`, `answer_log`, `retrying` | asks all models; keeps every answer; retries |
| `events` | reads streams |
| `running` | runs a cascade under a policy |
| `router` | `Router`: sends inputs straight to the last model |
| `embeddings` | vectors of texts from an API |
| `request_kinds`, `request_parameters` | what requests are like, and the calibration's |
| `wrapping`, `recalibrating` | measures or maps a model's confidence |
| `judging` | a loss that another model gives |
| `estimator` | `CertifiedCascade` for scikit-learn |
| `langchain`, `litellm`, `semantic_router` | policies within other tools; imported by name |
| `logs` | logs of proxies and evaluations as records |
"""

from swiftsure.cascade.answer_features import ANSWER_FEATURES
from swiftsure.cascade.answer_losses import AnswerLoss
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.cascade import Cascade, record_of_answers
from swiftsure.cascade.collecting import CollectionError
from swiftsure.cascade.confidences import ANSWER_SCORES
from swiftsure.cascade.embeddings import Embeddings
from swiftsure.cascade.endpoints import Endpoint, answer_of_response, usage_cost
from swiftsure.cascade.judging import Judge
from swiftsure.cascade.models import BatchModel, Model
from swiftsure.cascade.providers import ProviderEndpoint
from swiftsure.cascade.recalibrating import Recalibration
from swiftsure.cascade.retrying import Backoff, UpstreamError
from swiftsure.cascade.router import Router
from swiftsure.cascade.running import CascadeOutput, CascadeRunner, Decision
from swiftsure.cascade.wrapping import LearnedConfidence, Recalibrated, SelfConsistency, Verified

__all__ = [
    "ANSWER_FEATURES",
    "ANSWER_SCORES",
    "Answer",
    "AnswerLoss",
    "Backoff",
    "BatchModel",
    "Cascade",
    "CascadeOutput",
    "CascadeRunner",
    "CollectionError",
    "Decision",
    "Embeddings",
    "Endpoint",
    "Judge",
    "LearnedConfidence",
    "Model",
    "ProviderEndpoint",
    "Recalibrated",
    "Recalibration",
    "Router",
    "SelfConsistency",
    "UpstreamError",
    "Verified",
    "answer_of_response",
    "record_of_answers",
    "usage_cost",
]
