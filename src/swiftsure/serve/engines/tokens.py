"""`TokenInputs`: texts as inputs of an encoder, padded to a few lengths so that they batch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.serve.engine import InvalidRequestError
from swiftsure.serve.inputs import InputForm

__all__ = ["TokenInputs"]

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Lengths to which texts are padded; longer ones to a multiple of the last."""


class TokenInputs:
    """Checks texts, or tokens as `InputForm` does, and pads them.

    Parameters
    ----------
    form : InputForm
        Of tokens: a dict with `input_ids`.
    tokenizer
    longest : int, optional
        How many tokens the network reads.
    """

    def __init__(self, form: InputForm, tokenizer: Any, longest: int | None = None) -> None:
        if not isinstance(form.form, Mapping) or "input_ids" not in form.form:
            raise ValueError("`tokenizer` needs a network whose inputs are a dict of `input_ids`.")
        self.form, self.tokenizer = form, tokenizer
        known = [longest, tokenizer.model_max_length]
        self.longest = min(
            (each for each in known if each is not None and each < 1e6), default=None
        )
        self._names = tuple(form.form)
        self._padding = {"input_ids": tokenizer.pad_token_id or 0}

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of one sample."""
        text = {"type": "string"}
        both = {"text": text, "text_pair": text}
        pair = {"type": "object", "properties": both, "required": ["text"]}
        return {"anyOf": [text, pair, self.form.schema()]}

    def sample(self, inputs: Any) -> dict[str, NDArray[Any]]:
        """Return a checked sample: the tokens of a text, or those that are given."""
        given = {"text": inputs} if isinstance(inputs, str) else inputs
        if isinstance(given, dict) and "text" in given:
            texts = [given[name] for name in ("text", "text_pair") if given.get(name) is not None]
            if given.keys() - {"text", "text_pair"} or not all(isinstance(t, str) for t in texts):
                raise InvalidRequestError("`inputs` must be a text, or `text` and `text_pair`.")
            found = self.tokenizer(*texts)
            given = {name: found[name] for name in self._names if name in found}
        sample = self.form.sample(given)
        length = max((leaf.shape[0] for leaf in sample.values() if leaf.ndim == 1), default=0)
        if self.longest is not None and length > self.longest:
            raise InvalidRequestError(
                f"`inputs` must have at most {self.longest:,} tokens, but has {length:,}."
            )
        return sample  # type: ignore[no-any-return]

    def covers(self, _sample: Any, _policy: Any) -> bool:
        """Return True: there are no options beside the inputs."""
        return True

    def samples(self, _inputs: Any) -> None:
        """Return None: tokens come as a dict."""
        return

    def padded(self, sample: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return a sample of the next of a few lengths, if a mask says what is padding."""
        length = sample["input_ids"].shape[0]
        if "attention_mask" not in sample or any(
            leaf.shape != (length,) for leaf in sample.values()
        ):
            return dict(sample)
        wanted = next((n for n in LENGTHS if n >= length), -(-length // LENGTHS[-1]) * LENGTHS[-1])
        if self.longest is not None:
            wanted = min(wanted, self.longest)
        return {
            name: np.pad(leaf, (0, wanted - length), constant_values=self._padding.get(name, 0))
            for name, leaf in sample.items()
        }
