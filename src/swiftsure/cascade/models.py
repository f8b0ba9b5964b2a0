"""Models of a cascade behind one interface: callables, estimators, torch modules, endpoints."""

import asyncio
import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftsure.cascade.answers import Answer, plain

if TYPE_CHECKING:
    from swiftsure.curves.pilots import Learned, PilotSamples

__all__ = ["BatchModel", "CallableModel", "Model", "identity_digest", "model_of"]


class Model(ABC):
    """One model of a cascade. To add a kind of model, subclass it and write `answer`."""

    name: str = "model"
    is_router: bool = False
    """Whether its confidence is that only the last model can answer."""

    @abstractmethod
    async def answer(self, value: Any) -> Answer:
        """Return the answer to one input."""

    def identity(self) -> dict[str, Any] | None:
        """Return, as JSON, what its answers depend on; None if that is not known."""
        return None

    @property
    def pilots(self) -> "dict[Learned, PilotSamples]":
        """The samples that the model or its confidence was learned on, by what was learned."""
        return {}

    async def close(self) -> None:  # noqa: B027 (most models hold nothing)
        """Release connections of the running event loop."""


class BatchModel(Model):
    """A model that answers many inputs at once, in this process."""

    batch_size: int = 256

    @abstractmethod
    def answers(self, inputs: Any) -> list[Answer]:
        """Return the answers to a batch of inputs."""

    async def answer(self, value: Any) -> Answer:
        """Return the answer to one input."""
        batch = value[None] if isinstance(value, np.ndarray) else [value]
        return (await asyncio.to_thread(self.answers, batch))[0]


class CallableModel(Model):
    """A function from one input to its answer, plain or async.

    Plain functions run in threads, several at once: they must be thread-safe, or the cascade's
    `concurrency` must be 1.

    Parameters
    ----------
    function : callable
        Returns anything that `Answer.of` understands. A function with an attribute `fingerprint`, a
        text, binds policies to it.
    """

    def __init__(self, function: Callable[[Any], Any], name: str | None = None) -> None:
        self.function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        call = getattr(function, "__call__", function)  # noqa: B004 (an object with async __call__)
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    async def answer(self, value: Any) -> Answer:
        """Return the answer to one input."""
        if self._is_async:
            return Answer.of(await self.function(value))
        found = await asyncio.to_thread(self.function, value)
        return Answer.of(await found if inspect.isawaitable(found) else found)

    def identity(self) -> dict[str, Any] | None:
        """Return the function's own fingerprint, if it has one."""
        own = getattr(self.function, "fingerprint", None)
        return None if own is None else {"callable": str(own() if callable(own) else own)}


class EstimatorModel(BatchModel):
    """A fitted scikit-learn classifier.

    Parameters
    ----------
    estimator
        With `predict_proba` and `classes_`.
    """

    def __init__(self, estimator: Any, name: str | None = None) -> None:
        if not hasattr(estimator, "classes_"):
            raise ValueError(f"`models` must be fitted, but {type(estimator).__name__} is not.")
        self.estimator = estimator
        self.name = name or type(estimator).__name__

    def answers(self, inputs: Any) -> list[Answer]:
        """Return the answers to a batch of inputs."""
        classes = plain(np.asarray(self.estimator.classes_))
        batch = inputs if hasattr(inputs, "iloc") else np.asarray(inputs)
        table = np.asarray(self.estimator.predict_proba(batch), np.float64)
        return [Answer.of_distribution(row, classes) for row in table]

    def identity(self) -> dict[str, Any] | None:
        """Return a hash of the fitted estimator."""
        from joblib import hash as joblib_hash  # comes with scikit-learn

        return {"estimator": type(self.estimator).__name__, "hash": joblib_hash(self.estimator)}


class TorchModel(BatchModel):
    """A PyTorch classifier in evaluation mode, from a batch to logits."""

    def __init__(self, module: Any, name: str | None = None) -> None:
        if module.training:
            raise ValueError("`models` must be in evaluation mode: call .eval() first.")
        self.module = module
        self.name = name or type(module).__name__

    def answers(self, inputs: Any) -> list[Answer]:
        """Return the answers to a batch of inputs."""
        import torch

        parameter = next(self.module.parameters(), None)
        device = None if parameter is None else parameter.device
        rows = [torch.as_tensor(each) for each in inputs]
        with torch.inference_mode():
            outputs = self.module(torch.stack(rows).to(device)).float().cpu().numpy()
        return [Answer.of_distribution(row) for row in outputs]

    def identity(self) -> dict[str, Any] | None:
        """Return the fingerprint of the module's weights and configuration."""
        from swiftsure.torch.fingerprinting import fingerprint

        return {"module": fingerprint(self.module)}


def model_of(given: Any, name: str | None = None) -> Model:
    """Return a model for a callable, an estimator, a torch module or an endpoint."""
    if isinstance(given, Model):
        return given
    if hasattr(given, "predict_proba"):
        return EstimatorModel(given, name)
    if hasattr(given, "state_dict") and hasattr(given, "parameters"):
        return TorchModel(given, name)
    if callable(given):
        return CallableModel(given, name)
    raise TypeError(
        "`models` must be callables, endpoints, classifiers with predict_proba or torch modules,"
        f" but got {type(given).__name__}."
    )


def identity_digest(identities: Sequence[Mapping[str, Any] | None]) -> str | None:
    """Return a fingerprint of what several models depend on; None if one of them is unknown."""
    if any(each is None for each in identities):
        return None
    text = json.dumps(list(identities), sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
