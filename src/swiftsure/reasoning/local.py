"""`LocalReasoner`: a model of transformers in this process, asked with the cache that it has.

    cache:  question, thoughts ........ last token | </think> answer prompt  answer
                                                   |  read for the probe, then cropped away

A probe reads the last token, the end of the thinking and the beginning of an answer in one pass.
Afterwards the cache is cropped to the last token, whose logits that pass has computed too: the
model goes on thinking as if it had not been asked, without a second prefill.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swiftsure._lib import checks
from swiftsure.cascade.answers import Answer
from swiftsure.reasoning.clients import BOXED, Piece, Question, Thinking, ThinkingClient
from swiftsure.reasoning.families import family_of

if TYPE_CHECKING:
    import torch

__all__ = ["LocalReasoner"]

ALTERNATIVES = 10
"""How many of the most probable tokens of an answer are kept."""
CONTEXT = 8
"""Tokens before a new one that its text may depend on."""


@dataclass(eq=False)
class LocalReasoner(ThinkingClient):
    """A reasoning model of transformers in this process.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder whose cache can be cropped; in evaluation mode.
    tokenizer : PreTrainedTokenizerBase
    family, options, answer_prompt, answer_tokens, max_tokens, parse
        As in `Reasoner`.
    temperature : float
        Of the thinking; 0 takes the most probable token.

    Examples
    --------
    >>> from transformers import AutoModelForCausalLM, AutoTokenizer  # doctest: +SKIP
    >>> name = "Qwen/Qwen3-0.6B"
    >>> model = LocalReasoner(  # doctest: +SKIP
    ...     AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
    ... )
    """

    model: Any
    tokenizer: Any
    family: Any = None
    options: Sequence[str] = ()
    answer_prompt: str = BOXED
    answer_tokens: int = 24
    max_tokens: int = 32_768
    parse: Callable[[str], Any] | None = field(default=None, repr=False)
    temperature: float = 0.0
    name: str = ""

    def __post_init__(self) -> None:
        """Find the family."""
        if self.model.training:
            raise ValueError("`model` must be in evaluation mode: call .eval() first.")
        found = str(getattr(self.model.config, "_name_or_path", "")) or type(self.model).__name__
        self.family = family_of(self.family, found)
        self.name = self.name or found.rsplit("/", 1)[-1]
        self.options = tuple(self.options)
        checks.count("answer_tokens", self.answer_tokens)
        checks.count("max_tokens", self.max_tokens)
        self._asked = self.encode(self.family.end + self.answer_prompt, begins=False)

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Return the tokens of a text, with a first token of every text if it begins one."""
        return list(self.tokenizer(text, add_special_tokens=begins)["input_ids"])

    def identity(self) -> dict[str, Any]:
        """Return the fingerprint of the model, and how it is asked."""
        from swiftsure.torch.fingerprinting import fingerprint

        family = self.family
        return {
            "model": fingerprint(self.model),
            "family": [family.head, family.turn, family.begin, family.end],
            "options": list(self.options),
            "answer_prompt": self.answer_prompt,
            "answer_tokens": self.answer_tokens,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }

    @asynccontextmanager
    async def think(
        self, question: Question, written: str = "", *, seed: int = 0, tokens: int = 0
    ) -> AsyncIterator[Thinking]:
        """Yield a question's thinking."""
        import torch

        prompt = self.family.prompt(question)
        generator = torch.Generator(self.model.device).manual_seed(seed)
        most = max(1, self.max_tokens - tokens)
        yield _Decoding(self, prompt, written, most, generator)


class _Decoding(Thinking):
    """A text that is being decoded, and its cache.

    The cache holds all tokens but the last, unless `logits` are those after the last already.
    """

    def __init__(
        self,
        reasoner: LocalReasoner,
        prompt: str,
        written: str,
        most: int,
        generator: "torch.Generator",
    ) -> None:
        self.reasoner, self.left, self.generator = reasoner, most, generator
        self.prompt, self.written = prompt, written
        self._begin(prompt + written)
        config = reasoner.model.generation_config
        ends = config.eos_token_id if config.eos_token_id is not None else []
        self.ends = set(ends if isinstance(ends, list) else [ends])

    def _begin(self, text: str) -> None:
        """Read a text with an empty cache, as soon as it is needed."""
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.reasoner.model.config)
        self.tokens, self.logits = self.reasoner.encode(text), None

    async def next(self) -> Piece:
        await asyncio.sleep(0)  # several questions, and whoever listens, take turns
        if self.logits is None:
            self.logits = self._read(self.tokens[self.cache.get_seq_length() :])[-1]
        token = self._draw(self.logits)
        self.left -= 1
        self.logits = None
        if token in self.ends:
            return Piece("", 0, "stop")
        before = self.tokens[-CONTEXT:]
        self.tokens.append(token)
        decode = self.reasoner.tokenizer.decode
        text = decode([*before, token])[len(decode(before)) :]
        self.written += text
        return Piece(text, 1, None if self.left else "length")

    async def ask(self, thought: str) -> Answer:
        asked = self.reasoner._asked
        if self.reasoner.family.mark in self.written:  # the cache holds more than the thinking
            self._begin(self.prompt + thought)
        held = self.cache.get_seq_length()
        logits = self._read([*self.tokens[held:], *asked])
        self.logits = logits[-len(asked) - 1] if held < len(self.tokens) else self.logits
        answer = self._answer(logits[-1], len(asked))
        if (extra := self.cache.get_seq_length() - len(self.tokens)) > 0:
            self.cache.crop(-extra)
        return answer

    def _answer(self, logits: Any, read: int) -> Answer:
        """Return the most probable answer after what was read, with its log-probabilities."""
        reasoner, decode = self.reasoner, self.reasoner.tokenizer.decode
        tokens: list[int] = []
        own: list[float] = []
        top: list[dict[str, float]] = []
        while True:
            logs = logits.float().log_softmax(-1)
            best = logs.topk(min(ALTERNATIVES, len(logs)))
            token = int(best.indices[0])
            listed = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            top.append({decode([other]): value for other, value in listed})
            own.append(float(best.values[0]))
            if token in self.ends:
                break
            tokens.append(token)
            closed = reasoner.answer_prompt.endswith("{") and "}" in decode(tokens)
            if closed or len(tokens) == reasoner.answer_tokens:
                break
            logits = self._read([token])[-1]
        cost = {"tokens": float(read + len(tokens))}
        return Answer(decode(tokens), cost=cost, logprobs=tuple(own), top_logprobs=tuple(top))

    def _read(self, tokens: list[int]) -> Any:
        """Return the logits after each of several tokens, and add them to the cache."""
        import torch

        model = self.reasoner.model
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=model.device)
            return model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits[0]

    def _draw(self, logits: Any) -> int:
        import torch

        if not self.reasoner.temperature:
            return int(logits.argmax())
        shares = (logits.float() / self.reasoner.temperature).softmax(-1)
        return int(torch.multinomial(shares, 1, generator=self.generator))
