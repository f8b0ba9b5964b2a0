"""Decoding with a small draft model and a large verifier: BiLD and speculative sampling."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure._lib import checks
from swiftsure.certify.policy import Policy
from swiftsure.run.graphs.recorder import CaptureLimits
from swiftsure.text.bild.capture import CapturedPair
from swiftsure.text.bild.continuous import BildRows
from swiftsure.text.bild.decoding import Decoding, decoding_of
from swiftsure.text.bild.pair import (
    check_pair,
    pair_fingerprint,
    refuse_other_tokenizer,
    start_token,
)
from swiftsure.text.bild.readers import CountingReader, Flops, ModelReader, RememberingReader
from swiftsure.text.bild.results import BildOutput, BildRun
from swiftsure.text.bild.rules import DraftRule
from swiftsure.text.generation import (
    check_length,
    check_options,
    check_sequence_ids,
    check_token_ids,
    end_tokens,
    token_random,
)

__all__ = ["BigLittle", "Passage"]

EndTokens = int | Sequence[int] | Literal["model"] | None


class BigLittle:
    """A large model that generates with the help of a small draft model.

    The small model drafts until it is unsure of its next token. The large model reads the draft in
    one pass, replaces the first token that is too far from its own choice, and drops the rest.
    Sequences are generated one at a time, unless `capture` is set: drafting is for low latency.

    Parameters
    ----------
    large, small : PreTrainedModel
        Of any families, both causal or both with an encoder, with the same vocabulary and a cache
        that can be cropped, in evaluation mode.
    policy : Policy, DraftRule, float or None
        A policy made from a record of `sweep_pair`, checked against both models once, here; or
        `Rollback`, `Speculative` or a bare rollback threshold, which promise nothing. None runs the
        large model alone.
    tokenizers : pair of tokenizers, optional
        The large and the small model's tokenizers, to check that they are the same. The models
        alone show only the sizes of their vocabularies.
    capture : bool or CaptureLimits
        Generate all sequences of a batch together, over caches of a fixed size: on a GPU through
        CUDA graphs, captured once per batch size and number of tokens read. Both models must be
        from known families (`swiftsure.text.FAMILIES`). The tokens are the same.
    compile : bool
        With `capture`: compile both models' blocks, as `CalmModel` does.

    Attributes
    ----------
    rule : DraftRule
    policy : Policy or None
    capture, compile
        As given.

    Raises
    ------
    ValueError
        If the models or their tokenizers do not match, or the policy was made for other models.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from swiftsure.text import self_draft
    >>> config = LlamaConfig(
    ...     vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> pair = BigLittle(model, self_draft(model, 4), 2.0)
    >>> pair.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=6).lengths
    array([6])
    """

    def __init__(
        self,
        large: Any,
        small: Any,
        policy: Policy | DraftRule | float | None = None,
        *,
        tokenizers: tuple[Any, Any] | None = None,
        capture: bool | CaptureLimits = False,
        compile: bool = False,  # noqa: A002 (what torch calls it)
    ) -> None:
        if compile and not capture:
            raise ValueError("`compile` needs `capture`: pass capture=True.")
        check_pair(large, small)
        self.large, self.small = large, small
        self.capture, self.compile = capture, compile
        self._flops = Flops(large), Flops(small)
        self.rule = DraftRule.of(policy)
        self.policy = policy if isinstance(policy, Policy) else None
        if tokenizers is not None:
            refuse_other_tokenizer(*tokenizers)
        if self.policy is not None:
            DraftRule.bind(self.policy).check_model(lambda: pair_fingerprint(large, small))
        self._captured: CapturedPair | None = None
        if capture:
            limits = capture if isinstance(capture, CaptureLimits) else CaptureLimits()
            self._captured = CapturedPair(large, small, limits, compile=compile)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: EndTokens = "model",
        seed: int = 0,
        sequence_ids: Sequence[int] | None = None,
    ) -> BildOutput:
        """Generate, one sequence at a time or, with `capture`, all together.

        Parameters
        ----------
        input_ids : (n, positions)
            Sources or prompts.
        attention_mask : (n, positions), optional
            0 for padding.
        max_new_tokens : int
            Required, unless the policy has it.
        eos_token_id : int, ints, None or "model"
            Tokens that end a sequence; None means that no token does.
        seed, sequence_ids
            For sampling; ids default to positions in the batch. A sequence's random numbers depend
            on nothing else.

        Raises
        ------
        ValueError
            If an input is empty, or input and `max_new_tokens` together exceed a model's context.
        """
        passages = self.passages(
            input_ids,
            attention_mask,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            seed=seed,
            sequence_ids=sequence_ids,
            counting=self._captured is not None,
        )
        if self._captured is None:
            runs = tuple(each.run(self.rule) for each in passages)
        else:
            runs = self._run_together(self._captured, passages)
        return BildOutput(self._sequences(input_ids, runs), runs)

    def passages(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: EndTokens = "model",
        seed: int = 0,
        sequence_ids: Sequence[int] | None = None,
        counting: bool = False,
    ) -> list["Passage"]:
        """Prepare the sequences that `generate` would generate; it has the same arguments.

        With `counting`, the sequences only count what is read: a captured pair reads for them.
        """
        given = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        options = self._with_policy_options(given)
        rows = _rows(input_ids, attention_mask)
        ids = check_sequence_ids(sequence_ids, len(rows))
        return [
            self.passage(row, seed=seed, sequence=each, counting=counting, **options)
            for row, each in zip(rows, ids, strict=True)
        ]

    def rows(self, _n: int, positions: int, source: int) -> BildRows:
        """Return rows whose generations join and leave at any time; see `ContinuousBatch`."""
        return BildRows(self, positions, source)

    def _run_together(
        self, captured: CapturedPair, passages: Sequence["Passage"]
    ) -> tuple[BildRun, ...]:
        decodings = [each.decoding(self.rule) for each in passages]
        captured.run([each.source for each in passages], decodings, self.rule)
        return tuple(each.result(done) for each, done in zip(passages, decodings, strict=True))

    def passage(
        self,
        source: Tensor,
        *,
        max_new_tokens: int,
        eos_token_id: EndTokens = "model",
        seed: int = 0,
        sequence: int = 0,
        remember: bool = False,
        counting: bool = False,
    ) -> "Passage":
        """Prepare one sequence, (1, positions), to be generated under any rules; encoders run once.

        With `remember`, logits are kept, so that runs with a common prefix compute it once.
        """
        checks.count("max_new_tokens", max_new_tokens)
        for name, model in (("large", self.large), ("small", self.small)):
            check_length(model, source.shape[1], max_new_tokens, f"{name} model")
        start = start_token(self.large)
        source = source.to(self.large.device)
        reader: type[ModelReader] = RememberingReader if remember else ModelReader
        if counting:
            reader = CountingReader
        return Passage(
            source=source,
            large=reader(self.large, self._flops[0], source),
            small=reader(self.small, self._flops[1], source),
            begin=tuple(source[0].tolist()) if start is None else (start,),
            max_new_tokens=max_new_tokens,
            ends=end_tokens(self.large, eos_token_id),
            seed=checks.count("seed", seed, 0),
            sequence=checks.count("sequence_ids", sequence, 0),
        )

    def _with_policy_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options merged with the policy's; raise if they contradict it."""
        made_for = {} if self.policy is None else self.policy.settings.get("generation", {})
        absent = {"max_new_tokens": None, "eos_token_id": "model"}
        given = {name: value for name, value in options.items() if value != absent[name]}
        if made_for:
            check_options(given, made_for, self.large)
        found = {**absent, **made_for, **given}
        if found["max_new_tokens"] is None:
            raise ValueError("`max_new_tokens` is required: the maximum length of an answer.")
        return found

    def _sequences(self, input_ids: Tensor, runs: Sequence[BildRun]) -> Tensor:
        """Return the sequences as `generate` does, padded to the longest."""
        start, ends = start_token(self.large), end_tokens(self.large, "model")
        pad = self.large.generation_config.pad_token_id
        filler = pad if pad is not None else next(iter(ends), 0)
        longest = max(len(run.tokens) for run in runs)
        new = [[*run.tokens, *[filler] * (longest - len(run.tokens))] for run in runs]
        before = input_ids if start is None else torch.full((len(runs), 1), start)
        return torch.cat([before, torch.tensor(new).to(before)], dim=1).to(input_ids.device)


@dataclass(frozen=True)
class Passage:
    """One prepared sequence, which can be generated repeatedly under different rules."""

    source: Tensor
    """(1, positions)."""
    large: ModelReader
    small: ModelReader
    begin: tuple[int, ...]
    """Tokens before the first new one."""
    max_new_tokens: int
    ends: frozenset[int]
    seed: int
    sequence: int

    @torch.inference_mode()
    def run(self, rule: DraftRule) -> BildRun:
        """Generate the sequence under a rule."""
        decoding = self.decoding(rule)
        decoding.run()
        return self.result(decoding)

    def decoding(self, rule: DraftRule) -> Decoding:
        """Return the state of a new generation under a rule."""
        self.large.restart()
        self.small.restart()
        return decoding_of(rule)(
            self.large,
            self.small,
            rule,
            tokens=self.begin,
            limit=len(self.begin) + self.max_new_tokens,
            ends=self.ends,
            noise=self._noise,
        )

    def result(self, decoding: Decoding) -> BildRun:
        """Return what a finished generation did."""
        return BildRun(
            tokens=tuple(decoding.tokens[len(self.begin) :]),
            calls=tuple(decoding.calls),
            same_from=decoding.low,
            same_below=decoding.high,
            flops=self.large.flops + self.small.flops,
            alone_flops=self.large.counts.alone(
                len(self.begin), len(decoding.tokens), self.large.source_length
            ),
        )

    def _noise(self, place: int) -> NDArray[np.float64]:
        """Return three uniform numbers for a position, the same in every run.

        A position may be drafted again after a rollback before it. Nothing that its numbers decided
        is then kept, so they can be reused.
        """
        return token_random(self.seed, self.sequence, place).random(3)


def _rows(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Split the inputs into rows, (1, positions) each, without padding."""
    check_token_ids(input_ids)
    if attention_mask is None:
        return [row[None] for row in input_ids]
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` must have the shape of `input_ids`, {tuple(input_ids.shape)}, but"
            f" got {tuple(attention_mask.shape)}."
        )
    kept = attention_mask.bool()
    empty = (~kept.any(dim=1)).nonzero()
    if len(empty):
        raise ValueError(f"`input_ids` number {int(empty[0])} is empty: all of it is padding.")
    return [ids[mask][None] for ids, mask in zip(input_ids, kept, strict=True)]
