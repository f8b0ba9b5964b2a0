"""Ask a pretrained language model for the topic of a question, and add exits to it:
`python -m experiments.intents.smollm2 --model FILE.gguf --data FOLDER`.

SmolLM2-135M-Instruct reads a prompt and answers with one of eight words; only their logits are
computed. Heads after a few of its 30 layers learn its answers on training questions, without
labels. Writes smollm2_topics.parquet (the exits on test questions), smollm2_topics.safetensors (the
heads) and smollm2_topics.json (agreement and accuracy of every exit, with and without heads).
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments.calm.smollm2 import loaded
from experiments.commands import stored_weights
from experiments.intents.data import Questions, banking77
from swiftsure.torch import EarlyStopping, attach_heads, collect, train_heads

HERE = Path(__file__).parent
EXITS = (6, 12, 18, 24)
"""Layers with a head, counted from 1: few, since each look costs time."""

TOPICS = {
    "identity": ("identity", "verify_source", "age_limit", "personal", "terminate"),
    "top": ("top_up", "topping"),
    "transfer": ("transfer", "beneficiary", "receiving"),
    "cash": ("cash", "atm", "cheque"),
    "exchange": ("exchange", "currenc", "country"),
    "PIN": ("pin_", "_pin", "passcode"),
    "refund": ("refund", "reverted", "charged_twice"),
    "card": ("",),
}
"""The first token of each answer, and what the names of its intents contain; first match."""

PROMPT = (
    "Topics: card, top-up, transfer, cash, exchange, PIN, refund, identity.\nQuestion: {}\nTopic:"
)


def topic_of(intent: str) -> int:
    """Return the number of an intent's topic."""
    words = list(TOPICS.values())
    return next(k for k, parts in enumerate(words) if any(part in intent.lower() for part in parts))


def topics(folder: Path, part: str, n: int, first: int = 0, seed: int = 0) -> Questions:
    """Return n questions of Banking77 in random order from `first` on, with topics as labels."""
    questions = banking77(folder, part)
    names = json.loads((folder / "categories.json").read_text())
    of_intent = torch.tensor([topic_of(name) for name in names])
    order = torch.randperm(len(questions.texts), generator=torch.Generator().manual_seed(seed))
    chosen = questions.rows(order[first : first + n])
    return Questions(chosen.texts, of_intent[chosen.labels])


class Prompted(nn.Module):
    """A causal language model as a classifier: the logits of its answers after the prompt."""

    def __init__(self, model: Any, answers: Tensor) -> None:
        super().__init__()
        self.decoder = model.model
        self.answers = nn.Linear(model.config.hidden_size, len(answers), bias=False)
        self.answers.weight = nn.Parameter(model.lm_head.weight[answers].detach().clone())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        read = self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return self.answers(read.last_hidden_state[:, -1])


class LastToken(nn.Module):
    """A head on the last token of a prompt, which is padded on the left."""

    def __init__(self, width: int, n_answers: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, n_answers)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(self.norm(hidden[:, -1]))


class Kept(nn.Module):
    """A stand-in for the network that looks up the hidden states it had: heads train in seconds."""

    def __init__(self, n_exits: int) -> None:
        super().__init__()
        self.cuts = nn.ModuleList(Slot(k) for k in range(n_exits))

    def forward(self, hidden: Tensor, logits: Tensor) -> Tensor:
        for cut in self.cuts:
            cut(hidden)
        return logits


class Slot(nn.Module):
    """Returns the hidden state of one exit, as a sequence of one token."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden[:, self.index, None]


def prompted(
    tokenizer: Any, questions: Questions, size: int, device: Any
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of prompts with labels."""
    for start in range(0, len(questions.texts), size):
        prompts = [PROMPT.format(text) for text in questions.texts[start : start + size]]
        batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        yield {
            "input_ids": batch["input_ids"].to(device),
            "attention_mask": batch["attention_mask"].to(device),
            "labels": questions.labels[start : start + size].to(device),
        }


def cuts(exits: tuple[int, ...]) -> list[str]:
    """Return the names of modules after which the network has exits."""
    return [f"decoder.layers.{layer - 1}" for layer in exits]


@torch.inference_mode()
def hidden_states(
    network: Prompted, batches: Iterator[dict[str, Tensor]], exits: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last token's hidden states at exits, (n, exits, width), the answers, labels."""
    seen: dict[str, Tensor] = {}
    hooks = [
        network.get_submodule(name).register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.update(
                {name: (output[0] if isinstance(output, tuple) else output)[:, -1]}
            )
        )
        for name in cuts(exits)
    ]
    rows, answers, labels = [], [], []
    for batch in batches:
        answers.append(network(batch["input_ids"], batch["attention_mask"]))
        rows.append(torch.stack([seen[name] for name in cuts(exits)], dim=1))
        labels.append(batch["labels"])
    for hook in hooks:
        hook.remove()
    return torch.cat(rows), torch.cat(answers), torch.cat(labels)


def distilled(
    hidden: Tensor, answers: Tensor, epochs: int, held_out: int, seed: int = 0
) -> list[LastToken]:
    """Return a head per exit that has learned the full model's answers."""
    torch.manual_seed(seed)
    heads = [LastToken(hidden.shape[2], answers.shape[1]) for _ in range(hidden.shape[1])]
    rows = {"hidden": hidden.cpu(), "logits": answers.cpu()}
    parts = [
        [{name: value[some] for name, value in rows.items()} for some in index.split(64)]
        for index in torch.randperm(len(hidden)).split([len(hidden) - held_out, held_out])
    ]
    stand_in = attach_heads(
        Kept(len(heads)),
        [f"cuts.{k}" for k in range(len(heads))],
        parts[0][0],
        heads=heads,
        task="classification",
    )
    train_heads(
        stand_in,
        parts[0],
        stop=EarlyStopping(parts[1], patience=5),
        epochs=epochs,
        learning_rate=3e-3,
        progress=False,
    )
    return heads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--fit", type=int, default=360, help="training questions for the heads")
    parser.add_argument("--test", type=int, default=400, help="test questions of the record")
    parser.add_argument(
        "--first", type=int, default=0, help="first test question: skips those looked at before"
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=40)
    arguments = parser.parse_args()
    model, tokenizer = loaded(arguments.model)
    words = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"][0] for word in TOPICS]
    network = Prompted(model, torch.tensor(words, device=model.device)).eval()
    arguments.output.mkdir(parents=True, exist_ok=True)

    began = time.perf_counter()
    training = topics(arguments.data, "train", arguments.fit)
    batches = prompted(tokenizer, training, arguments.batch, model.device)
    hidden, answers, labels = hidden_states(network, batches, EXITS)
    n_held = arguments.fit // 6
    heads = distilled(hidden, answers, arguments.epochs, n_held)
    with torch.inference_mode():
        plain = network.answers(network.decoder.norm(hidden)).argmax(dim=2)
        ours = [head(hidden[:, k, None].cpu()) for k, head in enumerate(heads)]
        ours = torch.stack(ours, dim=1).argmax(dim=2).to(plain.device)
    report: dict[str, Any] = {
        "exits": list(EXITS),
        "fitted_on": arguments.fit - n_held,
        "stopped_on": n_held,
        "seconds_to_fit": round(time.perf_counter() - began),
        "train_agreement": shares(ours, answers.argmax(dim=1)[:, None]),
        "train_agreement_without_heads": shares(plain, answers.argmax(dim=1)[:, None]),
        "train_accuracy": shares(answers.argmax(dim=1)[:, None], labels[:, None]),
    }
    print(json.dumps(report), flush=True)
    save_file(
        stored_weights(nn.ModuleList(heads), half=False),
        arguments.output / "smollm2_topics.safetensors",
    )

    example = next(prompted(tokenizer, training, 2, model.device))
    heads = [head.to(model.device) for head in heads]
    exits = attach_heads(network, cuts(EXITS), example, heads=heads).eval()
    fresh = topics(arguments.data, "test", arguments.test, arguments.first)
    record = collect(
        exits,
        prompted(tokenizer, fresh, arguments.batch, model.device),
        losses=["zero_one", "brier"],
        scores=["top1", "top_diff", "entropy"],
    )
    record.save(arguments.output / "smollm2_topics.parquet")
    report["test"] = record.n
    report["test_accuracy"] = (
        (1 - record.losses["zero_one"].mean(axis=0, dtype=float)).round(4).tolist()
    )
    same = 1 - record.inconsistencies["zero_one"].mean(axis=0, dtype=float)
    report["test_agreement"] = same.round(4).tolist()
    report["seconds"] = round(time.perf_counter() - began)
    print(json.dumps(report), flush=True)
    (arguments.output / "smollm2_topics.json").write_text(json.dumps(report, indent=2) + "\n")


def shares(answers: Tensor, wanted: Tensor) -> list[float]:
    """Return the share of answers that are as wanted, per column."""
    return [round(share, 4) for share in (answers == wanted).float().mean(dim=0).tolist()]


if __name__ == "__main__":
    main()
