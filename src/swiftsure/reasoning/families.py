"""How models of each family are asked to think, and how their thinking ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiftsure._lib import checks

__all__ = ["FAMILIES", "HIDDEN", "ThinkingFamily", "family_of", "hides_thinking"]


@dataclass(frozen=True)
class ThinkingFamily:
    r"""The texts around a question and around the thinking.

    Parameters
    ----------
    turn : str
        One earlier message or the question; `{role}` and `{content}` stand for its parts.
    begin : str
        What the model's turn begins with, up to its first thought.
    end : str
        What ends its thinking, up to its answer.
    head : str
        What the prompt begins with. A token that begins every text is added by the server.
    mark : str
        The part of `end` that the model itself writes; by default `end` without blanks around it.
    roles : mapping
        Roles that have other names.
    request : mapping
        More fields of requests, such as those that make a server show special tokens.

    Examples
    --------
    >>> FAMILIES["qwen3"].prompt("Is 7 prime?")
    '<|im_start|>user\nIs 7 prime?<|im_end|>\n<|im_start|>assistant\n<think>\n'
    """

    turn: str
    begin: str
    end: str
    head: str = ""
    mark: str = ""
    roles: Mapping[str, str] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Set the mark."""
        if "{content}" not in self.turn:
            raise ValueError(f"`turn` must hold {{content}}, but got {self.turn!r}.")
        object.__setattr__(self, "mark", self.mark or self.end.strip())
        if not self.mark:
            raise ValueError("`end` must hold the text that ends the thinking.")

    def prompt(self, question: str | Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt for a question, or for a list of chat messages."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if not isinstance(question, str):
            messages = [dict(each) for each in question]
        turns = []
        for each in messages:
            if not isinstance(each.get("content"), str):
                raise ValueError("`messages` must hold texts only: images and tools cannot be put.")
            role = self.roles.get(each["role"], each["role"])
            turn = self.turn.replace("{role}", role)
            turns.append(turn.replace("{content}", each["content"]))
        return self.head + "".join(turns) + self.begin


CHATML = "<|im_start|>{role}\n{content}<|im_end|>\n"

FAMILIES = {
    "qwen3": ThinkingFamily(CHATML, "<|im_start|>assistant\n<think>\n", "\n</think>\n\n"),
    "qwq": ThinkingFamily(CHATML, "<|im_start|>assistant\n<think>\n", "\n</think>\n\n"),
    "deepseek-r1": ThinkingFamily(
        "<｜{role}｜>{content}",
        "<｜Assistant｜><think>\n",
        "\n</think>\n\n",
        roles={"user": "User", "assistant": "Assistant"},
    ),
    "gemma-4": ThinkingFamily(
        "<|turn>{role}\n{content}<turn|>\n",
        "<|turn>model\n<|channel>thought\n",
        "\n<channel|>",
        head="<|turn>system\n<|think|>\n<turn|>\n",
        roles={"assistant": "model"},
        request={"skip_special_tokens": False},
    ),
    "gpt-oss": ThinkingFamily(
        "<|start|>{role}<|message|>{content}<|end|>",
        "<|start|>assistant<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        head="<|start|>system<|message|>Reasoning: medium\n\n# Valid channels: analysis, final."
        "<|end|>",
        request={"skip_special_tokens": False},
    ),
    "magistral": ThinkingFamily(
        "[INST]{content}[/INST]", "[THINK]", "[/THINK]", request={"skip_special_tokens": False}
    ),
    "phi-4-reasoning": ThinkingFamily(
        "<|im_start|>{role}<|im_sep|>{content}<|im_end|>",
        "<|im_start|>assistant<|im_sep|><think>\n",
        "\n</think>\n\n",
    ),
}
"""Families by the text that names of their models hold. Add one for a model of another kind."""

HIDDEN = ("api.openai.com", "api.anthropic.com", "generativelanguage.googleapis.com", "api.x.ai")
"""Hosts that do not show what their models think."""


def family_of(family: "str | ThinkingFamily | None", model: str) -> ThinkingFamily:
    """Return a family by name, or that of a model by the model's name.

    Examples
    --------
    >>> family_of(None, "Qwen/Qwen3-8B") is FAMILIES["qwen3"]
    True
    """
    if isinstance(family, ThinkingFamily):
        return family
    if family is not None:
        return FAMILIES[checks.choice("family", family, FAMILIES)]
    plain = model.lower().replace("_", "-").replace(" ", "-")
    for name, found in FAMILIES.items():
        if name in plain or name.replace("-", "") in plain.replace("-", ""):
            return found
    raise ValueError(
        f"`family` must say how {model!r} is asked to think: one of {', '.join(FAMILIES)}, or a"
        " ThinkingFamily of its own."
    )


def hides_thinking(name: str) -> str:
    """Return what to do about a model whose thinking cannot be probed."""
    return (
        f"{name} hides its thinking or cannot continue a text, so nothing can be asked on the way:"
        " there only the number of votes (collect_votes, Voter) and budgets of tokens (such as"
        " max_tokens among the endpoint's parameters) are dials. Servers that can: vLLM, SGLang,"
        " llama.cpp and transformers, at /v1/completions."
    )
