"""`OnnxEngine`: an exported model as the engine of a server, without PyTorch."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from swiftsure.losses import LOSSES, PIXEL_LOSSES
from swiftsure.onnx.results import refuse_broken
from swiftsure.onnx.runtime import EarlyExit
from swiftsure.onnx.scoring import MODEL_SCORE, confidence
from swiftsure.onnx.stages import Answer as HeadAnswer
from swiftsure.onnx.trees import Form
from swiftsure.scores import probabilities
from swiftsure.serve.engine import (
    Answer,
    AnyPolicy,
    Comparison,
    Description,
    EngineOptions,
    ExitCosts,
    InvalidRequestError,
)
from swiftsure.serve.engines.by_slice import answer_by_slice, policies_of
from swiftsure.serve.inputs import InputForm, Leaf

__all__ = ["OnnxEngine"]


class OnnxEngine:
    """Answers requests with exported stages under their policy.

    Parameters
    ----------
    fast : EarlyExit
        Of `swiftsure.onnx`. Its inputs must be one array, or a dict of arrays.
    """

    lanes = 1
    policy: AnyPolicy

    def __init__(self, fast: EarlyExit, *, name: str = "model") -> None:
        self.fast, self.policy, self.name = fast, fast.policy, name
        self._runtimes: dict[str | None, EarlyExit] = {None: fast}
        manifest = fast.stages.manifest
        self.n_exits = manifest.n_exits
        flops = manifest.flops  # the full model alone also runs early heads, which are small
        self.costs = {"flops": ExitCosts(tuple(flops), flops[-1])} if flops else {}
        self.inputs = InputForm(_form(manifest.inputs))

    @classmethod
    def load(cls, folder: str | Path, options: EngineOptions | None = None) -> Self:
        """Return the engine of a folder from `swiftsure export`."""
        chosen = options or EngineOptions()
        chosen.refuse_unused("exported stages, which need no network", "providers", "threads")
        providers = chosen.providers or None
        fast = EarlyExit.load(folder, providers=providers, threads=chosen.threads)
        return cls(fast, name=Path(folder).name)

    def describe(self) -> Description:
        """Return what goes in and out."""
        outputs = {"outputs": {}, "prediction": {"type": "integer"}}
        return Description(self.name, self.inputs.schema(), outputs, self.inputs.example())

    def measure(self) -> None:
        """Time the exits and the full model, one request at a time."""
        stages, sample = self.fast.stages, self.inputs.zeros()
        best = np.full((2, self.n_exits), np.inf)
        for _ in range(7):
            state, spent = stages.begin(_batch([sample])), np.zeros((2, self.n_exits))
            for k in range(self.n_exits):
                start = time.perf_counter()
                state = stages.advance(k, state)
                middle = time.perf_counter()
                stages.head(k, state)
                spent[:, k] = middle - start, time.perf_counter() - middle
            best = np.minimum(best, spent)
        seconds, alone = np.cumsum(best.sum(axis=0)), best[0].sum() + best[1, -1]
        self.costs["seconds"] = ExitCosts(tuple(seconds.tolist()), float(alone))

    def check(self, policy: AnyPolicy) -> None:
        """Raise if a policy was made for another model."""
        self._runtimes_of(policy)

    def check_loss(self, loss: str) -> None:
        """Raise if a loss cannot be computed without PyTorch, from class logits."""
        LOSSES.choose(loss).function("against_last")
        if loss in {each.name for each in PIXEL_LOSSES}:
            raise ValueError(
                f"`loss` {loss!r} of an exported model cannot be audited, since logit maps are"
                " compared at the size of their images: serve the PyTorch folder, or without"
                " audits (--audit 0)."
            )

    def install(self, policy: AnyPolicy) -> None:
        """Use another policy for the same stages."""
        self._runtimes, self.policy = self._runtimes_of(policy), policy
        self.fast = next(iter(self._runtimes.values()))

    def _runtimes_of(self, policy: AnyPolicy) -> dict[str | None, EarlyExit]:
        """Return a runtime for each slice that a policy has."""
        found = {}
        for name, own in policies_of(policy).items():
            found[name] = EarlyExit(self.fast.stages, own, audit=self.fast.auditor)
            if found[name].bound_to_network:
                found[name].check()
        return found

    def answer(
        self, samples: Sequence[Any], *, full: bool, slices: Sequence[str | None] = ()
    ) -> list[Answer | InvalidRequestError]:
        """Return one answer per sample."""
        runtimes = {} if full else self._runtimes
        return answer_by_slice(samples, slices, runtimes, self._run)

    def _run(
        self, samples: Sequence[Any], fast: EarlyExit | None
    ) -> list[Answer | InvalidRequestError]:
        try:
            return list(self._full(samples) if fast is None else self._early(samples, fast))
        except ValueError as error:
            if len(samples) > 1:
                raise  # the batcher runs each sample alone
            text = " ".join(str(error).split())[:300]
            return [InvalidRequestError(f"The model cannot run on this input ({text}).")]

    def compare(self, sample: Any, answer: Answer, loss: str) -> Comparison:
        """Return how an answer compares with the full model's; for classifiers."""
        served = np.asarray(answer.output)
        full = served if answer.exit == self.n_exits - 1 else self._full([sample])[0].output
        if served.ndim != 1:
            raise ValueError("audits of exported models need class logits")
        both = np.stack([probabilities(served), probabilities(full)])
        lost = LOSSES.choose(loss).function("against_last")(both[None])[0, 0]
        return Comparison(float(lost), both[0].tolist(), both[1].tolist())

    def _early(self, samples: Sequence[Any], fast: EarlyExit) -> list[Answer]:
        out = fast(_batch(samples))
        last = self.n_exits - 1
        scores = self._last_scores(out.raw, len(samples))
        for row in np.flatnonzero(out.exits < last):
            scores[row] = float(out.decided[row])
        return _answers(out.build, out.raw, out.exits, scores)

    def _full(self, samples: Sequence[Any]) -> list[Answer]:
        n = len(samples)
        raw, exits = self.fast.full_outputs(_batch(samples)), np.full(n, self.n_exits - 1)
        refuse_broken(raw, exits, np.arange(n))
        return _answers(self.fast.stages.output, raw, exits, self._last_scores(raw, n))

    def _last_scores(self, raw: list[NDArray[Any]], n: int) -> list[float | None]:
        """Return the confidences of logits, which are those of the last exit where it was used."""
        score = self.fast.score
        named = isinstance(score, str) and score != MODEL_SCORE  # others know nothing of this exit
        if not named or len(raw) != 1 or raw[0].ndim != 2:
            return [None] * n
        return [float(each) for each in confidence(score, HeadAnswer(raw, None))]


def _answers(
    build: Any, raw: list[NDArray[Any]], exits: NDArray[np.int64], scores: list[float | None]
) -> list[Answer]:
    found = []
    classes = raw[0].argmax(axis=1) if len(raw) == 1 and raw[0].ndim == 2 else None
    for row, exit_ in enumerate(exits.tolist()):
        content: dict[str, Any] = {"outputs": _lists(build([array[row] for array in raw]))}
        if classes is not None:
            content["prediction"] = int(classes[row])
        output = raw[0][row] if len(raw) == 1 else [array[row] for array in raw]
        found.append(Answer(content, exit_, scores[row], output))
    return found


def _lists(tree: Any) -> Any:
    """Return nested arrays as lists, with null for what JSON cannot hold."""
    if isinstance(tree, np.ndarray):
        found = tree.astype(object)
        found[~np.isfinite(tree)] = None
        return found.tolist()
    if isinstance(tree, dict):
        return {key: _lists(value) for key, value in tree.items()}
    return [_lists(value) for value in tree] if isinstance(tree, tuple | list) else tree


def _batch(samples: Sequence[Any]) -> Any:
    if isinstance(samples[0], dict):
        return {name: np.stack([each[name] for each in samples]) for name in samples[0]}
    return np.stack(samples)


def _form(form: Form) -> Leaf | dict[str, Leaf]:
    if "dtype" in form:
        return tuple(form["shape"]), np.dtype(form["dtype"])
    if "dict" in form and all("dtype" in leaf for leaf in form["dict"].values()):
        return {
            name: (tuple(leaf["shape"]), np.dtype(leaf["dtype"]))
            for name, leaf in form["dict"].items()
        }
    raise ValueError("`fast` must take one array or a dict of arrays to be served over HTTP.")
