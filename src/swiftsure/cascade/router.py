"""`Router`: sends inputs on which the small models would fail straight to the last model."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure._lib.files import atomic_write, npz
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.embeddings import Embeddings
from swiftsure.cascade.models import BatchModel
from swiftsure.curves.pilots import Learned, PilotSamples
from swiftsure.records import ExitRecord

__all__ = ["Router"]

Floats = NDArray[np.float64]
Embed = Callable[[Sequence[Any]], ArrayLike]
"""A function from n inputs to their (n, width) embeddings, as `SentenceTransformer.encode` is."""

FORMAT = "swiftsure-router"

CHOOSING = 1000
"""Pilot samples on which width and damping are chosen; fitting takes all of them."""
WIDTHS = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Inverse squared widths of the kernel to choose from, for embeddings of length 1."""
DAMPINGS = (0.1, 0.3, 1.0, 3.0, 10.0)


class Router(BatchModel):
    """How likely the models before the last are of no use for an input, from its embedding.

    Put it first in a `Cascade`. The policy then has two dials, certified together: inputs that are
    hopeless enough go straight to the last model, and of the others the small model's answer is
    kept where it is sure enough. `Router.fit` learns it from pilot samples without labels.

    It is a kernel regression: an input is as hopeless as the pilot's inputs near it were. What
    makes a small model fail is often local, and a linear model of the embedding misses it.

    **Guarantee**: calibrating with a learned router is valid only if no sample of the pilot, nor
    one of its group, is among the calibration samples. Ids and groups are compared, and
    certificates state the condition.

    Parameters
    ----------
    embed : callable
        From n inputs to their embeddings, (n, d). An attribute `fingerprint`, a text, binds
        policies to it.
    landmarks : (m, d)
        Embeddings of the pilot's inputs.
    weights : (m,)
        What each adds for an input that is near it.
    base : float
        How hopeless an input is that is near none.
    width : float
        Inverse squared width of the kernel.
    pilot : PilotSamples, optional
    cost : mapping, optional
        What one input costs, by unit.
    """

    is_router = True

    def __init__(
        self,
        embed: Embed,
        landmarks: ArrayLike,
        weights: ArrayLike,
        *,
        base: float,
        width: float,
        pilot: PilotSamples | None = None,
        cost: Mapping[str, float] | None = None,
        name: str = "router",
    ) -> None:
        if not callable(embed):
            raise TypeError(f"`embed` must be a function, but got {type(embed).__name__}.")
        self.embed, self.name = embed, name
        points = checks.finite("landmarks", checks.numbers("landmarks", landmarks, np.float32))
        self.landmarks = checks.of_shape("landmarks", points, {"m": None, "d": None})
        checked = checks.finite("weights", checks.numbers("weights", weights, np.float64))
        checks.of_shape("weights", checked, {"m": len(self.landmarks)})
        self.weights, self.base, self.width = checked, float(base), float(width)
        self.pilot, self.cost = pilot, dict(cost or {})

    @classmethod
    def fit(
        cls,
        record: ExitRecord,
        inputs: Sequence[Any],
        embed: Embed,
        *,
        loss: str | None = None,
        cost: Mapping[str, float] | None = None,
        name: str = "router",
    ) -> "Router":
        """Learn where no model before the last agrees with it; labels are not looked at.

        Parameters
        ----------
        record : ExitRecord
            Of the cascade without the router, on samples that will not calibrate: 1,000 or more.
        inputs : (n,)
            The record's inputs, in its order.
        embed, cost
            As in the class.
        loss : str, optional
            The inconsistency that is to be small; by default the record's first.

        Examples
        --------
        >>> rng = np.random.default_rng(0)
        >>> inputs = rng.normal(size=(300, 2))
        >>> fails = inputs[:, :1] > 0.5
        >>> pilot = ExitRecord(
        ...     rng.random((300, 1)), inconsistencies={"zero_one": np.hstack([fails, 0 * fails])}
        ... )
        >>> router = Router.fit(pilot, inputs, embed=np.asarray)
        >>> router.hopeless([[3.0, 0.0], [-3.0, 0.0]]).round()
        array([1., 0.], dtype=float32)
        """
        if not getattr(record, "inconsistencies", None) or not hasattr(record, "confidences"):
            raise TypeError("`record` must be an ExitRecord with `inconsistencies`.")
        if len(inputs) != record.n:
            raise ValueError(
                f"`inputs` must be the record's {record.n:,}, in its order, but there are"
                f" {len(inputs):,}."
            )
        known = record.inconsistencies
        chosen = checks.choice("loss", loss or next(iter(known)), known)
        declared: Any = record.inconsistency_ranges[chosen]
        apart = np.asarray(known[chosen][:, :-1].min(axis=1) / declared.high, np.float64)
        points = _unit("embed", embed(inputs))
        checks.of_shape("embed", points, {"n": record.n, "d": None})
        base = float(apart.mean())
        width, damping = _chosen(points[:CHOOSING], apart[:CHOOSING] - base)
        kernel = _kernel(points, points, width)
        kernel[np.diag_indices_from(kernel)] += damping
        weights = np.linalg.solve(kernel, apart - base)
        found = PilotSamples.of(record)
        return cls(
            embed, points, weights, base=base, width=width, pilot=found, cost=cost, name=name
        )

    def hopeless(self, inputs: Sequence[Any]) -> NDArray[np.float32]:
        """Return how likely each input needs the last model, in [0, 1], (n,)."""
        return self._levels(self.embed(inputs), len(inputs))

    def _levels(self, vectors: ArrayLike, n: int) -> NDArray[np.float32]:
        points = _unit("embed", vectors)
        checks.of_shape("embed", points, {"n": n, "d": self.landmarks.shape[1]})
        found = self.base + _kernel(points, self.landmarks, self.width) @ self.weights
        levels: NDArray[np.float32] = np.clip(found, 0.0, 1.0).astype(np.float32)
        return levels

    def answers(self, inputs: Any) -> list[Answer]:
        """Return no answers, but how hopeless inputs are as confidences in the last model."""
        return [Answer(None, float(each), self.cost) for each in self.hopeless(inputs)]

    async def answer(self, value: Any) -> Answer:
        """Return how hopeless one input is."""
        if not isinstance(self.embed, Embeddings):
            return await super().answer(value)
        (level,) = self._levels(await self.embed.vectors([value]), 1)
        return Answer(None, float(level), self.cost)

    async def close(self) -> None:
        """Close the connections of `embed`, if it has any."""
        if isinstance(self.embed, Embeddings):
            await self.embed.close()

    @property
    def pilots(self) -> dict[Learned, PilotSamples]:
        """The samples that the router was learned on."""
        return {} if self.pilot is None else {"router": self.pilot}

    def identity(self) -> dict[str, Any] | None:
        """Return what the router depends on; None if `embed` has no fingerprint."""
        own = getattr(self.embed, "fingerprint", None)
        if own is None:
            return None
        digest = hashlib.sha256(self.landmarks.tobytes() + self.weights.tobytes())
        digest.update(repr((self.base, self.width)).encode())
        return {"router": digest.hexdigest(), "embed": str(own() if callable(own) else own)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the router, without its function `embed`, to an npz file."""
        about = {
            "format": FORMAT,
            "base": self.base,
            "width": self.width,
            "cost": self.cost,
            "name": self.name,
            "pilot": None if self.pilot is None else self.pilot.to_json(),
        }
        with atomic_write(path) as place, place.open("wb") as file:
            np.savez(file, landmarks=self.landmarks, weights=self.weights, about=json.dumps(about))

    @classmethod
    def load(cls, path: str | os.PathLike[str], embed: Embed) -> "Router":
        """Read a router that `save` wrote; `embed` must be the function that it was fitted with."""
        try:
            with npz(Path(path)) as arrays:
                about = json.loads(str(arrays["about"]))
                if about.pop("format") != FORMAT:
                    raise KeyError("format")
                pilot = about.pop("pilot")
                known = None if pilot is None else PilotSamples.from_json(pilot)
                return cls(embed, arrays["landmarks"], arrays["weights"], pilot=known, **about)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a router's file, or damaged: {error!r}") from None


def _unit(name: str, values: ArrayLike) -> Floats:
    """Return rows of length 1, so that only directions count."""
    rows = checks.finite(name, checks.numbers(name, values, np.float64))
    checks.of_shape(name, rows, {"n": None, "d": None})
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(lengths > 0, lengths, 1.0))


def _kernel(one: NDArray[Any], other: NDArray[Any], width: float) -> Floats:
    return np.asarray(np.exp(-2 * width * (1 - one @ other.T)), np.float64)


def _chosen(points: Floats, targets: Floats) -> tuple[float, float]:
    """Return width and damping of the least squared error on samples that are left out."""
    best, found = np.inf, (WIDTHS[0], DAMPINGS[0])
    for width in WIDTHS:
        values, vectors = np.linalg.eigh(_kernel(points, points, width))
        turned = vectors.T @ targets
        for damping in DAMPINGS:
            inverse = 1.0 / (np.maximum(values, 0.0) + damping)
            residual = vectors @ (inverse * turned) / ((vectors**2) @ inverse)
            error = float((residual**2).mean())
            if error < best:
                best, found = error, (width, damping)
    return found
