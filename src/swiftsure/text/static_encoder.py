"""An encoder over buffers of fixed size, captured on a GPU together with what a decoder needs."""

from typing import Any

import torch
from torch import Tensor

from swiftsure.text.static_decoder import StaticDecoder
from swiftsure.torch.capture import Recorder

__all__ = ["StaticEncoder"]


class StaticEncoder:
    """Encodes sources, and stores their keys and values in a decoder's cache.

    Parameters
    ----------
    static : StaticDecoder
    recorder : Recorder
    """

    def __init__(self, static: StaticDecoder, recorder: Recorder) -> None:
        self._static, self._recorder = static, recorder
        self._encoder = static.decoder.model.get_encoder()
        self._given: tuple[Tensor, Tensor] | None = None
        """Token ids and mask of the sources."""
        self._graph: Any = None

    def run(self, ids: Tensor, mask: Tensor) -> None:
        """Encode sources, (n, positions); the mask is 0 for padding."""
        if not self._recorder.captures:
            states = self._encoder(input_ids=ids, attention_mask=mask).last_hidden_state
            self._static.load_source(states, mask)
            return
        if self._given is None:
            size = self._static.n, self._static.shape.source
            zeros = [torch.zeros(size, dtype=torch.long, device=ids.device) for _ in range(2)]
            self._given = zeros[0], zeros[1]
        for buffer, value in zip(self._given, (ids, mask), strict=True):
            buffer.zero_()
            buffer[:, : value.shape[1]].copy_(value)
        if self._graph is None:
            self._graph = self._recorder.record(self._encode)
        self._graph.replay()

    def _encode(self) -> None:
        ids, seen = self._given  # type: ignore[misc]
        # As an additive mask: the encoder would look whether any position is hidden.
        added = self._static.added(seen.bool())[:, None, None]
        states = self._encoder(input_ids=ids, attention_mask=added).last_hidden_state
        self._static.load_source(states, seen)
