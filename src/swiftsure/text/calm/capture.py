"""Captured generation with early exits: `generate` prepares, a loop over fixed buffers decodes."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    StoppingCriteriaList,
)

from swiftsure.text.calm.confidences import Confidence
from swiftsure.text.calm.loops import Loop, Request
from swiftsure.text.calm.on_device import OnDevice
from swiftsure.text.calm.plans import Plan, Plans
from swiftsure.text.calm.regrouped import Regrouped
from swiftsure.text.calm.results import Trace
from swiftsure.text.calm.rules import CalmRule, check_thresholds
from swiftsure.text.calm.session import WINDOW, Session
from swiftsure.text.calm.together import Together
from swiftsure.text.decoder import Decoder
from swiftsure.text.sessions import Sessions
from swiftsure.text.static_decoder import StaticShape
from swiftsure.torch.capture import CaptureBudget, CaptureLimits, Recorder

__all__ = ["CapturedDecoding"]

UNSUPPORTED = ("inputs_embeds", "decoder_inputs_embeds", "token_type_ids", "streamer")
"""Arguments of `generate` that captured decoding does not take."""
REGROUP_FROM = {"cpu": 2}
"""Smallest batch whose rows are regrouped, by device.

Not on a GPU: at T5-large's size a block took 0.12 ms for one row and 0.26 ms for 32, so groups
that are smaller than the batch cost more calls than they save.
"""
LARGEST_GROUP = {"cpu": 64}
"""Rows that a block takes at once when rows are regrouped."""


class CapturedDecoding:
    """Runs a decoder with early exits over fixed buffers, and keeps what it captured.

    Parameters
    ----------
    decoder : Decoder
    rule : CalmRule
    confidence : Confidence
    limits : CaptureLimits
    full_if_faster : bool
        Run the full decoder for sizes of batches at which that took less time.
    """

    def __init__(
        self,
        decoder: Decoder,
        rule: CalmRule,
        confidence: Confidence,
        limits: CaptureLimits,
        *,
        full_if_faster: bool = False,
    ) -> None:
        self.decoder, self.rule, self.confidence = decoder, rule, confidence
        self._full_if_faster = full_if_faster
        self.budget = CaptureBudget(limits)
        parts = decoder.model, decoder.exit_heads, getattr(confidence, "classifier", None)
        self._sessions: Sessions[Session] = Sessions(parts)
        self._recorder: Recorder | None = None
        """Of all sessions, which never run at the same time; making one takes a millisecond."""
        self._plans = Plans(decoder.model)
        self._asked: dict[str, Any] = {}

    def generate(
        self, options: dict[str, Any], thresholds: NDArray[np.float32]
    ) -> tuple[Tensor, Trace]:
        """Generate with the model's own preparation; return sequences and what happened."""
        found: list[Trace] = []

        def decode(
            model: Any,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: Any,
            **arguments: Any,
        ) -> Tensor:
            del model
            with torch.inference_mode():
                sequences, trace = self._decode(
                    input_ids,
                    logits_processor,
                    stopping_criteria,
                    generation_config,
                    thresholds,
                    arguments,
                )
            found.append(trace)
            return sequences.clone()

        model = self.decoder.model
        plan = self._plans.get(options)
        if plan is not None:
            with torch.inference_mode():
                sequences, trace = self._run_plan(plan, options, thresholds)
            return sequences.clone(), trace
        self._asked = options
        sequences = model.generate(**options, do_sample=False, custom_generate=decode)
        return sequences, found[0]

    def _decode(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: Any,
        thresholds: NDArray[np.float32],
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Trace]:
        _check_arguments(arguments)
        input_ids = input_ids.to(self.decoder.model.device)
        prompt = input_ids.shape[1]
        ends, other_criteria = _split_criteria(criteria)
        barred, other_processors = _split_processors(processors, prompt, ends)
        plan = Plan(
            start=input_ids[:1],
            tokens=int(config.max_length) - prompt,
            ends=ends,
            barred=barred,
            pad=int(config.pad_token_id) if config.pad_token_id is not None else 0,
        )
        if other_criteria is None and other_processors is None:
            self._plans.keep(self._asked, plan)
        return self._run(input_ids, plan, thresholds, arguments, other_processors, other_criteria)

    def _run_plan(
        self, plan: Plan, options: dict[str, Any], thresholds: NDArray[np.float32]
    ) -> tuple[Tensor, Trace]:
        """Generate without `generate`'s own preparation, which was done before."""
        source = options["encoder_outputs"][0] if "input_ids" not in options else None
        given = options["input_ids"] if source is None else source
        input_ids = plan.start.expand(len(given), -1)
        return self._run(input_ids, plan, thresholds, options, None, None)

    def _run(
        self,
        input_ids: Tensor,
        plan: Plan,
        thresholds: NDArray[np.float32],
        arguments: dict[str, Any],
        processors: Any,
        criteria: Any,
    ) -> tuple[Tensor, Trace]:
        device = self.decoder.model.device
        n, prompt = input_ids.shape
        check_thresholds(thresholds, n)
        tokens = plan.tokens
        encoded, mask = arguments.get("encoder_outputs"), arguments.get("attention_mask")
        states = None if encoded is None else encoded[0]
        crossed = bool(self.decoder.config.is_encoder_decoder)
        source = arguments["input_ids"] if states is None and crossed else states
        session = self._session(n, prompt + tokens, source, len(plan.ends))
        if self._full_if_faster and session.faster.way == "full":
            thresholds = np.full_like(thresholds, np.inf)
        levels = self._levels(thresholds, n, tokens)
        session.load(
            input_ids[:, -1],
            prompt - 1,
            prompt,
            levels,
            ends=sorted(plan.ends),
            pad=plan.pad,
            barred=plan.barred,
        )
        logits = None
        if states is not None:
            session.static.load_source(states.to(device), mask)
        elif crossed:
            session.encoder.run(arguments["input_ids"], arguments["attention_mask"])
        if not crossed or prompt > 1:
            logits = self._prefill(session, input_ids, arguments)
        else:
            session.static.reset(arguments.get("decoder_attention_mask"))
        request = Request(
            input_ids=input_ids,
            levels=levels,
            may_exit=self._may_exit(thresholds, tokens, at_first=logits is None),
            ends=plan.ends,
            barred=plan.barred,
            first_logits=logits,
            processors=processors,
            criteria=criteria,
        )
        with session.faster.timed() as counted:
            loop = self._loop(session, request)
            answers = loop.run()
            counted.append(int((loop.log.depths > 0).sum()))
        attended = _attended(prompt, source, mask)
        trace = Trace(n, len(self.decoder.blocks), prompt, attended)
        trace.log = loop.log.arrays(answers.shape[1])
        return torch.cat([input_ids, answers], dim=1), trace

    def _loop(self, session: Session, request: Request) -> Loop:
        """Return the loop that is faster for this batch and device."""
        kind = session.device.type
        plain = request.processors is None and request.criteria is None
        exits = len(session.segments) > 1 and bool(request.may_exit.any())
        if plain and exits and session.n >= REGROUP_FROM.get(kind, session.n + 1):
            return Regrouped(session, request, LARGEST_GROUP.get(kind, session.n))
        if plain and session.recorder.branches and session.shortlist is None:
            return OnDevice(session, request)
        return Together(session, request)

    def _levels(self, thresholds: NDArray[np.float32], n: int, tokens: int) -> NDArray[np.float32]:
        each = np.broadcast_to(thresholds, (n,))
        if self.rule.decay is None:
            return np.ascontiguousarray(np.broadcast_to(each[:, None], (n, tokens)), np.float32)
        return np.stack([self.rule.levels(each, step) for step in range(tokens)], axis=1)

    def _may_exit(
        self, thresholds: NDArray[np.float32], tokens: int, *, at_first: bool
    ) -> NDArray[np.bool_]:
        """Return at which tokens a row can exit: not at the one that follows a prompt."""
        steps = range(tokens if self.rule.decay is not None else 1)
        found = [bool(self.rule.reachable(self.rule.levels(thresholds, k)).any()) for k in steps]
        return np.broadcast_to(found, tokens) & ((np.arange(tokens) > 0) | at_first)

    def _session(self, n: int, positions: int, given: Tensor | None, ends: int) -> Session:
        """Return the session for a batch; sizes are rounded up, so that few are made."""
        device = self.decoder.model.device
        if self._recorder is None or self._recorder.device != device:
            self._recorder = Recorder(device, budget=self.budget)
        recorder = self._recorder
        captures = recorder.captures
        capacity = _rounded(positions + 1 + WINDOW, 64 if captures else 32)
        source = 0 if given is None else _rounded(given.shape[1], 32 if captures else 8)
        shape = StaticShape(n, capacity, source)

        def make() -> Session:
            with recorder.buffers():
                return Session(self.decoder, self.rule, self.confidence, shape, ends, recorder)

        return self._sessions.get((shape, ends), make, unlimited=captures)

    def _prefill(self, session: Session, input_ids: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Run the model on the prompt and keep its cache; return the next token's logits."""
        model, mask = self.decoder.model, arguments.get("attention_mask")
        crossed = bool(model.config.is_encoder_decoder)
        # Without its configuration, so that sliding windows keep all positions.
        own: Any = DynamicCache()
        given: dict[str, Any] = {"use_cache": True, "attention_mask": mask}
        padding = None
        if crossed:
            given |= {
                "decoder_input_ids": input_ids,
                "encoder_outputs": arguments["encoder_outputs"],
                "past_key_values": EncoderDecoderCache(own, DynamicCache()),
            }
            mask = arguments.get("decoder_attention_mask")
            if mask is not None:
                given["decoder_attention_mask"] = mask
        else:
            given |= {"input_ids": input_ids, "past_key_values": own}
            for name in ("position_ids", "logits_to_keep"):
                if arguments.get(name) is not None:
                    given[name] = arguments[name]
            if "position_ids" in given:
                last = given["position_ids"][:, -1:]
                padding = input_ids.shape[1] - 1 - last.expand(len(input_ids), 1)
        logits: Tensor = model(**given).logits[:, -1]
        session.static.load_prompt(own.layers, mask, padding)
        return logits.float()


def _check_arguments(arguments: dict[str, Any]) -> None:
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise ValueError(
                f"`{name}` is not supported with capture=True: leave it out, or generate without"
                " capture."
            )
    cache = arguments.get("past_key_values")
    if cache is not None and int(cache.get_seq_length()) > 0:
        raise ValueError(
            "`past_key_values` must be empty with capture=True, whose caches have a fixed size:"
            " generate without capture to continue from a cache."
        )


def _split_criteria(criteria: StoppingCriteriaList) -> tuple[frozenset[int], Any]:
    """Return the end tokens, and the criteria that the host has to run; None: there are none."""
    ends: set[int] = set()
    for each in criteria:
        if isinstance(each, EosTokenCriteria):
            ends.update(each.eos_token_id.tolist())
    known = (EosTokenCriteria, MaxLengthCriteria)
    return frozenset(ends), None if all(type(each) in known for each in criteria) else criteria


def _split_processors(
    processors: LogitsProcessorList, prompt: int, ends: frozenset[int]
) -> tuple[int, Any]:
    """Return how many tokens come before an end at least, and the processors of the host."""
    barred = 0
    for each in processors:
        if type(each) is MinNewTokensLengthLogitsProcessor:
            found = int(each.min_new_tokens) + int(each.prompt_length_to_skip) - prompt
        elif type(each) is MinLengthLogitsProcessor:
            found = int(each.min_length) - prompt
        else:
            return 0, processors
        if set(each.eos_token_id.tolist()) != ends:
            return 0, processors
        barred = max(barred, found)
    return barred, None


def _attended(prompt: int, source: Tensor | None, mask: Tensor | None) -> Tensor | int:
    """Return how many positions the first token attends to, without padding."""
    if source is None:
        return prompt if mask is None else mask.sum(dim=1)
    return prompt + (source.shape[1] if mask is None else mask.sum(dim=1))


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step
