"""Attach exit heads to named modules of any network."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swiftsure._lib import checks
from swiftsure.torch.batches import register_batch_types, without_labels
from swiftsure.torch.cutting import CutModel, NotTraceableError, cut
from swiftsure.torch.modes import evaluating, uncompiled
from swiftsure.torch.module_calls import is_cache, suggestion
from swiftsure.torch.replaying import (
    FeatureHead,
    Features,
    ReplayedModel,
    Replayer,
    TailHead,
    apply_head,
)
from swiftsure.torch.staged import Scored, plain_output
from swiftsure.torch.tasks import TASKS, Task

__all__ = ["PooledHead", "attach_heads"]

KINDS = ("linear", "mlp", "copy")


# ------------------------------------------------------------------------------------------ heads


class PooledHead(FeatureHead):
    """Mean over positions, layer normalisation, and a linear layer.

    Takes feature maps (n, channels, height, width), tokens (n, tokens, width) or vectors
    (n, width). The mean leaves out padded tokens.
    """

    def __init__(self, width: int, n_outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear: nn.Module = nn.Linear(width, n_outputs)

    def forward(self, features: Tensor | Features) -> Tensor:
        """Return outputs, (n, n_outputs)."""
        return self.of_pooled(self.pooled(features))

    def pooled(self, features: Tensor | Features) -> Tensor:
        """Return the mean over positions, (n, width)."""
        if isinstance(features, Features):
            return self.pool(features.hidden, features.mask)
        return self.pool(features, None)

    def of_pooled(self, pooled: Tensor) -> Tensor:
        """Return outputs, (n, n_outputs), from what `pooled` returned."""
        outputs: Tensor = self.linear(self.norm(pooled))
        return outputs

    def pool(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return the mean over positions."""
        if hidden.ndim == 2:
            return hidden
        if hidden.ndim == 4:
            return hidden.mean(dim=(2, 3))
        if mask is None or mask.shape != hidden.shape[:2]:
            return hidden.mean(dim=1)
        weights = mask.to(hidden.dtype)
        return (weights[:, None] @ hidden)[:, 0] / weights.sum(dim=1, keepdim=True).clamp(min=1)


class TokenHead(PooledHead):
    """Layer normalisation and a linear layer on every token, (n, tokens, n_outputs)."""

    def pool(self, hidden: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return the tokens as they are."""
        return hidden


class RatedHead(FeatureHead):
    """A head, and a small one beside it that learns how well its output agrees with the last."""

    def __init__(self, head: nn.Module, width: int) -> None:
        super().__init__()
        self.head = head
        self.rating = PooledHead(width, 1)

    def forward(self, features: Features) -> Scored:
        """Return the output with the predicted agreement as its confidence."""
        output = plain_output(apply_head(self.head, features))
        return Scored(output, self.rating(features)[:, 0].sigmoid())


# --------------------------------------------------------------------------------------- attaching


@dataclass(frozen=True)
class Result:
    """Takes the answer out of what a network returns.

    Parameters
    ----------
    fields : tuple of str
        Names of the fields; several are stacked on the last axis. Empty for a network that returns
        the answer itself.
    """

    fields: tuple[str, ...] = ()

    def __call__(self, returned: Any) -> Tensor:
        """Return the answer."""
        if not self.fields:
            answer: Tensor = returned
            return answer
        parts = [returned[name] for name in self.fields]
        return parts[0] if len(parts) == 1 else torch.stack(parts, dim=-1)

    @classmethod
    def of(cls, returned: Any, output: str | Sequence[str] | None) -> "Result":
        """Find the answer in what a network returned: its logits, or what it has instead."""
        if output is not None:
            fields = (output,) if isinstance(output, str) else tuple(output)
            if not isinstance(returned, Mapping):
                raise ValueError(
                    f"`output` must be None for a network that returns {type(returned).__name__}."
                )
            for name in fields:
                checks.choice("output", name, list(returned))
            return cls(fields)
        if isinstance(returned, Tensor):
            return cls()
        if isinstance(returned, Mapping):
            for fields in FIELDS:
                if all(isinstance(returned.get(name), Tensor) for name in fields):
                    return cls(fields)
        raise ValueError(
            "`model` must return a tensor, or fields of which `output` names one, but returns"
            f" {type(returned).__name__}."
        )


FIELDS = (
    ("logits",),
    ("start_logits", "end_logits"),
    ("image_embeds",),
    ("text_embeds",),
    ("pooler_output",),
    ("last_hidden_state",),
)
"""Where transformers' networks put their answers, the first that they have."""


def attach_heads(
    model: nn.Module,
    at: Sequence[str],
    example: Any,
    *,
    heads: str | Sequence[nn.Module] = "linear",
    task: str | None = None,
    output: str | Sequence[str] | None = None,
) -> CutModel | ReplayedModel:
    """Return a network as a staged model, with an untrained head after each named module.

    The network is not changed: its weights are shared, and its own output is the last exit. The
    result is in its train or eval mode. Put other modules into the network before, not after.

    Parameters
    ----------
    model : nn.Module
        Any network, such as a classifier of transformers.
    at : names of submodules
        In the order in which they run, each run once: "bert.encoder.layer.3".
    example : tensor, tuple or dict
        A small batch as the network takes it, to find out what runs; a tokenizer's will do.
    heads : {"linear", "mlp", "copy"} or one module per cut
        A linear layer or an MLP on the mean over positions; a copy of the modules after the blocks,
        such as the pooler and the classifier; or modules that map hidden states to outputs.
    task : {"classification", "tokens", "answers", "embedding", "regression"}, optional
        What the output is; found from its shape and the network's configuration.
    output : str or several, optional
        The field of a Hugging Face output that is the answer; its logits by default.

    Raises
    ------
    ValueError
        If the network cannot be cut there; the message says where it can.

    Examples
    --------
    >>> network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    >>> model = attach_heads(network, at=["1"], example=torch.zeros(2, 3, 8, 8))
    >>> [tuple(output.shape) for output in model.eval()(torch.zeros(2, 3, 8, 8))]
    [(2, 10), (2, 10)]
    """
    register_batch_types()
    _check_names(model, at)
    if isinstance(heads, str):
        checks.choice("heads", heads, KINDS)
    elif len(heads) != len(at):
        raise ValueError(f"`heads` must have one module per cut, {len(at)}, but got {len(heads)}.")
    inputs = without_labels(example)
    _refuse_caches(inputs)
    with uncompiled(model):
        return _attach(model, at, inputs, heads, task, output)


def _attach(
    model: nn.Module,
    at: Sequence[str],
    inputs: Any,
    heads: str | Sequence[nn.Module],
    task: str | None,
    output: str | Sequence[str] | None,
) -> CutModel | ReplayedModel:
    features: dict[str, Any] = {}
    returned = _run_with_hooks(model, at, inputs, features)
    result = Result.of(returned, output)
    answer = result(returned)
    chosen = TASKS.choose(task or _guess_task(model, answer, result))
    if answer.ndim < 2:
        raise ValueError(
            f"`model` must return logits of shape (n, n_classes), but got {tuple(answer.shape)}."
        )
    attached = {
        "at": list(at),
        "heads": heads if isinstance(heads, str) else "custom",
        "task": chosen.name,
        "output": list(result.fields),
        "example": _form(inputs),
    }
    made: list[nn.Module] = []
    if heads != "copy":
        made = _made_heads(model, heads, at, features, answer, chosen)
        if isinstance(inputs, Tensor) and not result.fields and task in (None, "classification"):
            with suppress(NotTraceableError):
                traced = cut(model, at, made)
                traced.attached = attached
                return traced
    replayer = Replayer(model, at, inputs, result, tails=heads == "copy")
    if heads == "copy":
        made = [TailHead(replayer, k) for k in range(len(at))]
    if chosen.learned:
        made = [
            RatedHead(head, _width(features[name])).to(answer.device)
            for name, head in zip(at, made, strict=True)
        ]
    staged = ReplayedModel(replayer, [head.train(model.training) for head in made], chosen)
    staged.attached = attached
    _compare(staged, inputs, answer)
    return staged


def _check_names(model: nn.Module, at: Sequence[str]) -> None:
    if isinstance(at, str) or not at:
        raise ValueError(f"`at` must name at least one submodule in a list. {suggestion(model)}")
    names = dict(model.named_modules())
    for name in at:
        if name not in names:
            try:
                checks.choice("at", name, names)
            except ValueError as error:
                raise ValueError(f"{error} {suggestion(model)}") from None


def _refuse_caches(inputs: Any) -> None:
    """Raise for a cache of keys and values, which every run of a network would make longer."""
    for name, value in inputs.items() if isinstance(inputs, Mapping) else ():
        if is_cache(value):
            raise ValueError(
                f"`example` must hold tensors, but {name!r} is a {type(value).__name__}, which"
                " changes while the network runs: wrap the network in a module that takes its keys"
                " and values as tensors, samples first, and makes the cache in its `forward`."
            )


def _run_with_hooks(
    model: nn.Module, at: Sequence[str], inputs: Any, features: dict[str, Any]
) -> Any:
    """Return what the network returns, and keep the outputs of named modules."""
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: features.update({name: output})
        )
        for name in at
    ]
    try:
        with evaluating(model), torch.no_grad():
            if isinstance(inputs, Mapping):
                returned = model(**inputs)
            elif isinstance(inputs, tuple | list):
                returned = model(*inputs)
            else:
                returned = model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    missing = [name for name in at if name not in features]
    if missing:
        raise ValueError(
            "`at` must name layers that the network runs, but it does not run"
            f" {', '.join(missing)}. {suggestion(model)}"
        )
    return returned


def _guess_task(model: nn.Module, answer: Tensor, result: Result) -> str:
    if result.fields == ("start_logits", "end_logits"):
        return "answers"
    if result.fields not in ((), ("logits",)):
        return "embedding"
    config = getattr(model, "config", None)
    numbers = getattr(config, "problem_type", None) == "regression"
    if answer.ndim == 2:
        return "regression" if numbers or answer.shape[1] == 1 else "classification"
    return "tokens" if answer.ndim == 3 and result.fields else "classification"


def _made_heads(
    model: nn.Module,
    heads: str | Sequence[nn.Module],
    at: Sequence[str],
    features: dict[str, Any],
    answer: Tensor,
    task: Task,
) -> list[nn.Module]:
    """Return the heads, in the network's mode, and new ones with its device and dtype."""
    if not isinstance(heads, str):
        return list(heads)
    if answer.ndim != (3 if task.per_token else 2):
        raise ValueError(
            f"`model` must return logits of shape (n, n_classes), but got {tuple(answer.shape)}:"
            " give its `task`, use heads='copy', or pass one module per cut."
        )
    made: list[nn.Module] = []
    for name in at:
        width = _width(features[name], name)
        hidden = _hidden(features[name])
        if task.per_token and hidden.shape[:-1] != answer.shape[:2]:
            raise ValueError(
                f"`at` must name layers with the tokens of the output, {tuple(answer.shape[:2])},"
                f" but {name!r} returns a tensor of shape {tuple(hidden.shape)}."
            )
        head = (TokenHead if task.per_token else PooledHead)(width, answer.shape[-1])
        if heads == "mlp":
            head.linear = nn.Sequential(nn.Linear(width, width), nn.GELU(), head.linear)
        made.append(head.to(hidden.device, hidden.dtype).train(model.training))
    return made


def _hidden(features: Any) -> Any:
    """Return the first tensor of a module's output, dense; None if there is none."""
    found = (leaf for leaf in pytree.tree_leaves(features) if isinstance(leaf, Tensor))
    hidden = next(found, None)
    return hidden.to_padded_tensor(0.0) if hidden is not None and hidden.is_nested else hidden


def _width(features: Any, name: str = "") -> int:
    """Return the width of a hidden state."""
    hidden = _hidden(features)
    if hidden is None or hidden.ndim not in (2, 3, 4):
        raise ValueError(
            f"`at` must name layers that return a tensor of 2 to 4 axes, but {name!r} returns"
            f" {type(features).__name__}."
        )
    return int(hidden.shape[1] if hidden.ndim == 4 else hidden.shape[-1])


def _form(inputs: Any) -> Any:
    """Return the shapes and dtypes of a batch, for JSON; at most two samples."""
    if isinstance(inputs, Tensor):
        return [[min(len(inputs), 2), *inputs.shape[1:]], str(inputs.dtype).removeprefix("torch.")]
    if isinstance(inputs, Mapping):
        return {name: _form(value) for name, value in inputs.items() if isinstance(value, Tensor)}
    return None


def _compare(model: ReplayedModel, inputs: Any, answer: Tensor) -> None:
    """Raise if the last exit is not the network's own output."""
    with evaluating(model), torch.no_grad():
        state = model.begin(inputs)
        for k in range(model.n_exits):
            state = model.advance(k, state)
            found = plain_output(model.head(k, state))
    present = ~found.isnan()
    if found.shape != answer.shape or not torch.allclose(
        found[present], answer[present], rtol=1e-3, atol=1e-4
    ):
        raise ValueError(
            "`model` cannot be cut at these modules: with them its output is another. Does code"
            " between modules draw random numbers or change tensors in place?"
        )
