"""`EarlyExit`: runs an exported model under a policy, with ONNX Runtime and NumPy alone."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import files
from swiftsure.certify.policy import Policy
from swiftsure.certify.slices import SlicedPolicy
from swiftsure.exits import exit_indices
from swiftsure.monitor import Monitor
from swiftsure.onnx.audit import Auditor
from swiftsure.onnx.executor import OnnxExecutor
from swiftsure.onnx.folder import CHECK, folder_policy
from swiftsure.onnx.results import ExitOutput, joined
from swiftsure.onnx.scoring import confidence, known_score
from swiftsure.onnx.stages import SHORT_NAMES, Answer, Stages
from swiftsure.onnx.trees import build
from swiftsure.run import PolicyBinding
from swiftsure.run.slices import BySlice, full_model_policy
from swiftsure.run.stages import ExitLoop
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
        thresholds = binding.exit_thresholds(stages.n_exits)
        binding.check_score(score)
        self.score = known_score("policy.score", policy.rule.score)
        if binding.dtype("float32") not in (None, "float32"):
            raise ValueError(f"`policy` was made for {policy.dtype}, but exports run in float32.")
        binding.check_model(self._fingerprint)
        self.executor = OnnxExecutor(stages, self.score, policy.temperatures)
        rule: Any = {"strict": policy.strict, "min_exit": policy.min_exit}
        self.loop = ExitLoop(self.executor, thresholds, **rule)
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
            arrays = self.stages.begin(batch)
            parts = self._by_slice.parts(slices, len(arrays[0]))
            found = []
            for own, rows in parts:
                part = build(self.stages.manifest.inputs, [array[rows] for array in arrays])
                found.append((rows, own._run(part)))
            return joined(found)
        if (slices is None) != (self._by_slice is None):
            raise ValueError("`slices` must be given under a policy of slices, and only there.")
        if self.auditor is None:
            return self._run(batch)
        audited: ExitOutput = self.auditor.run(self, batch, self._run, ids)
        return audited

    def _run(self, batch: Any) -> ExitOutput:
        found = self.executor.output(*self.loop.run(batch))
        _ = found.outputs  # raises now, as on a CPU with PyTorch
        return found

    def full_outputs(self, batch: Any) -> list[NDArray[Any]]:
        """Return the full model's arrays for a batch."""
        n = self.executor.size(batch)
        return self.executor.full(batch) if n else self.executor.nothing(batch)

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
            rest = chain([batch], waiting)
            if self.auditor is None:
                yield from Stream(self, size).ordered(rest)
            else:
                yield from self.auditor.follow(self, rest, Stream(self, size).ordered)

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
                confidence(self.score, answer, self.executor.temperatures[k], k)
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
        distances = np.abs(seen - np.asarray(self.loop.thresholds, np.float64))
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
