"""`TorchEngine`: an `EarlyExit` as the engine of a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure.losses import LOSSES
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
from swiftsure.serve.engines.tokens import TokenInputs
from swiftsure.serve.inputs import InputForm
from swiftsure.torch import EarlyExit, pretrained
from swiftsure.torch.audit import Audit
from swiftsure.torch.costs import exit_and_full_flops, exit_seconds, full_seconds
from swiftsure.torch.modes import model_device
from swiftsure.torch.results import ExitOutput, broken_rows
from swiftsure.torch.scoring import confidence

__all__ = ["TorchEngine"]


class TorchEngine:
    """Answers requests with a staged PyTorch model under its policy.

    Parameters
    ----------
    fast : EarlyExit
        With `on_invalid="mark"`.
    example
        A batch of the form that the model takes: a tensor, or a dict of tensors. Real numbers must
        have its shape; whole numbers, such as tokens, only the same number of axes. By default,
        the one with which `attach_heads` was called.
    tokenizer : optional
        Of a network that reads tokens: requests may then be texts.
    """

    lanes = 1
    policy: AnyPolicy

    def __init__(
        self,
        fast: EarlyExit,
        example: Any = None,
        tokenizer: Any = None,
        *,
        name: str | None = None,
    ) -> None:
        if fast.on_invalid != "mark":
            raise ValueError('`fast` must be an EarlyExit with on_invalid="mark".')
        self.fast, self.policy = fast, fast.policy
        self._runtimes: dict[str | None, EarlyExit] = {None: fast}
        self.name = name or type(fast.model).__name__
        self.n_exits = fast.model.n_exits
        config = getattr(getattr(fast.model, "network", None), "config", None)
        self._classes: dict[int, str] = getattr(config, "id2label", None) or {}
        if example is None:
            if not getattr(fast.model, "attached", None):
                raise TypeError("an EarlyExit needs an example batch beside it.")
            example = pretrained.example_batch(fast.model)
        form = pytree.tree_map(
            lambda leaf: (tuple(leaf.shape[1:]), _numpy_dtype(leaf.dtype)), example
        )
        self.inputs: InputForm | TokenInputs = InputForm(form)
        if tokenizer is not None:
            longest = getattr(config, "max_position_embeddings", None)
            self.inputs = TokenInputs(InputForm(form), tokenizer, longest)
        self._device = model_device(fast.model) or torch.device("cpu")
        self._one = pytree.tree_map(lambda leaf: leaf[:1].to(self._device), example)
        with fast.context(self._one):
            flops, full = exit_and_full_flops(fast.model, self._one)
        self.costs = {"flops": ExitCosts(tuple(flops.tolist()), full)}

    @classmethod
    def load(cls, folder: str | Path, options: EngineOptions | None = None) -> Self:
        """Return the engine of a folder from `EarlyExit.save_pretrained`."""
        chosen = options or EngineOptions()
        chosen.refuse_unused(
            "a PyTorch model", "network", "device", "compile", "capture", "threads"
        )
        network = None if chosen.network is None else chosen.network()
        model, policy = pretrained.load(folder, network=network)
        if policy is None:
            raise ValueError(f"`folder` must hold a policy, but {folder} has none.")
        fast = EarlyExit(
            model.to(chosen.device),
            policy,
            on_invalid="mark",
            compile=chosen.compile,
            capture=chosen.capture,
        )
        tokenizer = pretrained.tokenizer_of(folder)
        return cls(fast, tokenizer=tokenizer, name=Path(folder).resolve().name)

    def describe(self) -> Description:
        """Return what goes in and out."""
        outputs: dict[str, Any] = {"outputs": {}, "prediction": {"type": "integer"}}
        if self._classes:
            outputs["label"] = {"type": "string"}
        texts = isinstance(self.inputs, TokenInputs)
        example = "A text" if texts else self.inputs.example()  # type: ignore[union-attr]
        return Description(self.name, self.inputs.schema(), outputs, example, arrays=not texts)

    def measure(self) -> None:
        """Time the exits and the full model, one request at a time."""
        model = self.fast.model
        with self.fast.context(self._one):
            seconds = exit_seconds(model, self._one, repeats=5, score=self.fast.score)
            full = full_seconds(model, self._one, repeats=5)
        self.costs["seconds"] = ExitCosts(tuple(seconds.tolist()), full)

    def check(self, policy: AnyPolicy) -> None:
        """Raise if a policy was made for another network."""
        self._runtimes_of(policy)

    def check_loss(self, loss: str) -> None:
        """Raise if a loss cannot be computed from tensors."""
        LOSSES.choose(loss).function("tensors.against_last")

    def install(self, policy: AnyPolicy) -> None:
        """Use another policy for the same network."""
        self._runtimes, self.policy = self._runtimes_of(policy), policy
        self.fast = next(iter(self._runtimes.values()))

    def _runtimes_of(self, policy: AnyPolicy) -> dict[str | None, EarlyExit]:
        """Return a runtime for each slice that a policy has; all share compiled stages."""
        return {name: self.fast.with_policy(own) for name, own in policies_of(policy).items()}

    def answer(
        self, samples: Sequence[Any], *, full: bool, slices: Sequence[str | None] = ()
    ) -> list[Answer | InvalidRequestError]:
        """Return one answer per sample, in separate batches by slice and by shape."""
        runtimes = {} if full else self._runtimes
        return answer_by_slice(samples, slices, runtimes, self._by_shape)

    def _by_shape(
        self, samples: Sequence[Any], fast: EarlyExit | None
    ) -> list[Answer | InvalidRequestError]:
        groups: dict[Any, list[int]] = {}
        if isinstance(self.inputs, TokenInputs):
            samples = [self.inputs.padded(sample) for sample in samples]
        for k, sample in enumerate(samples):
            shapes = tuple(leaf.shape for leaf in pytree.tree_leaves(sample))
            groups.setdefault(shapes, []).append(k)
        answers: dict[int, Answer | InvalidRequestError] = {}
        for rows in groups.values():
            batch = self._batch([samples[k] for k in rows])
            answers.update(zip(rows, self._run(batch, len(rows), fast), strict=True))
        return [answers[k] for k in range(len(samples))]

    def compare(self, sample: Any, answer: Answer, loss: str) -> Comparison:
        """Return how an answer compares with the full model's."""
        if isinstance(self.inputs, TokenInputs):
            sample = self.inputs.padded(sample)
        batch = self._batch([sample])
        served = full = pytree.tree_map_only(np.ndarray, torch.from_numpy, answer.output)
        if answer.exit < self.n_exits - 1:
            with self.fast.context(batch):
                full = pytree.tree_map_only(Tensor, _on_host, self.fast.full_outputs(batch))
            broken = broken_rows(full)
            if broken is not None and broken.any():
                raise ValueError("the full model's answer is not finite")
        one, images = torch.zeros(1, dtype=torch.long), pytree.tree_leaves(batch)[0]
        size = tuple(images.shape[-2:]) if images.ndim == 4 else None
        audit = Audit(("",), one, one, served, full, size=size)
        lost = float(audit.losses("consistency", loss)[0])
        if not isinstance(served, Tensor) or served.ndim != 2:
            return Comparison(lost)
        both = (probabilities(each[0].numpy()).tolist() for each in (served, full))
        return Comparison(lost, *both)

    def _batch(self, samples: list[Any]) -> Any:
        return pytree.tree_map(
            lambda *leaves: torch.from_numpy(np.stack(leaves)).to(self._device), *samples
        )

    def _run(
        self, batch: Any, n: int, fast: EarlyExit | None
    ) -> list[Answer | InvalidRequestError]:
        try:
            if fast is not None:
                return self._answers(fast(batch))
            with self.fast.context(batch):
                output = self.fast.full_outputs(batch)
                last = torch.full((n,), self.n_exits - 1)
                return self._answers(
                    ExitOutput(output, last, None, torch.zeros(n), on_invalid="mark")
                )
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except (IndexError, ValueError, RuntimeError) as error:
            if n > 1:
                raise  # the batcher runs each sample alone
            return [InvalidRequestError(f"The model cannot run on this input ({_line(error)}).")]

    def _answers(self, out: ExitOutput) -> list[Answer | InvalidRequestError]:
        output, last = out.outputs, self.n_exits - 1
        bad, exits = out.invalid.tolist(), out.exits.tolist()
        scores: list[float | None] = [None] * len(exits)
        logits = output.float() if isinstance(output, Tensor) and output.ndim == 2 else None
        ends = None
        named = isinstance(self.fast.score, str) and self.fast.score != "model"
        if logits is not None and last in exits and named:  # others know nothing of this exit
            ends = confidence(self.fast.score, logits).tolist()
        for row, exit_ in enumerate(exits):
            if exit_ < last and out.confidences is not None and exit_ >= 0:
                scores[row] = float(out.confidences[row, exit_])
            elif ends is not None:
                scores[row] = ends[row]
        answers: list[Answer | InvalidRequestError] = []
        leaves, spec = pytree.tree_flatten(output)
        plain = [_plain(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        classes = None if logits is None else logits.argmax(dim=1).tolist()
        tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        arrays = [_on_host(leaf).numpy() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for row, exit_ in enumerate(exits):
            if bad[row]:
                why = out.failures.get(row, "its output is NaN or infinite")
                answers.append(InvalidRequestError(f"The model cannot run on this input ({why})."))
                continue
            shown = [
                each[row] if tensor else each for each, tensor in zip(plain, tensors, strict=True)
            ]
            content: dict[str, Any] = {"outputs": pytree.tree_unflatten(shown, spec)}
            if classes is not None:
                content["prediction"] = classes[row]
                if classes[row] in self._classes:
                    content["label"] = self._classes[classes[row]]
            own = [
                leaf[row : row + 1] if tensor else leaf
                for leaf, tensor in zip(arrays, tensors, strict=True)
            ]
            answers.append(Answer(content, exit_, scores[row], pytree.tree_unflatten(own, spec)))
        return answers


def _plain(values: Tensor) -> Any:
    """Return a tensor as nested lists, with null for what JSON cannot hold."""
    array = values.double().cpu().numpy()
    finite = np.isfinite(array)
    if finite.all():
        return array.tolist()
    objects = array.astype(object)
    objects[~finite] = None
    return objects.tolist()


def _on_host(values: Tensor) -> Tensor:
    """Return a tensor that NumPy can read."""
    return (values.float() if values.dtype == torch.bfloat16 else values).cpu()


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.zeros(0, dtype=dtype).numpy().dtype


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
