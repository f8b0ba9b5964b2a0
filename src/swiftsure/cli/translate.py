"""`swiftsure translate`: translate with early exits, using the included translator."""

import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftsure.cli import options
from swiftsure.cli.output import is_terminal, print_json, print_policy, print_table, print_text

if TYPE_CHECKING:
    from swiftsure.certify.policy import Policy

__all__ = ["translate"]

SCORES = ("softmax", "shortlist", "saturation", "meta")
CAPTIONS = [
    "Ein Mann fährt mit einem roten Fahrrad durch den Park.",
    "Zwei kleine Kinder spielen am Strand mit einem Ball.",
    "Eine Frau in einem blauen Kleid liest auf einer Bank ein Buch.",
    "Mehrere Menschen warten im Regen auf den Bus.",
]


def translate(
    texts: Annotated[
        list[str] | None,
        typer.Argument(help="German sentences; a few captions by default.", show_default=False),
    ] = None,
    score: Annotated[
        str, typer.Option(help="softmax, shortlist, saturation or meta.")
    ] = "saturation",
    epsilon: Annotated[
        float, typer.Option(help="Largest drop in sentence BLEU allowed (BLEU is in [0, 1]).")
    ] = 0.02,
    delta: options.Delta = 0.1,
    json: options.Json = False,
) -> None:
    """Translate with a decoder that stops at the first confident layer.

    The translator is a T5 with eight decoder layers, trained on photo
    captions (Multi30k, German to English). Its threshold is calibrated on
    2,461 captions; then it translates, in full and with early exits.

    [bold]Example[/bold]

        swiftsure translate "Ein Hund springt über einen Zaun."
    """
    from swiftsure import ThresholdRecord, calibrate
    from swiftsure._lib import checks

    given = CAPTIONS if texts is None else texts
    if not all(text.strip() for text in given):
        raise ValueError("`texts` must not be empty: give a sentence to translate.")
    checks.choice("score", score, SCORES)
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ImportError(
            '`translate` needs PyTorch and transformers: pip install "swiftsure[text]"'
        )
    record = ThresholdRecord.load(_zoo_records().CALM / f"t5_multi30k_{score}.parquet")
    policy = calibrate(record, risk="gap", loss="bleu", epsilon=epsilon, delta=delta)
    found = _run(policy, score, given)
    if json:
        print_json({"sentence": str(policy), **found})
    else:
        print_policy(policy)
        _print_translations(found["translations"], found["n_layers"])
        if not policy.runs_full_model:
            print_text(f"{found['times_faster']:.2f} times as many tokens per second.", "bold")
    if policy.runs_full_model:
        raise typer.Exit(1)


def _zoo_records() -> Any:
    """Return the module `swiftsure_zoo.records`; raise with the install command without it."""
    try:
        return import_module("swiftsure_zoo.records")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "swiftsure_zoo":
            raise
        raise ModuleNotFoundError(
            'This needs trained networks and their records: pip install "swiftsure[zoo]"',
            name="swiftsure_zoo",
        ) from None


def _print_translations(translations: list[dict[str, Any]], n_layers: int) -> None:
    if not is_terminal():
        rows = [
            [said["german"], said["full"], said["early"], f"{said['layers']:.1f}"]
            for said in translations
        ]
        print_table("", ["text", "in full", "early exits", "layers"], rows)
        return
    lines = []
    for said in translations:
        early = "the same" if said["early"] == said["full"] else said["early"]
        lines += [
            [said["german"], ""],
            [f"  {said['full']}", f"{n_layers}"],
            [f"  {early}", f"{said['layers']:.1f}"],
        ]
    print_table("In full, and with early exits", ["", "layers per token"], lines)


def _run(policy: "Policy", score: str, texts: list[str]) -> dict[str, Any]:
    """Translate each text in full and with early exits, and time both."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    from swiftsure.text import CalmModel, MetaClassifier

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = _zoo_records().TRANSLATOR
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    judge = MetaClassifier.load(folder / "meta.safetensors")
    fast = CalmModel(model, policy, classifier=judge if score == "meta" else None)
    limit: dict[str, Any] = policy.settings["generation"]

    def in_full(**inputs: Any) -> tuple[torch.Tensor, float]:
        return model.generate(**inputs, **limit, do_sample=False)[0], float(fast.n_exits)

    def early(**inputs: Any) -> tuple[torch.Tensor, float]:
        output = fast.generate(**inputs)
        return output.sequences[0], float(output.mean_layers[0])

    ways: dict[str, Callable[..., tuple[torch.Tensor, float]]] = {"full": in_full, "early": early}
    seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
    translations: list[dict[str, Any]] = []
    for text in [texts[0], *texts]:  # the first run warms up
        inputs = tokenizer(text, return_tensors="pt")
        said: dict[str, Any] = {"german": text}
        for name, way in ways.items():
            start = time.perf_counter()
            ids, layers = way(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask)
            took = time.perf_counter() - start
            said[name] = tokenizer.decode(ids, skip_special_tokens=True)
            if translations:
                seconds[name] += took
                tokens[name] += len(ids) - 1
        translations.append(said | {"layers": layers})
    speeds = {name: tokens[name] / seconds[name] for name in ways}
    return {
        "translations": translations[1:],
        "n_layers": fast.n_exits,
        "tokens_per_second": speeds,
        "times_faster": speeds["early"] / speeds["full"],
    }
