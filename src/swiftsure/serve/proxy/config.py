"""`ProxyConfig`: the models, policy and limits of a proxy, from a TOML file."""

import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from swiftsure._lib import checks
from swiftsure._lib.files import validation_message
from swiftsure.cascade import (
    Cascade,
    Embeddings,
    Endpoint,
    LearnedConfidence,
    Model,
    Router,
    SelfConsistency,
    Verified,
)
from swiftsure.cascade.endpoints import check_key
from swiftsure.cascade.providers import Provider, ProviderEndpoint
from swiftsure.certify.slices import any_part, load_policy
from swiftsure.reasoning import Reasoner
from swiftsure.reasoning.clients import BOXED
from swiftsure.scores import LearnedScore
from swiftsure.serve.engine import AnyPolicy

__all__ = [
    "AuditConfig",
    "ConfidenceConfig",
    "EndpointConfig",
    "LimitConfig",
    "ProxyConfig",
    "RouterConfig",
    "SliceConfig",
    "ThinkingConfig",
    "UpstreamConfig",
]

SHORTEST, LONGEST, UNKNOWN = 1.0, 60.0, 10.0
"""Default time-outs: the shortest, the longest, and that of a small model of unknown speed."""


class _Table(BaseModel):
    # Without the input in errors: it may be an API key.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class EndpointConfig(_Table):
    """A model behind an OpenAI-compatible API that helps: a verifier, or one for embeddings."""

    base_url: str
    model: str
    key: Annotated[str | None, AfterValidator(check_key)] = Field(default=None, repr=False)
    per_million: tuple[float, ...] | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0})
    timeout: float = Field(default=10.0, gt=0)


class ConfidenceConfig(_Table):
    """How a small model's confidence is measured, instead of by log-probabilities.

    Attributes
    ----------
    self_consistency : int, optional
        How many samples to draw; the confidence is the share that gives the most frequent answer.
    verifier : EndpointConfig, optional
        A model that says how sure it is of an answer.
    learned : path, optional
        A learned score (JSON) over features of question and answer; those above are features too.
    """

    self_consistency: int | None = Field(default=None, ge=2)
    verifier: EndpointConfig | None = None
    learned: Path | None = None

    @model_validator(mode="after")
    def _is_measured(self) -> "ConfidenceConfig":
        if not self.model_fields_set:
            raise ValueError("must have self_consistency, verifier or learned")
        return self

    def around(self, endpoint: Endpoint, learned: bool) -> Model:
        """Return an endpoint with these wrappers."""
        model: Model = endpoint
        if self.self_consistency is not None:
            model = SelfConsistency(model, self.self_consistency)
        if self.verifier is not None:
            model = Verified(model, Endpoint(**dict(self.verifier), logprobs=None))
        if learned and self.learned is not None:
            if not self.learned.exists():
                raise ValueError(
                    f"`confidence.learned`: there is no file {self.learned}. Learn it first:"
                    " ProxyConfig.load(file).learn(questions)."
                )
            model = LearnedConfidence(model, LearnedScore.load(self.learned))
        return model


class RouterConfig(_Table):
    """A router before the small model.

    Attributes
    ----------
    file : path
        What `Router.save` wrote.
    embeddings : EndpointConfig
        The model whose embeddings the router takes.
    """

    file: Path
    embeddings: EndpointConfig

    def embed(self) -> Embeddings:
        """Return the function that embeds questions."""
        given = self.embeddings
        return Embeddings(given.base_url, given.model, key=given.key, timeout=given.timeout)


class UpstreamConfig(_Table):
    """A model behind an OpenAI-compatible API; the fields are those of `Endpoint`.

    Attributes
    ----------
    provider : {"anthropic", "azureopenai"}, optional
        For another API than OpenAI's; see `ProviderEndpoint`.
    logprobs : int or false
        How many of the most probable tokens to ask for; false asks for no log-probabilities, which
        is the default where `confidence` is given.
    confidence : ConfidenceConfig, optional
        For a model before the last.
    timeout : float, optional
        Seconds to wait for the model. By default 60 for the last model; for another one three
        times what 99 % of its answers took in the calibration, at least 1 and at most 60, or 10 if
        that is not known.
    """

    base_url: str
    model: str
    provider: Provider | None = None
    name: str = ""
    key: Annotated[str | None, AfterValidator(check_key)] = Field(default=None, repr=False)
    per_million: tuple[float, ...] | None = None
    unit: str = "usd"
    kind: Literal["chat", "completions"] = "chat"
    logprobs: int | Literal[False] = 5
    parameters: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0})
    confidence: ConfidenceConfig | None = None
    timeout: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _samples_differ(self) -> "UpstreamConfig":
        drawn = self.confidence is not None and self.confidence.self_consistency is not None
        if drawn and not self.parameters.get("temperature", 1):
            raise ValueError(
                "confidence.self_consistency needs samples that differ: set parameters.temperature"
                " above 0"
            )
        return self

    def endpoint(self, connections: int) -> Endpoint:
        """Return the endpoint without wrappers."""
        asks = self.confidence is None or "logprobs" in self.model_fields_set
        fields = dict(self) | {
            "timeout": self.timeout or LONGEST,
            "logprobs": self.logprobs if asks and self.logprobs is not False else None,
        }
        fields = _without(fields, "confidence")
        if self.provider is not None:
            return ProviderEndpoint(**fields)
        return Endpoint(**_without(fields, "provider"), connections=connections)


class ThinkingConfig(_Table):
    """How a model thinks and is asked on the way; the fields are those of `Reasoner`."""

    family: str | None = None
    options: tuple[str, ...] = ()
    answer_prompt: str = BOXED
    answer_tokens: int = Field(default=24, ge=1)
    max_tokens: int = Field(default=32_768, ge=1)
    prefix_cache: bool = True


class AuditConfig(_Table):
    """How answers are audited.

    Attributes
    ----------
    rate : float
        Share of requests that the last model answers too.
    detect, within : float, int, optional
        Instead of a rate: a risk that is to be found within so many requests, with 90 % power. The
        rate follows by simulation.
    labels : bool
        Watch the gap that the policy promises, with labels that arrive later at POST /labels. The
        answers of audited requests that need one are then kept in the logs.
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
    detect: float | None = Field(default=None, gt=0)
    within: int | None = Field(default=None, ge=1)
    labels: bool = False
    epsilon: float | None = None
    alpha: float = Field(default=0.01, gt=0, lt=1)
    state: Path = Path("serving")
    most: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _has_one_rate(self) -> "AuditConfig":
        if (self.detect is None) != (self.within is None):
            raise ValueError("detect and within go together")
        if self.detect is not None and self.rate:
            raise ValueError("give a rate, or detect and within, but not both")
        return self


class SliceConfig(_Table):
    """What tells the slice of a request, in place of `metadata.slice` and x-swiftsure-slice.

    Attributes
    ----------
    header : str, optional
        Name of a header.
    field : str, optional
        A field of the request, such as "user" or "metadata.customer".
    """

    header: str | None = None
    field: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> "SliceConfig":
        if (self.header is None) == (self.field is None):
            raise ValueError("must have a header or a field")
        return self

    def of(self, fields: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> str | None:
        """Return the slice of a request; None if it names none."""
        if self.header is not None:
            found = headers.get(self.header.lower().encode("latin-1"))
            return None if found is None else found.decode("latin-1")
        value: Any = fields
        for name in (self.field or "").split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value if isinstance(value, str) else None


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
    thinking : ThinkingConfig, optional
        For one model, which may stop thinking early.
    router : RouterConfig, optional
    name : str
        The model that clients ask for.
    score : str
        The confidence that records hold; a policy names its own.
    policy : path, optional
        Without one, the last model answers all requests.
    fallback : path, optional
        A safer policy for the time after an alarm; the last model by default.
    pass_through : sequence of str
        Other models of the last model's provider, such as one for embeddings, that clients may use
        at /v1/embeddings and /v1/responses.
    slices : SliceConfig, optional
        For a policy with a setting for each slice; requests of other slices get the last model.
    on_alarm : str, optional
        A command or an http address that is told of each alarm.
    on_change : {"say", "fall back", "shadow"}
        What to do when a provider changes a model: say so; answer with the last model; or that, and
        still ask and audit the small models, so that the monitor shows whether they are as before.
    """

    models: Annotated[tuple[UpstreamConfig, ...], Field(min_length=1)]
    thinking: ThinkingConfig | None = None
    router: RouterConfig | None = None
    name: str = Field(default="cascade", min_length=1)
    score: str = "confidence"
    policy: Path | None = None
    fallback: Path | None = None
    on_alarm: str | None = None
    on_change: Literal["say", "fall back", "shadow"] = "say"
    pass_through: tuple[str, ...] = ()
    slices: SliceConfig | None = None
    audit: AuditConfig = AuditConfig()
    limits: LimitConfig = LimitConfig()

    @model_validator(mode="after")
    def _has_confidences(self) -> "ProxyConfig":
        for each in self.models[:-1]:
            if each.provider == "anthropic" and each.confidence is None:
                raise ValueError(
                    f"models: {each.model} needs `confidence`, since Anthropic gives no"
                    " log-probabilities"
                )
        return self

    @model_validator(mode="after")
    def _has_models(self) -> "ProxyConfig":
        n = len(self.models)
        if self.thinking is None and n < 2:
            raise ValueError("models must be at least 2, or one with a [thinking] table")
        alone = n == 1 and self.router is None and self.models[0].confidence is None
        if self.thinking is not None and not alone:
            raise ValueError("thinking is for one model, without a router or a confidence")
        return self

    @classmethod
    def load(cls, path: str | os.PathLike[str], name: str | None = None) -> "ProxyConfig":
        """Read the cascade of a TOML file, or that of this name if it has several.

        Raises
        ------
        ValueError
            If it is not TOML, or a field is missing, unknown or wrong.
        """
        found = {each.name: each for each in cls.load_all(path)}
        if name is None:
            if len(found) > 1:
                raise ValueError(f"{path} has several cascades; name one of {', '.join(found)}.")
            (name,) = found
        return found[checks.choice("name", name, found)]

    @classmethod
    def load_all(cls, path: str | os.PathLike[str]) -> "tuple[ProxyConfig, ...]":
        """Read all cascades of a TOML file; paths in it are relative to it.

        A file has one cascade, or a table `[[cascades]]` for each. What stands outside those tables
        holds for all of them.
        """
        place = Path(path)
        try:
            content = tomllib.loads(place.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{place} is not a TOML file: {error}.") from None
        several = content.pop("cascades", None)
        tables = [content] if several is None else _tables(place, content, several)
        try:
            found = [cls.model_validate(each)._beside(place.parent) for each in tables]
        except ValidationError as error:
            raise ValueError(f"{place}: {validation_message(error)}") from None
        taken = [name for each in found for name in each.names]
        if len({each.name for each in found}) < len(found) or any(
            taken.count(each.name) > 1 for each in found
        ):
            raise ValueError(f"{place}: each cascade must have a name of its own.")
        return tuple(found)

    @property
    def names(self) -> list[str]:
        """The names that clients may ask for: the cascade's, and its last model's."""
        return list(dict.fromkeys([self.name, self.models[-1].name or self.models[-1].model]))

    def _beside(self, folder: Path) -> "ProxyConfig":
        """Return the configuration with paths relative to its file's folder."""
        audit = self.audit.model_copy(update={"state": folder / self.audit.state})
        policies = {
            name: None if given is None else folder / given
            for name, given in (("policy", self.policy), ("fallback", self.fallback))
        }
        models = [_in_folder(each, folder) for each in self.models]
        router = self.router
        if router is not None:
            router = router.model_copy(update={"file": folder / router.file})
        changed = {"audit": audit, "models": tuple(models), "router": router, **policies}
        return self.model_copy(update=changed)

    def timeouts(self, policy: AnyPolicy | None) -> list[float]:
        """Return how long to wait for each model; see `UpstreamConfig.timeout`."""
        given = [each.timeout for each in self.models]
        if self.router is not None:
            given.insert(0, self.router.embeddings.timeout)
        taken = _calibrated_seconds(policy, len(given))
        own = [min(max(3 * seconds, SHORTEST), LONGEST) for seconds in taken]
        return [each or own[k] for k, each in enumerate(given[:-1])] + [given[-1] or LONGEST]

    def reasoner(self) -> Reasoner:
        """Return the model that thinks, to collect traces with and to run under a policy.

        A policy from traces that were collected from it fits this proxy.
        """
        if self.thinking is None:
            raise ValueError("`thinking` must be a table of the file, to say how the model thinks.")
        endpoint = self.models[0].endpoint(self.limits.max_requests + self.audit.most)
        return Reasoner(endpoint, timeout=self.limits.timeout, **dict(self.thinking))

    def cascade(self, *, learned: bool = True, routed: bool = True) -> Cascade:
        """Return the cascade, to collect a record with and to calibrate.

        A record that was collected from it, and the policy made from that, fit this proxy.

        Parameters
        ----------
        learned : bool
            Whether to use learned confidences, whose files must exist.
        routed : bool
            Whether to put the router first, whose file must exist.
        """
        connections = self.limits.max_requests + self.audit.most
        models: list[Model] = []
        for each in self.models:
            endpoint, confidence = each.endpoint(connections), each.confidence
            models.append(endpoint if confidence is None else confidence.around(endpoint, learned))
        if routed and self.router is not None:
            models.insert(0, Router.load(self.router.file, self.router.embed()))
        return Cascade(models, scores=self.score)

    def learn(self, inputs: Sequence[Any], **options: Any) -> Cascade:
        """Learn the confidences and the router that the file names, and write their files.

        Parameters
        ----------
        inputs : sequence
            Questions that will not calibrate, without answers; 1,000 or more for a router.
        **options
            `ids`, `folder` and others of `Cascade.learn`.
        """
        cascade = self.cascade(learned=False, routed=False)
        if any(each.confidence is not None and each.confidence.learned for each in self.models):
            found = cascade.learn(inputs, **options)
            for config, model in zip(self.models, found.models, strict=True):
                if config.confidence is not None and config.confidence.learned is not None:
                    model.score.save(config.confidence.learned)  # type: ignore[attr-defined]
        if self.router is not None:
            pilot = self.cascade(routed=False).collect(inputs, **_without(options, "features"))
            Router.fit(pilot, inputs, self.router.embed()).save(self.router.file)
        return self.cascade()

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


def _tables(place: Path, shared: dict[str, Any], several: Any) -> list[dict[str, Any]]:
    """Return the table of each cascade, with what all share and a folder of its own for audits."""
    if not isinstance(several, list) or not several or not all(map(_is_table, several)):
        raise ValueError(f"{place}: `cascades` must be tables, [[cascades]].")
    found = []
    for each in several:
        audit = {**shared.get("audit", {}), **each.get("audit", {})}
        state = Path(audit.get("state", "serving")) / str(each.get("name", ""))
        own = {"audit": {**audit, "state": each.get("audit", {}).get("state", state)}}
        found.append({**shared, **each, **own})
    return found


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("audit", {}), dict)


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _in_folder(model: UpstreamConfig, folder: Path) -> UpstreamConfig:
    """Return a model whose learned confidence is looked for in the folder of the file."""
    confidence = model.confidence
    if confidence is None or confidence.learned is None:
        return model
    own = confidence.model_copy(update={"learned": folder / confidence.learned})
    return model.model_copy(update={"confidence": own})


def _calibrated_seconds(policy: AnyPolicy | None, n: int) -> list[float]:
    """Return what 99 % of each model's answers took in the calibration, or a guess."""
    found = None if policy is None else any_part(policy).settings.get("seconds")
    if not isinstance(found, list | tuple) or len(found) != n:
        return [UNKNOWN / 3] * n
    known = [isinstance(each, int | float) and math.isfinite(each) for each in found]
    return [float(each) if fine else UNKNOWN / 3 for each, fine in zip(found, known, strict=True)]
