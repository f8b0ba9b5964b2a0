"""`ProxyConfig`: the models, policy and limits of a proxy, from a TOML file."""

import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from swiftsure._lib.files import validation_message
from swiftsure.cascade import Cascade, Endpoint
from swiftsure.cascade.endpoints import check_key
from swiftsure.serve.engine import AnyPolicy
from swiftsure.serve.policies import any_part, load_policy
from swiftsure.serve.proxy.requests import canonical, same_json

__all__ = ["AuditConfig", "LimitConfig", "ProxyConfig", "UpstreamConfig"]

SHORTEST, LONGEST, UNKNOWN = 1.0, 60.0, 10.0
"""Default time-outs: the shortest, the longest, and that of a small model of unknown speed."""


class _Table(BaseModel):
    # Without the input in errors: it may be an API key.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class UpstreamConfig(_Table):
    """A model behind an OpenAI-compatible API; the fields are those of `Endpoint`.

    Attributes
    ----------
    timeout : float, optional
        Seconds to wait for the model. By default 60 for the last model; for another one three
        times what 99 % of its answers took in the calibration, at least 1 and at most 60, or 10 if
        that is not known.
    """

    base_url: str
    model: str
    name: str = ""
    key: Annotated[str | None, AfterValidator(check_key)] = Field(default=None, repr=False)
    per_million: tuple[float, ...] | None = None
    unit: str = "usd"
    kind: Literal["chat", "completions"] = "chat"
    logprobs: int | None = 5
    parameters: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0})
    timeout: float | None = Field(default=None, gt=0)


class AuditConfig(_Table):
    """How answers are audited.

    Attributes
    ----------
    rate : float
        Share of requests that the last model answers too.
    epsilon : float, optional
        Largest inconsistency allowed, if the policy promises a gap.
    alpha : float
        Probability of a false alarm, over all time.
    state : path
        Folder for the logs, the monitor and its alarm.
    most : int
        How many audits may be under way or wait; more are dropped and counted.
    """

    rate: float = Field(default=0.0, ge=0, le=1)
    epsilon: float | None = None
    alpha: float = Field(default=0.01, gt=0, lt=1)
    state: Path = Path("serving")
    most: int = Field(default=64, ge=1)


class LimitConfig(_Table):
    """What the proxy accepts: requests at once, bytes in a body, seconds for one answer."""

    max_requests: int = Field(default=512, ge=1)
    max_body: int = Field(default=8 << 20, ge=1)
    timeout: float = Field(default=120.0, gt=0)


class ProxyConfig(_Table):
    """What a proxy serves.

    Attributes
    ----------
    models : sequence of UpstreamConfig
        Cheapest first; the last is the one that the others are compared with.
    name : str
        The model that clients ask for.
    score : str
        The confidence that records hold; a policy names its own.
    policy : path, optional
        Without one, the last model answers all requests.
    fallback : path, optional
        A safer policy for the time after an alarm; the last model by default.
    on_alarm : str, optional
        A command or an http address that is told of each alarm.
    """

    models: Annotated[tuple[UpstreamConfig, ...], Field(min_length=2)]
    name: str = Field(default="cascade", min_length=1)
    score: str = "confidence"
    policy: Path | None = None
    fallback: Path | None = None
    on_alarm: str | None = None
    audit: AuditConfig = AuditConfig()
    limits: LimitConfig = LimitConfig()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ProxyConfig":
        """Read a TOML file; paths in it are relative to it.

        Raises
        ------
        ValueError
            If it is not TOML, or a field is missing, unknown or wrong.
        """
        place = Path(path)
        try:
            content = tomllib.loads(place.read_text("utf-8"))
            found = cls.model_validate(content)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{place} is not a TOML file: {error}.") from None
        except ValidationError as error:
            raise ValueError(f"{place}: {validation_message(error)}") from None
        folder = place.parent
        audit = found.audit.model_copy(update={"state": folder / found.audit.state})
        policies = {
            name: None if given is None else folder / given
            for name, given in (("policy", found.policy), ("fallback", found.fallback))
        }
        return found.model_copy(update={"audit": audit, **policies})

    def endpoints(self) -> list[Endpoint]:
        """Return the models, each with a connection for every request."""
        connections = self.limits.max_requests + self.audit.most
        return [
            Endpoint(**(dict(each) | {"timeout": each.timeout or LONGEST}), connections=connections)
            for each in self.models
        ]

    def timeouts(self, policy: AnyPolicy | None) -> list[float]:
        """Return how long to wait for each model; see `UpstreamConfig.timeout`."""
        last = len(self.models) - 1
        taken = _calibrated_seconds(policy, len(self.models))
        own = [min(max(3 * seconds, SHORTEST), LONGEST) for seconds in taken]
        return [
            each.timeout or (LONGEST if k == last else own[k]) for k, each in enumerate(self.models)
        ]

    def cascade(self) -> Cascade:
        """Return the cascade, to collect a record with and to calibrate.

        A record that was collected from it, and the policy made from that, fit this proxy.
        """
        return Cascade(self.endpoints(), scores=self.score)

    def load_policy(self) -> AnyPolicy | None:
        """Return the policy, if there is one."""
        if self.policy is None:
            return None
        if not self.policy.exists():
            raise ValueError(
                f"`policy`: there is no file {self.policy}. Calibrate and save a policy first; or"
                " leave `policy` out, and the last model answers all requests."
            )
        return load_policy(self.policy)

    def load_fallback(self) -> AnyPolicy | None:
        """Return the policy for the time after an alarm, if there is one."""
        return None if self.fallback is None else load_policy(self.fallback)


def _calibrated_seconds(policy: AnyPolicy | None, n: int) -> list[float]:
    """Return what 99 % of each model's answers took in the calibration, or a guess."""
    found = None if policy is None else any_part(policy).settings.get("seconds")
    if not isinstance(found, list | tuple) or len(found) != n:
        return [UNKNOWN / 3] * n
    known = [isinstance(each, int | float) and math.isfinite(each) for each in found]
    return [float(each) if fine else UNKNOWN / 3 for each, fine in zip(found, known, strict=True)]


def parameters_in_common(models: list[Endpoint]) -> Mapping[str, Any]:
    """Return the parameters with which all models were calibrated, by their canonical names."""
    first, *others = (canonical(each.parameters) for each in models)
    return {
        name: value
        for name, value in first.items()
        if all(name in each and same_json(each[name], value) for each in others)
    }
