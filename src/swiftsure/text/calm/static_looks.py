"""The shortlist of score "softmax" over fixed buffers."""

from typing import Self

import torch
from torch import Tensor

from swiftsure.exits import reaches
from swiftsure.text.calm.confidences import Confidence, Look, Softmax, probability_gap
from swiftsure.text.static_cache import chosen_rows

__all__ = ["StaticShortlist"]


class StaticShortlist:
    """The most probable tokens of each row at its first look, and their scores at later looks.

    Parameters
    ----------
    softmax : Softmax
        With a shortlist.
    n : int
        Number of sequences.
    """

    def __init__(self, softmax: Softmax, n: int) -> None:
        self.decoder, self.n = softmax.decoder, n
        head = self.decoder.head.weight
        self.listed = torch.zeros((n + 1, softmax.size or 0), dtype=torch.long, device=head.device)

    @classmethod
    def of(cls, confidence: Confidence, n: int) -> Self | None:
        """Return the shortlist of a confidence; None if it has none."""
        has_one = isinstance(confidence, Softmax) and confidence.size is not None
        return cls(confidence, n) if has_one else None  # type: ignore[arg-type]

    def keep(self, listed: Tensor, rows: Tensor | None) -> None:
        """Store the lists of some rows."""
        if rows is None:
            self.listed[: self.n].copy_(listed)
        else:
            self.listed.index_copy_(0, rows, listed)

    def scores(self, look: Look, rows: Tensor | None) -> Tensor:
        """Return the confidence among the listed tokens."""
        listed = chosen_rows(self.listed, rows, self.n)
        head = self.decoder.head
        inputs = self.decoder.exit_input(look.exit_index, look.states)
        short = torch.bmm(head.weight[listed], inputs.unsqueeze(2)).squeeze(2)
        if head.bias is not None:
            short = short + head.bias[listed]
        return probability_gap(self.decoder.logits(short, listed))

    def checked(self, short: Tensor, whole: Tensor, levels: Tensor) -> Tensor:
        """Return the smaller confidence of list and vocabulary where the list's reaches a level."""
        gap = probability_gap(self.decoder.logits(whole))
        return torch.where(reaches(short, levels), torch.minimum(short, gap), short)
