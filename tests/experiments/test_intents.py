"""Intents of bank customers: the recipe trains, and what it stores is the network."""

import csv
import gzip
import importlib
import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import swiftsure as ss  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "intents"
INTENTS = {
    "card_lost": "lost my card",
    "top_up_failed": "top up failed",
    "pin_blocked": "pin wrong",
}
OPENINGS = ["help", "please", "hello", "today i", "why", "when", "again", "now"]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"experiments.intents.{name}")


@pytest.fixture
def data(tmp_path):
    """Every question of a small bank, in the layout of Banking77."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "categories.json").write_text(json.dumps(list(INTENTS)))
    for part, ends in (("train", ["", " please", " bank"]), ("test", [" today", " again"])):
        with gzip.open(folder / f"{part}.csv.gz", "wt") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "category"])
            for intent, words in INTENTS.items():
                writer.writerows([f"{o}, {words}{e}", intent] for o in OPENINGS for e in ends)
    return folder


@pytest.fixture
def encoder(tmp_path):
    """The folder of a small pretrained BERT."""
    texts = [*INTENTS.values(), *OPENINGS, "bank , topics question topic"]
    words = sorted({word for text in texts for word in text.split()})
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    folder = tmp_path / "encoder"
    transformers.BertTokenizer(vocab={w: i for i, w in enumerate(names)}).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(names),
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        initializer_range=0.3,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def run(monkeypatch, module, *options):
    monkeypatch.setattr(sys, "argv", ["command", *map(str, options)])
    module.main()


def test_the_recipe_trains_and_what_it_stores_is_the_network(
    load, data, encoder, tmp_path, monkeypatch
):
    recipe = (FOLDER / "recipes" / "minilm_banking77.toml").read_text()
    for old, new in {
        "exits = [1, 2, 3, 4, 5]": "exits = [1, 2]",
        "held_out = 1000": "held_out = 12",
        "rank = 32": "rank = 4",
        "epochs = 15": "epochs = 12",
        "batch = 32": "batch = 12",
        "lr = 1e-3": "lr = 1e-2",
    }.items():
        assert recipe.count(old) == 1
        recipe = recipe.replace(old, new)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "minilm_tiny.toml").write_text(recipe)
    train, results = load("train"), tmp_path / "results"
    monkeypatch.setattr(train, "HERE", tmp_path)
    both = ("--model", encoder, "--data", data)
    run(monkeypatch, train, "minilm_tiny", *both, "--output", results)

    report = json.loads((results / "minilm_tiny.json").read_text())
    assert report["held_out_accuracy"][-1] > 0.8
    run(monkeypatch, load("records"), *both, "--results", results)
    for name in ("minilm_tiny", "minilm_tiny_joint"):
        record = ss.ExitRecord.load(results / f"{name}.parquet")
        assert (record.n, record.n_exits) == (48, 3)
        scored = json.loads((results / f"{name}.json").read_text())
        assert scored["test_accuracy"][-1] > 0.8
        assert [row["epsilon"] for row in scored["certified"]] == [0.01, 0.02] * 2

    exits, tokenizer = load("network").load(
        encoder, results / "minilm_tiny.safetensors", report["recipe"], 3
    )
    held = load("data").banking77(data, "train")
    order = torch.randperm(72, generator=torch.Generator().manual_seed(0))[:12]
    loader = train.loader(tokenizer, held.rows(order), report["recipe"], 6)
    assert train.accuracies(exits, loader, "cpu") == report["held_out_accuracy"]
    assert {type(part) for part in exits.network.modules()} == {
        type(part) for part in transformers.BertForSequenceClassification.from_pretrained(encoder)
        .modules()
    }  # fmt: skip

    speed = load("speed")
    options = ("--name", "minilm_tiny", "--questions", "4", "--repeats", "1", "--batches", "2")
    run(monkeypatch, speed, *both, "--results", results, *options)
    rows = json.loads((results / "minilm_tiny.speed.json").read_text())["ratios"]
    assert len(rows) == 4
    assert all(row["wall"] > 0 for row in rows)


def test_weights_of_another_recipe_are_refused(load, encoder, tmp_path):
    network = load("network")
    plain, tokenizer = network.pretrained(encoder, 3)
    network.add_update(plain, 4)
    model = {"exits": [1], "heads": "linear", "rank": 4}
    network.save(network.with_exits(plain.eval(), tokenizer, model), tmp_path / "w.safetensors")
    recipe = {"name": "whole", "model": {**model, "rank": 0}}
    with pytest.raises(ValueError, match="does not hold the weights of whole"):
        network.load(encoder, tmp_path / "w.safetensors", recipe, 3)


def test_a_language_model_answers_through_exits(load, data, encoder):
    smollm2 = load("smollm2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        initializer_range=0.3,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    answers = torch.tensor([5, 7, 9])
    network = smollm2.Prompted(model, answers).eval()
    questions = smollm2.topics(data, "train", 40)
    batches = list(smollm2.prompted(tokenizer, questions, 8, "cpu"))
    with torch.no_grad():
        whole = model(batches[0]["input_ids"], batches[0]["attention_mask"]).logits[:, -1]
        own = network(batches[0]["input_ids"], batches[0]["attention_mask"])
    torch.testing.assert_close(own, whole[:, answers])

    hidden, said, labels = smollm2.hidden_states(network, iter(batches), (1, 3))
    assert hidden.shape == (40, 2, 16)
    assert torch.equal(labels, questions.labels)
    heads = smollm2.distilled(hidden, said, epochs=30, held_out=8)
    exits = smollm2.attach_heads(network, smollm2.cuts((1, 3)), batches[0], heads=heads).eval()
    with torch.no_grad():
        outputs = exits(batches[0])
        for k in range(2):  # trained on the stand-in, run in the network
            torch.testing.assert_close(outputs[k], heads[k](hidden[:8, k, None]))
    torch.testing.assert_close(outputs[-1], said[:8])
    learned = said.softmax(dim=1)
    for k, head in enumerate(heads):
        with torch.no_grad():
            found = head(hidden[:, k, None]).log_softmax(dim=1)
        uniform = -(learned * np.log(1 / 3)).sum(dim=1).mean()
        assert -(learned * found).sum(dim=1).mean() < uniform


def test_every_intent_has_a_topic(load):
    smollm2 = load("smollm2")
    topics = list(smollm2.TOPICS)
    for intent, topic in {
        "top_up_by_cash_or_cheque": "top",
        "pin_blocked": "PIN",
        "topping_up_by_card": "top",
        "Refund_not_showing_up": "refund",
        "wrong_exchange_rate_for_cash_withdrawal": "cash",
        "card_arrival": "card",
        "verify_my_identity": "identity",
    }.items():
        assert topics[smollm2.topic_of(intent)] == topic


def test_stored_records_say_what_the_reports_say():
    recipe = tomllib.loads((FOLDER / "recipes" / "minilm_banking77.toml").read_text())
    for name in ("minilm_banking77", "minilm_banking77_joint"):
        report = json.loads((FOLDER / "results" / f"{name}.json").read_text())
        record = ss.ExitRecord.load(FOLDER / "results" / f"{name}.parquet")
        assert report["recipe"] == {**recipe, "name": name}
        accuracy = 1 - record.losses["zero_one"].mean(axis=0, dtype=float)
        np.testing.assert_allclose(accuracy, report["test_accuracy"], atol=1e-4)
        assert record.n == 3080
        assert accuracy[-1] > 0.92
