"""Texts to run a model on, tokenized and encoded."""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from swiftsure._lib import checks
from swiftsure.records.checks import id_array

__all__ = ["Source", "Texts", "encode", "input_hashes", "refuse_seen", "token_rows"]

UNLIMITED = 10**6
"""Tokenizers without a length limit report a number far above this one."""


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts and how a model reads them.

    Parameters
    ----------
    texts : (n,)
        Not empty.
    tokenizer : the model's tokenizer
    references : (n,), optional
        Good answers, one or several per text, for the gap risk; without them, only the difference
        from the full model's answers is known.
    ids : (n,), optional
    max_source_length : int, optional
        Where to cut longer texts. Without it, texts that are too long for the model are refused.

    Raises
    ------
    ValueError
        If there is no text, or not one reference and one unique id per text.
    """

    texts: Sequence[str]
    tokenizer: Any
    references: Sequence[str | Sequence[str]] | None = None
    ids: ArrayLike | None = None
    max_source_length: int | None = None

    def __post_init__(self) -> None:
        """Check that references and ids belong to the texts."""
        n = len(self.texts)
        if n == 0:
            raise ValueError("`texts` must not be empty.")
        for name in ("references", "ids"):
            values = getattr(self, name)
            if values is not None and len(values) != n:
                raise ValueError(
                    f"`{name}` must have one entry per text, {n}, but got {len(values)}."
                )
            object.__setattr__(self, name, values if values is None else list(values))
        object.__setattr__(self, "texts", list(self.texts))
        if self.ids is not None:
            object.__setattr__(self, "ids", id_array(np.asarray(self.ids), n))

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.texts)

    def part(self, rows: Sequence[int]) -> "Texts":
        """Return some of the texts, without their references and ids."""
        return replace(self, texts=[self.texts[k] for k in rows], references=None, ids=None)

    def rows(self, model: Any) -> list[list[int]]:
        """Return the token ids of each text; raises for texts that are empty or too long."""
        return token_rows(self.texts, self.tokenizer, model, self.max_source_length)

    def encoded(self, inputs: slice, model: Any) -> dict[str, Tensor]:
        """Return token ids and mask of some texts."""
        return encode(self.texts[inputs], self.tokenizer, model, self.max_source_length)


def input_hashes(texts: Iterable[str]) -> list[str]:
    """Return a short hash of each text, to tell whether two datasets overlap.

    Examples
    --------
    >>> input_hashes(["a"]) == input_hashes(["a", "b"])[:1]
    True
    """
    return [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]


def refuse_seen(texts: Texts, name: str, trained_on: Collection[str]) -> None:
    """Raise if the hash of one of these texts is in `trained_on`."""
    seen = [k for k, each in enumerate(input_hashes(texts.texts)) if each in trained_on]
    if seen:
        raise ValueError(
            f"`texts` must be new to the {name}, which saw {len(seen)} of them in training, number"
            f" {seen[0]} first: a policy from these would promise too much."
        )


def encode(
    texts: Sequence[str], tokenizer: Any, model: Any, max_source_length: int | None = None
) -> dict[str, Tensor]:
    """Return token ids and mask, padded to the longest text; on the left for causal models.

    Parameters
    ----------
    texts : texts
    tokenizer : the model's tokenizer
    model : PreTrainedModel
    max_source_length : int, optional
        Where to cut longer texts. Without it, texts that are too long for the model are refused.

    Raises
    ------
    ValueError
        If a text is empty or too long.
    """
    rows = token_rows(texts, tokenizer, model, max_source_length)
    return _padded(rows, tokenizer.pad_token_id, left=not model.config.is_encoder_decoder)


def token_rows(
    texts: Sequence[str], tokenizer: Any, model: Any, max_source_length: int | None = None
) -> list[list[int]]:
    """Return the token ids of each text; parameters and errors are those of `encode`."""
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"`texts` must be strings, but number {place} is {text!r}.")
        if not text.strip():
            raise ValueError(f"`texts` must not be empty, but number {place} is.")
    if tokenizer.pad_token_id is None:
        raise ValueError(
            "`tokenizer` must have a padding token; for models without one:"
            " tokenizer.pad_token = tokenizer.eos_token."
        )
    cut: dict[str, Any] = {"truncation": False}
    if max_source_length is not None:
        length = checks.count("max_source_length", max_source_length)
        cut = {"truncation": True, "max_length": length}
    rows: list[list[int]] = tokenizer(list(texts), verbose=False, **cut)["input_ids"]
    _refuse_long(rows, _limit(tokenizer, model))
    return rows


def _limit(tokenizer: Any, model: Any) -> int | None:
    limits = [getattr(model.config, "max_position_embeddings", None), tokenizer.model_max_length]
    known = [int(each) for each in limits if each is not None and each < UNLIMITED]
    return min(known, default=None)


def _refuse_long(rows: list[list[int]], limit: int | None) -> None:
    for place, row in enumerate(rows):
        if not row:
            raise ValueError(
                f"`texts` number {place} has no tokens: the tokenizer drops all of its characters."
            )
        if limit is not None and len(row) > limit:
            raise ValueError(
                f"`texts` number {place} has {len(row)} tokens, but the model takes {limit}: pass"
                f" max_source_length={limit} to cut it."
            )


def _padded(rows: list[list[int]], pad: int, left: bool) -> dict[str, Tensor]:
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for place, row in enumerate(rows):
        columns = slice(longest - len(row), None) if left else slice(0, len(row))
        ids[place, columns] = torch.tensor(row)
        mask[place, columns] = 1
    return {"input_ids": ids, "attention_mask": mask}


class Source:
    """Encoded texts, to generate from any rows of them; an encoder runs once on each text.

    Parameters
    ----------
    model : PreTrainedModel
    encoded : token ids and mask
    batch_size : int
        For the encoder.
    """

    def __init__(self, model: Any, encoded: dict[str, Tensor], batch_size: int) -> None:
        device = model.device
        self.mask = encoded["attention_mask"].to(device)
        self.ids = encoded["input_ids"].to(device)
        self.states: Tensor | None = None
        if model.config.is_encoder_decoder:
            encoder = model.get_encoder()
            with torch.no_grad():
                parts = [
                    encoder(input_ids=ids, attention_mask=mask).last_hidden_state
                    for ids, mask in zip(
                        torch.split(self.ids, batch_size),
                        torch.split(self.mask, batch_size),
                        strict=True,
                    )
                ]
            self.states = torch.cat(parts)

    def rows(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the arguments of `generate` for some rows, without superfluous padding."""
        index = torch.as_tensor(rows, device=self.mask.device)
        mask = self.mask[index]
        used = mask.any(dim=0).nonzero().squeeze(1)
        window = slice(int(used[0]), int(used[-1]) + 1)
        kept: dict[str, Any] = {"attention_mask": mask[:, window]}
        if self.states is None:
            return kept | {"input_ids": self.ids[index, window]}
        states: Any = self.states[index, window]
        return kept | {"encoder_outputs": BaseModelOutput(last_hidden_state=states)}
