"""Train translation models from German to English, from the root of the repository:
`python -m experiments.translation.train t5_multi30k --data FOLDER`.

A T5 whose every decoder layer answers through the one head, with the losses weighted as CALM does,
or (`exits = false`) a plain one. Writes the folder NAME: model (half precision), tokenizer, and
report.json (recipe, seed, device, time, BLEU on the validation part at each layer).
FOLDER holds multi30k/ and, for recipes that ask for it, tatoeba_en_de/.
"""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sacrebleu
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from experiments import commands
from experiments.training import fit, make_optimizer, recorded_step
from experiments.translation.data import Pairs, multi30k, tatoeba, tokenizer_of

HERE = Path(__file__).parent
IGNORED = -100
SORTED_TOGETHER = 20  # batches
STEP = 8  # tokens, between the lengths of batches


class EveryLayer(nn.Module):
    """Gives logits after decoder layers, from ids of source and target, (n, 2, length)."""

    def __init__(self, model: T5ForConditionalGeneration, exits: bool) -> None:
        super().__init__()
        self.model = model
        self.exits = exits

    def forward(self, batch: Tensor) -> list[Tensor]:
        source, target = batch.unbind(dim=1)
        shifted = functional.pad(target[:, :-1], (1, 0))  # the first is <pad>, as T5 has it
        model = self.model
        read = model.encoder(input_ids=source, attention_mask=(source != 0).long())
        written = model.decoder(
            input_ids=shifted,
            encoder_hidden_states=read.last_hidden_state,
            encoder_attention_mask=(source != 0).long(),
            output_hidden_states=True,
            use_cache=False,
        )
        states = [
            model.decoder.dropout(model.decoder.final_layer_norm(state))
            for state in written.hidden_states[1:-1]
        ]
        if len(states) + 1 != model.config.num_decoder_layers:
            raise RuntimeError("this version of transformers returns other hidden states")
        states = [*states, written.last_hidden_state] if self.exits else [written.last_hidden_state]
        scale = model.config.d_model**-0.5 if model.config.tie_word_embeddings else 1.0
        return [model.lm_head(state * scale) for state in states]


def weighted(smoothing: float):
    """Return CALM's loss: cross-entropies of the layers, later ones weighing more."""

    def loss_of(outputs: list[Tensor], targets: Tensor) -> Tensor:
        weights = torch.arange(1.0, len(outputs) + 1)
        weights = (weights / weights.sum()).tolist()
        losses = [
            weight
            * functional.cross_entropy(
                output.flatten(0, 1),
                targets.flatten(),
                ignore_index=IGNORED,
                label_smoothing=smoothing,
            )
            for weight, output in zip(weights, outputs, strict=True)
        ]
        return torch.stack(losses).sum()

    return loss_of


def encoded(tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int) -> Tensor:
    """Return ids, (n, length), padded or cut."""
    batch = tokenizer(
        texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )
    return batch["input_ids"]


def build(recipe: dict[str, Any]) -> T5ForConditionalGeneration:
    """Return the untrained model of a recipe."""
    config = T5Config(**recipe["model"], pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def train(
    recipe: dict[str, Any],
    pairs: Pairs,
    tokenizer: PreTrainedTokenizerFast,
    device: str,
    seed: int,
    seconds: float | None = None,
) -> T5ForConditionalGeneration:
    """Return the trained model, in evaluation mode."""
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    # The default on new GPUs, but without gradients for T5's position biases.
    torch.backends.cuda.enable_cudnn_sdp(False)
    plan = recipe["training"]
    model = EveryLayer(build(recipe), plan["exits"]).to(device).train()
    optimizer = make_optimizer(model, plan)
    step = recorded_step(model, optimizer, weighted(plan["label_smoothing"]), plan.get("clip"))
    sides = [encoded(tokenizer, texts, plan["length"]) for texts in (pairs.german, pairs.english)]
    ids = torch.stack(sides, dim=1)
    lengths = (ids != 0).sum(dim=2).amax(dim=1)
    ids = ids.to(device)  # lengths stay on the host: reading them from a device would wait for it
    size = min(plan["batch"], len(ids))

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(ids), generator=random)
        order = order[: len(order) - len(order) % size]
        # Sentences of similar length share a batch, which is cut to about the longest. Lengths are
        # rounded up, since each one is captured as a graph.
        near = [some[lengths[some].argsort()] for some in order.split(SORTED_TOGETHER * size)]
        batches = [batch for some in near for batch in some.split(size)]
        for i in torch.randperm(len(batches), generator=random).tolist():
            longest = int(lengths[batches[i]].max())
            batch = ids[batches[i].to(device)][:, :, : math.ceil(longest / STEP) * STEP]
            targets = batch[:, 1]
            yield batch, targets.masked_fill(targets == 0, IGNORED)

    trained = fit(recipe["name"], model, optimizer, plan, step, epoch, len(ids) // size, seconds)
    return trained.model.eval()


@torch.inference_mode()
def translations(
    model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> list[str]:
    """Return greedy translations."""
    found: list[str] = []
    for start in range(0, len(texts), 250):
        batch = tokenizer(texts[start : start + 250], padding=True, return_tensors="pt")
        ids = model.generate(
            input_ids=batch["input_ids"].to(model.device),
            attention_mask=batch["attention_mask"].to(model.device),
            max_new_tokens=64,
            do_sample=False,
        )
        found += tokenizer.batch_decode(ids, skip_special_tokens=True)
    return found


def main() -> None:
    parser = commands.options(__doc__, HERE)
    parser.add_argument(
        "--tokenizer", type=Path, help="folder of another model whose tokenizer to use"
    )
    arguments = parser.parse_args()
    recipe, device = commands.recipe_of(arguments, HERE), commands.device()
    pairs = multi30k(arguments.data / "multi30k", "train")
    if recipe["data"].get("tatoeba", False):
        pairs += tatoeba(arguments.data / "tatoeba_en_de")
    if arguments.tokenizer is None:
        tokenizer = tokenizer_of(pairs, recipe["model"]["vocab_size"])
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.tokenizer)
    began = time.perf_counter()
    model = train(recipe, pairs, tokenizer, device, arguments.seed, arguments.seconds)
    report = commands.report(recipe, arguments.seed, began, model)
    folder = arguments.output / recipe["name"]
    folder.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(folder)  # before anything else can fail
    tokenizer.save_pretrained(folder)
    model.float()  # with the rounded weights that were saved
    held = multi30k(arguments.data / "multi30k", "val")
    said = translations(model, tokenizer, held.german)
    report["validation_bleu"] = round(sacrebleu.corpus_bleu(said, [held.english]).score, 2)
    print(json.dumps(report), flush=True)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
