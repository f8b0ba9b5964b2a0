"""`collect`: records from exported stages, so that a certificate is about what runs.

Stages, heads and confidences run as `EarlyExit` runs them. Losses, shards and checks are those of
`swiftsure.torch.collect`, so collecting needs PyTorch, while running the result does not.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure.losses import Loss
from swiftsure.onnx.scoring import confidence
from swiftsure.onnx.stages import Answer, Stages, State
from swiftsure.records import ExitRecord
from swiftsure.run import RunOptions
from swiftsure.scores import LearnedScore
from swiftsure.torch.collecting import collect as collect_staged
from swiftsure.torch.foreign import ForeignModel
from swiftsure.torch.staged import Scored, Tempered, plain_output

__all__ = ["StagedFolder", "collect"]


def collect(
    folder: str | os.PathLike[str] | Stages,
    loader: Iterable[Any],
    losses: Sequence[str | Loss] = ("zero_one", "brier"),
    scores: Sequence[str] | LearnedScore = ("top1",),
    *,
    providers: str | Sequence[str] | None = None,
    threads: int | None = None,
    temperatures: Sequence[float] | None = None,
    seconds: bool = False,
    batch_size: int | None = None,
    run: RunOptions = RunOptions(),
) -> ExitRecord:
    """Return the record of exported stages; policies made from it are bound to them.

    Parameters
    ----------
    folder : path or Stages
    loader, losses, scores, temperatures, seconds, batch_size
        As for `swiftsure.torch.collect`; inputs may be arrays or tensors.
    providers, threads
        As for `EarlyExit.load`.
    run : RunOptions
        As for `swiftsure.torch.collect`. Workers of Ray load the folder themselves, from a path
        that they share.
    """
    stages = folder
    if not isinstance(stages, Stages):
        stages = Stages.load(stages, providers=providers, threads=threads)
    return collect_staged(
        StagedFolder(stages),
        loader,
        losses,
        scores,
        temperatures=temperatures,
        seconds=seconds,
        batch_size=batch_size,
        run=run,
    )


class StagedFolder(ForeignModel):
    """Exported stages as a staged model on tensors."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.n_exits = stages.n_exits
        self.flops = np.asarray(stages.manifest.flops)

    def begin(self, batch: Any) -> State:
        """Return the state before the first exit."""
        return self.stages.begin(pytree.tree_map_only(Tensor, _array, batch))

    def advance(self, exit_index: int, state: State) -> State:
        """Return the state at an exit."""
        return self.stages.advance(exit_index, state)

    def head(self, exit_index: int, state: State) -> Any:
        """Return the output of an exit, as the PyTorch model does."""
        answer = self.stages.head(exit_index, state)
        # Copied: some arrays that ONNX Runtime returns cannot be written to.
        output = self.stages.output([torch.tensor(array) for array in answer.arrays])
        return output if answer.confidence is None else Scored(output, torch.tensor(answer[1]))

    def select(self, state: State, index: Tensor) -> State:
        """Return the state of some of the samples."""
        return self.stages.select(state, _array(index))

    def fingerprint(self, temperatures: Sequence[float] | None) -> str:
        """Return the fingerprint of the exported files."""
        return self.stages.manifest.fingerprint(temperatures)

    def confidence(self, name: str, output: Any) -> Tensor:
        """Return the confidences that `swiftsure.onnx.EarlyExit` computes."""
        temperature = 1.0
        if isinstance(output, Tempered):
            output, temperature = output.given, output.temperature
        arrays = [_array(leaf) for leaf in pytree.tree_leaves(plain_output(output))]
        own = _array(output.confidence) if isinstance(output, Scored) else None
        return torch.from_numpy(confidence(name, Answer(arrays, own), temperature))


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().cpu().numpy()
