"""Writes a certified cascade as a configuration of vLLM's semantic-router."""

import json
import math
import os
from pathlib import Path
from typing import Any

from swiftsure._lib.files import write_text
from swiftsure.cascade.cascade import Cascade
from swiftsure.cascade.endpoints import Endpoint
from swiftsure.certify.policy import Policy

__all__ = ["semantic_router_config", "write_semantic_router"]

SCORES = ("confidence", "mean_logprob", "perplexity")
"""Confidences that the router can compute: of endpoints, all three are the tokens' mean."""

LOWEST = -3.0
"""Mean log-probability that the router maps to 0; it maps 0 to 1."""


def semantic_router_config(
    cascade: Cascade, policy: Policy, name: str = "cascade"
) -> dict[str, Any]:
    """Return the router's configuration with a decision that runs a cascade at its threshold.

    The router asks the models in this order, and keeps an answer whose mean log-probability, mapped
    from [-3, 0] to [0, 1], reaches the threshold. `annotations` of the decision hold the
    certificate. What the router does not do itself: it does not check that requests have the
    parameters and messages of the calibration, it audits nothing, and it does not stop after an
    alarm. A model that fails is an error for the client, because otherwise an answer that is not
    sure enough would be sent where the last model fails.

    Parameters
    ----------
    cascade : Cascade
        Of chat endpoints without wrappers, router, prompt or system message.
    policy : Policy
        For this cascade, with one threshold of at least exp(-3), on the mean log-probability.
    name : str
        Of the decision.

    Raises
    ------
    ValueError
        If the router cannot do what was certified.
    """
    runner = cascade.run(policy)
    models = [each for each in cascade.models if isinstance(each, Endpoint)]
    plain = [e for e in models if e.kind == "chat" and e.prompt is None and e.system is None]
    if len(plain) < len(cascade.models):
        raise ValueError(
            "`cascade` must be of chat endpoints without wrappers, router, prompt or system message"
            " to run in the semantic router."
        )
    if policy.rule.score not in SCORES:
        raise ValueError(
            f"`policy` decides by {policy.rule.score!r}, but the semantic router can only decide by"
            " the mean log-probability: calibrate with scores='mean_logprob'."
        )
    last = len(models) - 1
    used = [k for k in range(last) if runner.can_exit(k)]
    given = policy.thresholds
    apart = set() if given is None else {float(given[k]) for k in used}
    if len(apart) > 1 or policy.strict:
        raise ValueError("`policy` must have one threshold that is not strict.")
    decision: dict[str, Any] = {
        "name": name,
        "description": "A cascade that Swiftsure certified; see its annotations.",
        "priority": 100,
        "rules": {"operator": "AND", "conditions": []},
        "modelRefs": [{"model": models[k].name} for k in (*used, last)],
        "annotations": {"swiftsure": _about(policy, models)},
    }
    if used:
        decision["algorithm"] = {
            "type": "confidence",
            "confidence": {
                "confidence_method": "avg_logprob",
                "threshold": router_threshold(apart.pop()),
                "escalation_order": "declared",
                "on_error": "fail",
            },
        }
    routed = [models[k] for k in (*used, last)]
    return {
        "version": "v0.3",
        "providers": {
            "defaults": {"model": models[-1].name},
            "models": [_model(each) for each in routed],
        },
        "routing": {
            "modelCards": [{"name": each.name} for each in routed],
            "decisions": [decision],
        },
    }


def write_semantic_router(
    path: str | os.PathLike[str], cascade: Cascade, policy: Policy, name: str = "cascade"
) -> None:
    """Write `semantic_router_config` as YAML; add your listeners before `vllm-sr serve`.

    Raises
    ------
    ValueError
        If the router cannot do what was certified.
    """
    try:
        import yaml
    except ImportError:
        raise ImportError("Writing YAML needs PyYAML: pip install pyyaml.") from None
    config = semantic_router_config(cascade, policy, name)
    write_text(Path(path), yaml.safe_dump(config, sort_keys=False, allow_unicode=True, width=100))


def router_threshold(threshold: float) -> float:
    """Return the router's threshold for a geometric mean of the tokens' probabilities.

    Examples
    --------
    >>> round(router_threshold(0.9), 4)
    0.9649
    """
    mapped = 1.0 - math.log(threshold) / LOWEST if threshold else 0.0
    if not 0.0 < mapped <= 1.0:  # the router takes 0 for "not set", and then accepts all answers
        raise ValueError(
            f"`policy` has the threshold {threshold:g}, but the semantic router can only compare"
            f" with thresholds above exp({LOWEST:g}), {math.exp(LOWEST):.3f}, up to 1."
        )
    return mapped


def _model(endpoint: Endpoint) -> dict[str, Any]:
    backend = {"name": "primary", "provider": "openai", "base_url": endpoint.base_url}
    if endpoint.key is not None:
        backend["api_key_env"] = endpoint.key
    found: dict[str, Any] = {
        "name": endpoint.name,
        "provider_model_id": endpoint.model,
        "backend_refs": [backend],
    }
    if endpoint.per_million is not None:
        read, written = endpoint.per_million[:2]
        found["pricing"] = {
            "currency": endpoint.unit.upper(),
            "prompt_per_1m": read,
            "completion_per_1m": written,
        }
    return found


def _about(policy: Policy, models: list[Endpoint]) -> dict[str, Any]:
    """Return the certificate, and what clients must send for it to hold."""
    return {
        "certificate": str(policy),
        "policy": json.loads(policy.model_dump_json()),
        "parameters": {each.name: dict(each.parameters) for each in models},
    }
