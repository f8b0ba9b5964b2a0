"""`EarlyExit`: runs an exported model under a policy, with ONNX Runtime and NumPy alone."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import files
from swiftsure.certify.policy import Policy
from swiftsure.certify.slices import SlicedPolicy
from swiftsure.exits import exit_indices, exits_in_use, reaches
from swiftsure.monitor import Monitor
from swiftsure.onnx.audit import Auditor
from swiftsure.onnx.folder import CHECK, folder_policy
from swiftsure.onnx.results import ExitOutput, Gathered, StreamResult, joined
from swiftsure.onnx.scoring import confidence, known_score, tempered, warn_of_probabilities
from swiftsure.onnx.stages import SHORT_NAMES, Answer, Stages, State
from swiftsure.onnx.trees import build
from swiftsure.run import PolicyBinding
from swiftsure.run.slices import BySlice, full_model_policy
from swiftsure.scores import LearnedScore

__all__ = ["EarlyExit", "differences"]

RTOL, ATOL = 1e-3, 1e-4
"""How far outputs may be from those of the PyTorch model."""

NEAR = 1e-5
"""Confidences this near to a threshold may fall on either side of it in another runtime."""


class EarlyExit:
    """Runs exported stages under a policy.

    At each exit that may fire, samples that are confident enough exit, and later stages run only
    on the remaining ones. Heads that no decision needs are not run. Batches are NumPy arrays, or
    anything that `numpy.asarray` accepts, in the form of the export's example.

    Parameters
    ----------
    stages : Stages
    policy : Policy or SlicedPolicy
        Made from a record of these stages, or for the PyTorch network that was exported, if the
        export was checked against it. A policy made from arrays is not bound to a model. With a
        policy of slices, give the slice of each sample: `fast(batch, slices=["de", "fr"])`.
    score : str, optional
        If given, must equal the policy's score.
    audit : float or Auditor, optional
        Share of requests that are also run in full, chosen at random; results then hold both
        answers as `audit`. A `Stream` that you create is not audited: use `run`.
    monitor : Monitor, optional
        Receives the audit losses. Must watch a consistency risk that the policy promises.

    Raises
    ------
    ValueError
        If the policy was made for another score, number of exits, model or dtype.

    Notes
    -----
    Several threads may share one instance.
    """

    def __init__(
        self,
        stages: Stages,
        policy: Policy | SlicedPolicy,
        *,
        score: str | LearnedScore | None = None,
        audit: float | Auditor | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        sliced: SlicedPolicy | None = None
        if isinstance(policy, SlicedPolicy):
            if audit is not None or monitor is not None:
                raise ValueError("`audit` and `monitor` need a Policy: watch each slice by itself.")
            sliced, policy = policy, full_model_policy(policy)
        binding = PolicyBinding(policy, "exits of a network", "swiftsure.onnx.collect")
        self.stages = stages
        self.policy = policy
        self._thresholds = binding.exit_thresholds(stages.n_exits)
        self._used = exits_in_use(self._thresholds, strict=policy.strict, min_exit=policy.min_exit)
        binding.check_score(score)
        self.score = known_score("policy.score", policy.rule.score)
        if binding.dtype("float32") not in (None, "float32"):
            raise ValueError(f"`policy` was made for {policy.dtype}, but exports run in float32.")
        binding.check_model(self._fingerprint)
        self._looked = False
        self.auditor = Auditor.of(audit, monitor, policy)
        own = partial(EarlyExit, stages)
        self._by_slice = None if sliced is None else BySlice(sliced, self, own)

    @classmethod
    def unbound(cls, stages: Stages, policy: Policy) -> "EarlyExit":
        """Return a runtime for a policy of the network that is being exported."""
        provenance = policy.certificate.provenance.model_copy(update={"model": None})
        certificate = policy.certificate.model_copy(update={"provenance": provenance})
        return cls(stages, policy.model_copy(update={"certificate": certificate}))

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        policy: Policy | SlicedPolicy | None = None,
        *,
        score: str | LearnedScore | None = None,
        providers: str | Sequence[str] | None = None,
        threads: int | None = None,
        audit: float | Auditor | None = None,
        monitor: Monitor | None = None,
    ) -> "EarlyExit":
        """Return the model in a folder that `export` wrote, after checking all its files.

        Parameters
        ----------
        folder : path
        policy : Policy, optional
            The folder's own by default.
        score : str, optional
            If given, must equal the policy's score.
        providers : str or several, optional
            "cpu", "cuda", "tensorrt", "openvino", or full names of execution providers, the
            preferred one first; those of `runtime.json` by default. With any but the CPU, or with
            another policy of the PyTorch network, the model first runs the export's samples and
            must give the same answers.
        threads : int, optional
            Threads within an operator; the number of cores by default.
        audit, monitor
            As in the constructor.

        Raises
        ------
        ValueError
            If a file is missing or damaged, the policy was made for another model, or a provider is
            not installed.
        """
        stages = Stages.load(folder, providers=providers, threads=threads)
        given = policy is not None
        if policy is None:
            policy = folder_policy(stages.folder)
        fast = cls(stages, policy, score=score, audit=audit, monitor=monitor)
        on_cpu = stages.providers == [SHORT_NAMES["cpu"]]
        if not on_cpu or (given and fast.bound_to_network):
            fast.check()
        return fast

    def _fingerprint(self) -> str:
        """Return the fingerprint that the policy should have, of the stages or of the network."""
        manifest = self.stages.manifest
        own = manifest.fingerprint(self.policy.temperatures)
        if self.policy.certificate.provenance.model == own or manifest.check is None:
            return own
        return manifest.network or own

    @property
    def bound_to_network(self) -> bool:
        """Whether the policy was made for the PyTorch network, not for these stages."""
        model = self.policy.certificate.provenance.model
        return model is not None and model == self.stages.manifest.network

    @property
    def last(self) -> int:
        """Index of the last exit, the full model's."""
        return self.stages.n_exits - 1

    def __call__(
        self,
        batch: Any,
        ids: Sequence[str] | None = None,
        slices: Sequence[Any] | None = None,
    ) -> ExitOutput:
        """Run a batch and return its results in the same order.

        Parameters
        ----------
        batch
        ids : list of str, optional
            Ids of the requests, for audits; new ones by default (`swiftsure.monitor.request_ids`).
        slices : sequence, optional
            The slice of each sample, under a policy of slices; unknown ones run the full model.
        """
        if self._by_slice is not None and slices is not None:
            state = self.stages.begin(batch)
            parts = self._by_slice.parts(slices, len(state[0]))
            return joined(
                [(rows, own._run_from(self.stages.select(state, rows))) for own, rows in parts]
            )
        if (slices is None) != (self._by_slice is None):
            raise ValueError("`slices` must be given under a policy of slices, and only there.")
        if self.auditor is None:
            return self._run(batch)
        audited: ExitOutput = self.auditor.run(self, batch, self._run, ids)
        return audited

    def _run(self, batch: Any) -> ExitOutput:
        return self._run_from(self.stages.begin(batch))

    def _run_from(self, state: State) -> ExitOutput:
        n, last = len(state[0]), self.last
        gathered = Gathered(n, self.stages.output)
        seen = np.full((n, last), np.nan, np.float32)
        if n == 0:
            gathered.arrays = self.stages.empty_output()
            return gathered.whole(seen)
        here = np.arange(n)
        for k in range(last):
            state = self.stages.advance(k, state)
            if not self.may_fire(k):
                continue
            left, stay, scores = self.part(k, self.stages.head(k, state), here)
            seen[here, k] = scores
            if left is None:
                continue
            gathered.put(left)
            if stay is None:
                break
            here, state = here[stay], self.stages.select(state, stay)
        else:
            gathered.put(self.finish(here, self.stages.advance(last, state)))
        found = gathered.whole(seen)
        _ = found.outputs  # raises now, as on a CPU with PyTorch
        return found

    def run(self, batches: Iterable[Any], batch_size: int | None = None) -> Iterator[ExitOutput]:
        """Run many batches and yield their results in order.

        On a CPU, where small batches are nearly as efficient, each batch runs by itself. With other
        providers, late stages run full batches gathered from several (see `Stream`).

        Parameters
        ----------
        batches : iterable
        batch_size : int, optional
            How many samples a stage gathers; the size of the first batch by default.
        """
        from swiftsure.onnx.stream import Stream

        if self._by_slice is not None:
            raise ValueError("`run` needs a Policy: under slices, call each batch with `slices`.")
        waiting = iter(batches)
        if self.stages.providers == [SHORT_NAMES["cpu"]]:
            yield from map(self, waiting)
            return
        for batch in waiting:
            size = batch_size or len(self.stages.begin(batch)[0])
            if size == 0:
                yield self(batch)
                continue
            rest = _chained(batch, waiting)
            if self.auditor is None:
                yield from Stream(self, size).ordered(rest)
            else:
                yield from self.auditor.follow(self, rest, Stream(self, size).ordered)

    def may_fire(self, exit_index: int) -> bool:
        """Return whether any confidence can make a sample exit here."""
        return exit_index in self._used

    def part(
        self, exit_index: int, answer: Answer, ids: NDArray[np.int64]
    ) -> tuple[StreamResult | None, NDArray[np.int64] | None, NDArray[np.float32]]:
        """Return (samples that exit or None, rows that stay or None, all confidences)."""
        scores = confidence(self.score, answer, self._temperature(exit_index), exit_index)
        if not self._looked and len(ids):
            self._looked = True
            warn_of_probabilities(self.score, answer)
        level = np.float32(self._thresholds[exit_index])
        staying = ~reaches(scores, level, strict=self.policy.strict)
        n_stay = int(staying.sum())
        if n_stay == len(scores):
            return None, None, scores
        result = partial(StreamResult, exit=exit_index, build=self.stages.output)
        if n_stay == 0:
            raw = tempered(answer.arrays, self._temperature(exit_index))
            return result(ids, raw, decided=scores), None, scores
        stay, gone = np.flatnonzero(staying), np.flatnonzero(~staying)
        arrays = [array[gone] for array in answer.arrays]
        raw = tempered(arrays, self._temperature(exit_index))
        return result(ids[gone], raw, decided=scores[gone]), stay, scores

    def finish(self, ids: NDArray[np.int64], state: State) -> StreamResult:
        """Return the last exit's answers, from the state at the last exit."""
        arrays = self.stages.head(self.last, state).arrays
        raw = tempered(arrays, self._temperature(self.last))
        return StreamResult(ids, raw, self.last, self.stages.output)

    def full_outputs(self, state: State) -> list[NDArray[Any]]:
        """Return the last exit's arrays for inputs that run in full."""
        if len(state[0]) == 0:
            return self.stages.empty_output()
        for k in range(self.stages.n_exits):
            state = self.stages.advance(k, state)
        return self.finish(np.arange(len(state[0])), state).raw

    def _temperature(self, exit_index: int) -> float:
        temperatures = self.policy.temperatures
        return 1.0 if temperatures is None else temperatures[exit_index]

    def check(self) -> float:
        """Run the export's samples again and return the largest difference between outputs.

        Raises
        ------
        ValueError
            If an output or an exit is not that of the PyTorch model; the error says where.
        """
        stages = self.stages
        if stages.manifest.check is None or CHECK not in stages.manifest.files:
            raise ValueError(f"{stages.folder} was not checked against a PyTorch model.")
        with files.npz(stages.folder / CHECK) as kept:
            n_inputs = sum(name.startswith("input_") for name in kept)
            inputs = [kept[f"input_{k}"] for k in range(n_inputs)]
            answers = [
                Answer(
                    [kept[f"output_{k}_{i}"] for i in range(len(stages.empty_output()))],
                    kept[f"confidence_{k}"] if stages.manifest.scored else None,
                )
                for k in range(stages.n_exits)
            ]
        batch = build(stages.manifest.inputs, inputs)
        largest = differences(stages, batch, [answer.arrays for answer in answers])
        seen = np.stack(
            [
                confidence(self.score, answer, self._temperature(k), k)
                for k, answer in enumerate(answers[:-1])
            ],
            axis=1,
        )
        rule = {"strict": self.policy.strict, "min_exit": self.policy.min_exit}
        expected = exit_indices(seen, self.policy.thresholds, **rule)  # type: ignore[arg-type]
        self.compare_exits(self._run(batch).exits, expected, seen)
        return largest

    def compare_exits(
        self, exits: NDArray[np.int64], expected: NDArray[np.int64], seen: NDArray[np.float32]
    ) -> int:
        """Return how many samples are too near to a threshold; raise if another's exit differs.

        Parameters
        ----------
        exits, expected : (n,)
        seen : (n, n_exits - 1)
            Confidences of the PyTorch model, which `expected` follows from; NaN if not computed.
        """
        distances = np.abs(seen - np.asarray(self._thresholds, np.float64))
        near = np.any(distances <= NEAR, axis=1)
        other = np.flatnonzero((exits != expected) & ~near)
        if len(other):
            sample = other[0]
            raise ValueError(
                f"Sample {sample} takes exit {exits[sample] + 1} in ONNX Runtime, but exit"
                f" {expected[sample] + 1} in PyTorch."
            )
        return int(near.sum())


def differences(stages: Stages, batch: Any, expected: Sequence[Sequence[NDArray[Any]]]) -> float:
    """Return the largest difference between outputs of all exits and those expected.

    Raises
    ------
    ValueError
        For the first exit and sample beyond the tolerance.
    """
    largest = 0.0
    state = stages.begin(batch)
    for k, arrays in enumerate(expected):
        state = stages.advance(k, state)
        for got, wanted in zip(stages.head(k, state).arrays, arrays, strict=True):
            if got.shape != wanted.shape:
                raise ValueError(
                    f"Exit {k + 1} returns shape {got.shape} in ONNX Runtime, but {wanted.shape} in"
                    " PyTorch."
                )
            one, two = got.astype(np.float64), wanted.astype(np.float64)
            near = np.isclose(one, two, rtol=RTOL, atol=ATOL, equal_nan=True)
            if not near.all():
                sample = int(np.argwhere(~near)[0][0])
                worst = np.abs(one - two).max()
                raise ValueError(
                    f"Exit {k + 1} gives another output in ONNX Runtime than in PyTorch for sample"
                    f" {sample} (largest difference {worst:.3g})."
                )
            finite = np.isfinite(one) & np.isfinite(two)
            if finite.any():
                largest = max(largest, float(np.abs(one - two)[finite].max()))
    return largest


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest
