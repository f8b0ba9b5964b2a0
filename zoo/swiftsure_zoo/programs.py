"""Little programs, and a small reasoner that works out their digit line by line and checks it.

    L1 = 3 L2 * 4 L3 + 9 <think> L1 = 3 3 L2 * 4 2 L3 + 9 1 <check> L1 = 3 3 ... </think> 1

All arithmetic is modulo 10. Each line of thinking repeats a line of the program and adds its
result. The program is run twice; if the results differ, a third time, and the third counts.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from swiftsure.reasoning import LocalReasoner

__all__ = [
    "LONGEST",
    "WORDS",
    "Example",
    "example",
    "run",
    "small_reasoner",
    "tokenizer",
    "tokens_of",
    "unique_examples",
]

FOLDER = Path(__file__).parent / "data" / "small_reasoner"
"""Weights and tokenizer of the reasoner."""

LONGEST = 40
"""Lines of the longest program; their number is log-uniform from 2."""

THINK, CHECK, END, STOP, PAD = "<think>", "<check>", "</think>", "<eos>", "<pad>"
OPERATIONS = ("=", "+", "-", "*")
WORDS = [
    *(PAD, STOP, THINK, CHECK, END),
    *OPERATIONS,
    *map(str, range(10)),
    *(f"L{k}" for k in range(1, LONGEST + 1)),
]
NUMBER = {word: k for k, word in enumerate(WORDS)}


class Example(NamedTuple):
    """A program, how it is worked out, and its digit."""

    program: list[str]
    thinking: list[str]
    answer: str

    @property
    def question(self) -> str:
        """The prompt."""
        return " ".join(self.program)


def example(source: random.Random, longest: int = LONGEST, *, uniform: bool = False) -> Example:
    """Return a program with its solution."""
    lines = _length(source, longest, uniform=uniform)
    program = [("=", source.randrange(10))]
    while len(program) < lines:
        operation = source.choices(OPERATIONS, (1, 3, 3, 3))[0]
        program.append((operation, source.randrange(10)))
    words = [w for k, (op, d) in enumerate(program) for w in (f"L{k + 1}", op, str(d))]
    worked, answer = run(program)
    return Example(words, [THINK, *worked, CHECK, *worked], answer)


def run(program: list[tuple[str, int]]) -> tuple[list[str], str]:
    """Return the lines of a solution and its digit."""
    value, words = 0, []
    for k, (operation, digit) in enumerate(program):
        value = _applied(operation, value, digit)
        words += [f"L{k + 1}", operation, str(digit), str(value)]
    return words, str(value)


def _applied(operation: str, value: int, digit: int) -> int:
    if operation == "=":
        return digit
    if operation == "*":
        return value * digit % 10
    return (value + digit if operation == "+" else value - digit) % 10


def _length(source: random.Random, longest: int, *, uniform: bool) -> int:
    if uniform:
        return source.randint(2, longest)
    return min(longest, int(2 * ((longest + 1) / 2) ** source.random()))


def tokens_of(words: list[str]) -> list[int]:
    """Return the numbers of words."""
    return [NUMBER[word] for word in words]


def unique_examples(seed: int, n: int) -> Iterator[Example]:
    """Yield `n` different programs."""
    source, seen = random.Random(seed), set[str]()
    while len(seen) < n:
        found = example(source)
        if found.question not in seen:
            seen.add(found.question)
            yield found


def tokenizer() -> Any:
    """Return the tokenizer of `transformers`, one token per word, with its chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel(NUMBER, unk_token=PAD))
    words.pre_tokenizer = WhitespaceSplit()
    made: Any = PreTrainedTokenizerFast
    found = made(tokenizer_object=words, eos_token=STOP, pad_token=PAD)
    found.chat_template = "{{ messages[-1]['content'] }} <think>"
    return found


def small_reasoner(folder: Path = FOLDER) -> "LocalReasoner":
    """Return the trained reasoner, a decoder of 0.45 M parameters.

    Examples
    --------
    >>> problem = next(unique_examples(0, 1))
    >>> from swiftsure.reasoning import Thinker
    >>> Thinker(small_reasoner()).answer(problem.question).answer == problem.answer
    True
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    from swiftsure.reasoning import LocalReasoner, ThinkingFamily

    model: Any = LlamaForCausalLM.from_pretrained(folder)
    return LocalReasoner(
        model.eval(),
        AutoTokenizer.from_pretrained(folder),
        family=ThinkingFamily("{content}", f" {THINK}", f" {END} "),
        options="0123456789",
        answer_prompt="",
        answer_tokens=1,
        max_tokens=500,
        name="small reasoner",
    )
