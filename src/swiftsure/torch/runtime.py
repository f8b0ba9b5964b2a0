"""`EarlyExit`: runs a staged model under a policy and skips stages that no sample needs."""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swiftsure._lib import checks
from swiftsure.certify.policy import Policy
from swiftsure.certify.slices import SlicedPolicy
from swiftsure.monitor import Monitor
from swiftsure.run import PolicyBinding
from swiftsure.run.graphs.conditional import can_branch
from swiftsure.run.graphs.precision import inference
from swiftsure.run.graphs.recorder import CaptureLimits
from swiftsure.run.slices import BySlice, full_model_policy
from swiftsure.run.stages import ExitLoop
from swiftsure.scores import LearnedScore
from swiftsure.torch.audit import Auditor
from swiftsure.torch.captured import Captures
from swiftsure.torch.executor import SegmentExecutor, TorchExecutor
from swiftsure.torch.fingerprinting import fingerprint
from swiftsure.torch.marking import run_marking
from swiftsure.torch.modes import model_device, refuse_training
from swiftsure.torch.replaying import ReplayedModel
from swiftsure.torch.results import ExitOutput, joined
from swiftsure.torch.scoring import MODEL_SCORE, known_score, warn_of_probabilities
from swiftsure.torch.staged import StagedModel, device_of, refuse_unstaged, rows_of
from swiftsure.torch.staged import batch_size as size_of

__all__ = ["EarlyExit"]


class EarlyExit(nn.Module):
    """Runs a staged model under a policy.

    At each exit that may fire, samples that are confident enough exit, and later stages run only
    on the remaining ones. Heads that no decision needs are not run.

    Parameters
    ----------
    model : StagedModel
        In evaluation mode.
    policy : Policy or SlicedPolicy
        Made for this model. A policy made from arrays is not bound to a model and is accepted. With
        a policy of slices, give the slice of each sample: `fast(batch, slices=["de", "fr"])`.
    score : str or LearnedScore, optional
        If given, must equal the policy's score. Use it to document in code what was certified.
    dtype : str, optional
        Autocast dtype ("bfloat16", "float16"); the policy's by default.
    compile : bool
        Compile each stage with torch.compile, for any batch size: a few graphs per stage.
    capture : bool or CaptureLimits
        Capture stages, heads and decisions as CUDA graphs, on first use for each batch size, so
        that small kernels are not bound by their launches; see `captures` for their number and
        memory. With `compile`, the compiled kernels are captured, for each stage and size at which
        they are faster than the plain ones. The model must not draw random
        numbers or wait for the device. On a CPU the same code runs without graphs.
    audit : float or Auditor, optional
        Fraction of requests, chosen at random, that the full model also answers; results then hold
        both answers as `audit`. A `Stream` that you create is not audited: use `run`.
    monitor : Monitor, optional
        Receives the audit losses. Must watch a consistency risk that the policy promises.
    on_invalid : {"raise", "mark"}
        What to do with a sample whose answer's logits are not finite, or on which the model raises
        an error. "raise": an `InvalidSampleError`, or the model's error. "mark": the sample is
        marked in the results' `invalid`, and all others are answered. A sample whose confidence is
        NaN never exits, so the full model answers it. A batch on
        which the model raises is then run again in halves, to find the samples; if it raises on
        every one of them, so does the call. A `Stream` raises a `StreamError` as always.

    Raises
    ------
    ValueError
        If the policy was made for another score, number of exits, model, temperatures or dtype, or
        if the model, or a part of it, is in training mode. Also if the monitor watches something
        that the policy does not promise, or if the policy was calibrated by groups; in that case
        add one mean per group yourself.

    Warns
    -----
    UserWarning
        Once, if an outer autocast asks for another dtype. The outer autocast is ignored.

    Notes
    -----
    On a GPU, each exit that may fire costs one host-device synchronisation, because the number of
    remaining samples sets the shapes of the next stage. With `capture`, `run` and calls with a
    single sample have none that the device would wait for. Several threads may share one instance.
    """

    def __init__(
        self,
        model: StagedModel,
        policy: Policy | SlicedPolicy,
        *,
        score: str | LearnedScore | None = None,
        dtype: str | None = None,
        compile: bool = False,  # noqa: A002 (what torch calls it)
        capture: bool | CaptureLimits = False,
        audit: float | Auditor | None = None,
        monitor: Monitor | None = None,
        on_invalid: str = "raise",
    ) -> None:
        super().__init__()
        sliced: SlicedPolicy | None = None
        if isinstance(policy, SlicedPolicy):
            if audit is not None or monitor is not None:
                raise ValueError("`audit` and `monitor` need a Policy: watch each slice by itself.")
            sliced, policy = policy, full_model_policy(policy)
        binding = PolicyBinding(policy, "exits of a network", "swiftsure.torch.collect")
        refuse_unstaged(model)
        refuse_training(model)
        self.model = model
        self.policy = policy
        self.auditor = Auditor.of(audit, monitor, policy)
        self.on_invalid = checks.choice("on_invalid", on_invalid, ["raise", "mark"])
        thresholds = binding.exit_thresholds(model.n_exits)
        binding.check_score(score)
        self.score = known_score("policy.score", policy.rule.score)
        self.dtype = binding.dtype(dtype)
        binding.check_model(self._fingerprint)
        self._binding = binding
        self._weights = _Weights(model)
        self._warned = self._looked = False
        # Cached: walking the modules of a deep model takes as long as some of its layers.
        self._submodules = list(model.modules()) if isinstance(model, nn.Module) else []
        segmented = compile and isinstance(model, ReplayedModel)
        make = _compiled_stage if compile and not segmented else partial
        stages = [make(model.advance, k) for k in range(model.n_exits)]
        self.executor = (SegmentExecutor if segmented else TorchExecutor)(self, stages)
        rule: Any = {"strict": policy.strict, "min_exit": policy.min_exit}
        self.loop = ExitLoop(self.executor, thresholds, **rule)
        self._settings: dict[str, Any] = {"compile": compile, "capture": capture}
        limits = capture if isinstance(capture, CaptureLimits) else None
        self.captures = Captures(self, limits, compile) if capture else None
        self.fastest: dict[int, str] = {}
        self._by_slice = None if sliced is None else BySlice(sliced, self, self.with_policy)

    def with_policy(self, policy: Policy | SlicedPolicy) -> "EarlyExit":
        """Return the same model with the same settings under another policy.

        Compiled stages are shared; graphs are captured again, since they hold decisions.
        """
        found = EarlyExit(
            self.model, policy, audit=self.auditor, on_invalid=self.on_invalid, **self._settings
        )
        found.executor.stages = self.executor.stages
        return found

    def save_pretrained(self, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Write the network, its heads and the policy to a folder of safetensors and JSON.

        With its tokenizer, `swiftsure serve` takes texts.
        """
        from swiftsure.torch import pretrained

        pretrained.save(self.model, folder, self.policy, tokenizer)

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], *, network: nn.Module | None = None, **settings: Any
    ) -> "EarlyExit":
        """Return a model from a folder, or from a repository of the Hugging Face Hub.

        Parameters
        ----------
        folder : path or name
        network : nn.Module, optional
            The network to load weights into, if it is not one of transformers.
        **settings
            As for the class.
        """
        from swiftsure.torch import pretrained

        model, policy = pretrained.load(folder, network=network)
        if policy is None:
            raise ValueError(f"`folder` must hold a policy, but {folder} has none.")
        return cls(model, policy, **settings)

    def push_to_hub(self, name: str, **settings: Any) -> str:
        """Upload the network, its heads and the policy to a repository of the Hugging Face Hub.

        Parameters
        ----------
        name : str
            The repository, "user/model".
        **settings
            As for `huggingface_hub.HfApi.upload_folder`.
        """
        from swiftsure.torch import pretrained

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return pretrained.push_to_hub(folder, name, **settings)

    def _fingerprint(self) -> str:
        if not isinstance(self.model, nn.Module):
            raise ValueError("`model` must be an nn.Module to be compared with the policy's.")
        policy = self.policy
        return fingerprint(self.model, temperatures=policy.temperatures, dtype=policy.dtype)

    @property
    def config(self) -> Any:
        """Configuration of a network of transformers."""
        return self.model.network.config  # type: ignore[attr-defined]

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return model_device(self.model) or torch.device("cpu")

    def can_generate(self) -> bool:
        """Return False, for pipelines of transformers."""
        return False

    def forward(
        self,
        batch: Any = None,
        ids: Sequence[str] | None = None,
        slices: Sequence[Any] | None = None,
        **inputs: Any,
    ) -> Any:
        """Run a batch and return its results in the same order, as an `ExitOutput`.

        Parameters
        ----------
        batch
        ids : list of str, optional
            Ids of the requests, for audits; new ones by default (`swiftsure.monitor.request_ids`).
        slices : sequence, optional
            The slice of each sample, under a policy of slices; unknown ones run the full model.
        **inputs
            Instead of `batch`, the arguments of a network of transformers. The result is then a
            `SequenceClassifierOutput`, so that `pipeline(model=fast)` works.
        """
        if inputs:
            from transformers.modeling_outputs import SequenceClassifierOutput

            out = self(inputs if batch is None else {"input_ids": batch, **inputs}, ids, slices)
            return SequenceClassifierOutput(logits=out.outputs)
        if self._by_slice is not None and slices is not None:
            return self._run_slices(self._by_slice, batch, slices)
        if (slices is None) != (self._by_slice is None):
            raise ValueError("`slices` must be given under a policy of slices, and only there.")
        with self.context(batch):
            if self.auditor is None:
                return self._run(batch)
            return self.auditor.run(self, batch, self._run, ids)

    def _run_slices(
        self, by_slice: "BySlice[EarlyExit]", batch: Any, slices: Sequence[Any]
    ) -> ExitOutput:
        found = []
        for runtime, rows in by_slice.parts(slices, size_of(batch)):
            index = torch.from_numpy(rows).to(device_of(batch))
            part = rows_of(batch, index)
            with runtime.context(part):
                found.append((index, runtime._run(part)))
        return joined(found)

    def run(self, batches: Iterable[Any], batch_size: int | None = None) -> Iterator[ExitOutput]:
        """Run many batches and yield their results in order, in the way that suits the device.

        If `measure` has timed the ways for this batch size, the fastest is used, which may be the
        full model. Otherwise: on a GPU or with `capture`, late stages run full batches gathered
        from several (see `Stream`). Each batch runs by itself on a CPU, where small batches are
        nearly as efficient, and if it is a single sample of captured stages.

        Parameters
        ----------
        batches : iterable
        batch_size : int, optional
            How many samples a stage gathers on a GPU; the size of the first batch by default.
        """
        if self._by_slice is not None:
            raise ValueError("`run` needs a Policy: under slices, call each batch with `slices`.")
        waiting = iter(batches)
        for batch in waiting:
            n = size_of(batch)
            way = self.fastest.get(batch_size or n) or self._usual_way(batch)
            if way == "single" or n == 0:
                yield self(batch)
                continue
            together = self.way(way, batch_size or n)
            rest = chain([batch], waiting)
            if self.auditor is None:
                yield from together(rest)
            else:
                yield from self.auditor.follow(self, rest, together)

    def way(self, name: str, batch_size: int) -> Callable[[Iterable[Any]], Iterator[ExitOutput]]:
        """Return a way to run batches: "single", "stream" or, if captured, "full"."""
        from swiftsure.torch.stream import Stream

        if name == "single":
            return partial(map, self)
        if name == "full":
            return Stream(self, batch_size, full=True).ordered
        return Stream(self, batch_size).ordered

    def _usual_way(self, batch: Any) -> str:
        if self.captures is None:
            return "single" if device_of(batch).type == "cpu" else "stream"
        return "single" if size_of(batch) == 1 and can_branch() else "stream"

    @contextmanager
    def context(self, batch: Any) -> Iterator[None]:
        """Disable gradients and set the policy's dtype, after checking mode and device."""
        if self.captures is None:
            self.check_mode()
        device = device_of(batch)
        expected = self._weights.device
        if expected not in (None, device) and not _has_parameter_on(self.model, device):
            raise ValueError(
                f"`batch` is on {device}, but the model is on {expected}: move one of them."
            )
        self._warn_of_autocast(device)
        with inference(device, self.dtype):
            yield

    def check_mode(self) -> None:
        """Raise if the model is in training mode, or no longer the one that the policy is for."""
        if any(map(_training, self._submodules)):
            refuse_training(self.model)
        self.check_weights()

    def check_weights(self) -> None:
        """Compare the model with the policy again if its weights have changed since the last check.

        Notices changes that PyTorch counts: `load_state_dict`, in-place operations, and replaced
        parameters, buffers or modules. It does not notice writes through `.data`, or changes of
        tensors that were made in inference mode.
        """
        if self._weights.changed():
            self._binding.check_model(self._fingerprint)
            self._weights = _Weights(self.model)
            if isinstance(self.executor, SegmentExecutor):
                self.executor.forget()

    def _warn_of_autocast(self, device: torch.device) -> None:
        """Warn once if an outer autocast asks for a dtype other than the policy's."""
        if self._warned or not torch.is_autocast_enabled(device.type):
            return
        outer = str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
        if outer != (self.dtype or "float32"):
            self._warned = True
            warnings.warn(
                f"Autocast to {outer} is ignored: the policy was made for"
                f" {self.dtype or 'float32'}. For {outer}, collect with dtype={outer!r} and"
                " calibrate again.",
                UserWarning,
                stacklevel=4,
            )

    def check_first_outputs(self, raw: Any) -> None:
        """Warn, at the first outputs, if they are probabilities where they should be logits."""
        if self._looked or not isinstance(raw, Tensor) or not len(raw):
            return
        self._looked = True
        if self.score != MODEL_SCORE:
            warn_of_probabilities(raw, stacklevel=6)

    def full_outputs(self, batch: Any) -> Any:
        """Return the full model's outputs; call it in `context`."""
        return self.executor.full(batch)

    def _run(self, batch: Any) -> ExitOutput:
        if self.on_invalid == "raise":
            found = self._run_whole(batch)
        else:
            found = run_marking(self._run_whole, batch)
        if not self._looked:
            self.check_first_outputs(found.raw)
        return found

    def _run_whole(self, batch: Any) -> ExitOutput:
        if self.captures is None or size_of(batch) == 0:
            return self.run_eager(batch)
        return self.captures.call(batch)

    def run_eager(self, batch: Any) -> ExitOutput:
        """Run a batch without graphs."""
        found = self.executor.output(*self.loop.run(batch), self.on_invalid)
        if self.on_invalid == "raise" and found.exits.device.type == "cpu":
            _ = found.outputs  # checked now: nothing to wait for on a CPU
        return found


class _Weights:
    """The modules, parameters and buffers of a model, and how often each tensor was changed."""

    def __init__(self, model: Any) -> None:
        parts = list(model.modules()) if isinstance(model, nn.Module) else []
        self._parameters = [part._parameters for part in parts if part._parameters]
        self._tables: list[dict[str, Any]] = [part._modules for part in parts if part._modules]
        self._tables += self._parameters
        self._named: list[tuple[dict[str, Any], str]] = []
        for part in parts:
            # Buffers that are not saved with the model are run-time state.
            names = [each for each in part._buffers if each not in part._non_persistent_buffers_set]
            if names and len(names) == len(part._buffers):
                self._tables.append(part._buffers)
            else:
                self._named += [(part._buffers, name) for name in names]
        self._parts = self._ids()
        self._tracked = [each for each in self._tensors() if not each.is_inference()]
        self._versions = list(map(_version, self._tracked))

    @property
    def device(self) -> torch.device | None:
        """Device of the first parameter; None without any."""
        values = chain.from_iterable(table.values() for table in self._parameters)
        return next((each.device for each in values if each is not None), None)

    def changed(self) -> bool:
        """Return whether a part was replaced, or a tensor changed in place."""
        return self._ids() != self._parts or list(map(_version, self._tracked)) != self._versions

    def _ids(self) -> list[int]:
        # As few steps of the interpreter as possible: this runs before every batch.
        found = map(id, chain.from_iterable(map(_values, self._tables)))
        return [*found, *(id(table.get(name)) for table, name in self._named)]

    def _tensors(self) -> list[Tensor]:
        values = chain.from_iterable(map(_values, self._tables))
        named = (table.get(name) for table, name in self._named)
        return [each for each in chain(values, named) if isinstance(each, Tensor)]


_values: Callable[[dict[str, Any]], Iterable[Any]] = dict.values
_version = attrgetter("_version")
_training = attrgetter("training")


def _compiled_stage(advance: Callable[[int, Any], Any], exit_index: int) -> Callable[[Any], Any]:
    """Compile one stage for any batch size: at most one graph each for 0, 1 and more samples."""

    def stage(state: Any) -> Any:
        return advance(exit_index, state)

    # PyTorch limits the number of graphs per code object, so each stage gets its own.
    stage.__code__ = stage.__code__.replace(co_name=f"stage_{exit_index + 1}")
    compiled = torch.compile(stage, dynamic=False)

    def run(state: Any) -> Any:
        # Only the batch axis is dynamic: dynamic image sizes give slower graphs, or none at all.
        for leaf in pytree.tree_leaves(state):
            if isinstance(leaf, Tensor) and leaf.ndim > 0:
                torch._dynamo.maybe_mark_dynamic(leaf, 0)
        return compiled(state)

    return run


def _has_parameter_on(model: Any, device: torch.device) -> bool:
    """Return whether a model spread over several devices has a parameter on this one."""
    return any(parameter.device == device for parameter in model.parameters())
