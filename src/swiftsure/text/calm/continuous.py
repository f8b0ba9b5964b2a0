"""Early-exit generations that join and leave a running batch: the rows of a `ContinuousBatch`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.text.calm.capture import CapturedDecoding, Plan, Prepared
from swiftsure.text.calm.loops import Found, Loop
from swiftsure.text.calm.results import Depths
from swiftsure.text.static_decoder import StaticShape

if TYPE_CHECKING:
    from swiftsure.text.calm.model import CalmModel

__all__ = ["CalmRows"]


@dataclass(frozen=True)
class _Asked:
    prepared: Prepared
    levels: NDArray[np.float32]


class CalmRows:
    """Rows of a CALM model, each for one generation at a time.

    Parameters
    ----------
    fast : CalmModel
        Whose policy applies by default.
    captured : CapturedDecoding
    shape : StaticShape
    """

    def __init__(self, fast: "CalmModel", captured: CapturedDecoding, shape: StaticShape) -> None:
        self.fast, self.captured, self.shape = fast, captured, shape
        self.models = (fast.model,)
        self._loops: dict[bool, Loop] = {}
        """By whether the host sees each token before the next one begins."""
        self._plan: Plan | None = None
        self._running: dict[int, tuple[Loop, _Asked]] = {}

    def takes(self, fast: Any) -> bool:
        """Return whether another system can run here: one that differs by its threshold only."""
        own = self.fast
        parts = own.model is fast.model and own.heads is fast.heads
        rule = replace(own.rule, threshold=fast.rule.threshold)
        return bool(parts and own.classifier is fast.classifier and rule == fast.rule)

    def prepare(
        self,
        fast: "CalmModel",
        input_ids: Tensor,
        *,
        full: bool,
        thresholds: Sequence[float | None] | None = None,
        seed: int = 0,
        sequence_ids: Sequence[int] | None = None,
        **options: Any,
    ) -> _Asked:
        """Check and prepare a generation of one sequence; arguments are those of `generate`."""
        options = fast.asked(input_ids, options, seed, sequence_ids)
        prepared = self.captured.prepare(options)
        n, prompt = prepared.input_ids.shape
        if n != 1:
            raise ValueError(f"`input_ids` must hold one sequence, but got {n}.")
        positions = prompt + prepared.plan.tokens
        source = 0 if prepared.source is None else prepared.source.shape[1]
        needed = self.captured.shape(self.shape.n, positions, source)
        for name, size, room in (
            ("positions", needed.capacity, self.shape.capacity),
            ("source", needed.source, self.shape.source),
        ):
            if size > room:
                raise ValueError(
                    f"The prompt of {prompt} tokens, the answer of up to {prepared.plan.tokens}, or"
                    f" the source of {source} are too long for this batch: give it more `{name}`."
                )
        self._plan = self._plan or prepared.plan
        known = self._plan.ends, self._plan.pad
        if (prepared.plan.ends, prepared.plan.pad) != known:
            raise ValueError("`eos_token_id` and `pad_token_id` must be the same for all.")
        return _Asked(prepared, fast.levels([None] if full else thresholds))

    @torch.inference_mode()
    def join(self, row: int, asked: _Asked) -> list[Found]:
        """Begin a generation in a free row; return its first token, if that is known."""
        by_host = asked.prepared.by_host and self.captured.recorder.branches
        if by_host not in self._loops:
            plan: Plan = self._plan  # type: ignore[assignment]
            self._loops[by_host] = self.captured.new_loop(self.shape, plan, by_host=by_host)
        loop = self._loops[by_host]
        self._running[row] = loop, asked
        return self.captured.join(loop, [row], asked.prepared, np.reshape(asked.levels, (-1,))[:1])

    @torch.inference_mode()
    def advance(self) -> list[Found]:
        """Run for a while; return the tokens that were written."""
        return [
            each for loop in self._loops.values() if loop.active.any() for each in loop.advance()
        ]

    def leave(self, row: int) -> None:
        """Free a row, whether or not its generation has ended."""
        with torch.inference_mode():
            self._running.pop(row)[0].leave([row])

    def result(self, row: int) -> Depths:
        """Return the exit depths of a row's tokens."""
        loop, asked = self._running[row]
        trace = self.captured.trace(asked.prepared)
        with torch.inference_mode():
            trace.log = loop.log([row])
        return trace.summary(self.captured.decoder, self.captured.confidence)
