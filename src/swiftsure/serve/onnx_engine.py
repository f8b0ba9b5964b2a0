"""`OnnxEngine`: an exported model as the engine of a server, without PyTorch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.certify.policy import Policy
from swiftsure.losses import LOSSES, PIXEL_LOSSES
from swiftsure.onnx.runtime import EarlyExit
from swiftsure.onnx.scoring import MODEL_SCORE, confidence
from swiftsure.onnx.stages import Answer as HeadAnswer
from swiftsure.onnx.trees import Form
from swiftsure.scores import probabilities
from swiftsure.serve.engine import Answer, Comparison, ExitCosts, InvalidRequestError
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

    def __init__(self, fast: EarlyExit) -> None:
        self.fast = fast
        manifest = fast.stages.manifest
        self.n_exits = manifest.n_exits
        flops = manifest.flops  # the full model alone also runs early heads, which are small
        self.costs = {"flops": ExitCosts(tuple(flops), flops[-1])} if flops else {}
        self.inputs = InputForm(_form(manifest.inputs))

    @classmethod
    def load(cls, folder: str | Path, threads: int | None = None) -> "OnnxEngine":
        """Return an engine for a folder from `swiftsure export`."""
        return cls(EarlyExit.load(folder, threads=threads))

    @property
    def policy(self) -> Policy:
        """The policy in use."""
        return self.fast.policy

    def check(self, policy: Policy) -> None:
        """Raise if a policy was made for another model."""
        self._with(policy)

    def check_loss(self, loss: str) -> None:
        """Raise if a loss cannot be computed without PyTorch, from class logits."""
        LOSSES.choose(loss).function("against_last")
        if loss in {each.name for each in PIXEL_LOSSES}:
            raise ValueError(
                f"`loss` {loss!r} of an exported model cannot be audited, since logit maps are"
                " compared at the size of their images: serve the PyTorch folder, or without"
                " audits (--audit 0)."
            )

    def install(self, policy: Policy) -> None:
        """Use another policy for the same stages."""
        self.fast = self._with(policy)

    def _with(self, policy: Policy) -> EarlyExit:
        fast = EarlyExit(self.fast.stages, policy, audit=self.fast.auditor)
        if fast.bound_to_network:
            fast.check()
        return fast

    def answer(self, samples: Sequence[Any], *, full: bool) -> list[Answer | InvalidRequestError]:
        """Return one answer per sample."""
        try:
            return list(self._full(samples) if full else self._early(samples))
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

    def _early(self, samples: Sequence[Any]) -> list[Answer]:
        out = self.fast(_batch(samples))
        last = self.n_exits - 1
        scores = self._last_scores(out.raw, len(samples))
        for row in np.flatnonzero(out.exits < last):
            scores[row] = float(out.decided[row])
        return _answers(out.build, out.raw, out.exits, scores)

    def _full(self, samples: Sequence[Any]) -> list[Answer]:
        stages = self.fast.stages
        state = stages.begin(_batch(samples))
        for k in range(self.n_exits):
            state = stages.advance(k, state)
        n = len(samples)
        found = self.fast.finish(np.arange(n), state)
        _ = found.outputs  # raises if one is not valid
        exits = np.full(n, self.n_exits - 1)
        return _answers(stages.output, found.raw, exits, self._last_scores(found.raw, n))

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
