"""The translation experiment: files are read, the vocabulary is SentencePiece's, recipes train."""

import csv
import gzip
import importlib
import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

ROOT = Path(__file__).resolve().parents[2]
ANIMALS = {"Hund": "dog", "Katze": "cat", "Vogel": "bird", "Fisch": "fish", "Esel": "donkey"}
PLACES = {"Haus": "house", "Garten": "garden", "Wald": "forest", "Feld": "field"}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"experiments.translation.{name}")


@pytest.fixture
def folder(tmp_path):
    """Every sentence of a small language, in the layout of Multi30k and Tatoeba."""
    pairs = [
        (f"Ein {a} läuft durch das {p}.", f"A {b} runs through the {q}.")
        for a, b in ANIMALS.items()
        for p, q in PLACES.items()
    ]
    place = tmp_path / "multi30k"
    place.mkdir()
    for part in ("train", "val"):
        for k, language in enumerate(("de", "en")):
            text = "".join(f"{pair[k]}\n" for pair in pairs).encode()
            (place / f"{part}.{language}.gz").write_bytes(gzip.compress(text))
    (tmp_path / "tatoeba_en_de").mkdir()
    (tmp_path / "tatoeba_en_de" / "pairs.tsv").write_text("Go.\tGeh.\nHi.\tHallo!\n")
    return tmp_path


def test_sentences_stay_with_their_translations(load, folder):
    pairs = load("data").multi30k(folder / "multi30k", "train")
    more = load("data").tatoeba(folder / "tatoeba_en_de")
    assert pairs.german[0] == "Ein Hund läuft durch das Haus."
    assert pairs.english[0] == "A dog runs through the house."
    joined = pairs + more
    assert (joined.german[-1], joined.english[-1]) == ("Hallo!", "Hi.")
    assert len(joined.german) == len(joined.english) == 22


def test_the_tokenizer_says_what_sentencepiece_says(load, folder, monkeypatch):
    import sentencepiece

    data = load("data")
    pairs = data.multi30k(folder / "multi30k", "train")
    seen = []
    original = sentencepiece.SentencePieceProcessor

    def kept(**options):
        seen.append(original(**options))
        return seen[-1]

    monkeypatch.setattr(data.sentencepiece, "SentencePieceProcessor", kept)
    tokenizer = data.tokenizer_of(pairs, 60)
    for text in (*pairs.german, *pairs.english, "Ein  Esel läuft  durch das Feld. "):
        assert tokenizer(text)["input_ids"] == [*seen[0].encode(text), 1]
    ids = tokenizer(pairs.german[0])["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == pairs.german[0]


def test_the_loss_weighs_later_layers_more(load):
    right = torch.tensor([[[9.0, 0.0]]])
    wrong = -right
    targets = torch.tensor([[0]])
    loss_of = load("train").weighted(0.0)
    assert float(loss_of([right, right], targets)) == pytest.approx(0.0, abs=1e-3)
    late, early = loss_of([right, wrong], targets), loss_of([wrong, right], targets)
    assert float(late) == pytest.approx(2 * float(early), rel=1e-3)


@pytest.fixture
def tiny(load, folder, monkeypatch):
    """Give the training command a recipe of a tiny model."""
    train = load("train")
    recipe = (ROOT / "experiments/translation/recipes/t5_multi30k.toml").read_text()
    for old, new in (
        ("vocab_size = 5000", "vocab_size = 60"),
        ("layers = 8", "layers = 2"),
        ("d_model = 224", "d_model = 64"),
        ("d_kv = 56", "d_kv = 16"),
        ("d_ff = 448", "d_ff = 128"),
        ("batch = 256", "batch = 4"),
        ("length = 40", "length = 32"),
        ("dropout_rate = 0.2", "dropout_rate = 0.0"),
    ):
        assert old in recipe
        recipe = recipe.replace(old, new)
    (folder / "recipes").mkdir()
    (folder / "recipes" / "tiny.toml").write_text(recipe)
    monkeypatch.setattr(train, "HERE", folder)
    arguments = ["train", "tiny", "--data", str(folder), "--output", str(folder)]

    def run(epochs):
        monkeypatch.setattr(sys, "argv", [*arguments, "--epochs", str(epochs)])
        train.main()

    return run


def test_what_was_trained_outlasts_a_failed_evaluation(load, folder, tiny, monkeypatch):
    def failing(*_):
        raise OSError("no evaluation")

    monkeypatch.setattr(load("train"), "translations", failing)
    with pytest.raises(OSError, match="no evaluation"):
        tiny(1)
    assert (folder / "tiny" / "model.safetensors").is_file()
    assert (folder / "tiny" / "tokenizer.json").is_file()


@pytest.mark.slow
def test_a_recipe_learns_a_small_language(folder, tiny):
    tiny(40)
    report = json.loads((folder / "tiny" / "report.json").read_text())
    assert report["validation_bleu"] > 90
    assert (folder / "tiny" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_trained_model_is_swept(load, folder, monkeypatch):
    from transformers import T5Config, T5ForConditionalGeneration

    from swiftsure import ThresholdRecord

    data = load("data")
    pairs = data.multi30k(folder / "multi30k", "train")
    tokenizer = data.tokenizer_of(pairs, 60)
    torch.manual_seed(0)
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 3, "num_heads": 2}
    config = T5Config(vocab_size=60, **small, decoder_start_token_id=0, eos_token_id=1)
    T5ForConditionalGeneration(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name in ("test_2016_flickr", "test_2017_flickr", "test_2017_mscoco"):
        for k, language in enumerate(("de", "en")):
            lines = "".join(f"{name[5:9]} {text}\n" for text in pairs[k])
            (folder / "multi30k" / f"{name}.{language}").write_text(lines, encoding="utf-8")
    records = importlib.import_module("experiments.calm.records")
    monkeypatch.setattr(records, "GENERATION", {"max_new_tokens": 6})
    arguments = ["records", "--data", str(folder), "--model", str(folder / "model")]
    arguments += ["--output", str(folder / "out"), "--sentences", "4", "--batch", "4"]
    monkeypatch.setattr(sys, "argv", arguments)
    records.main()
    for score in ("softmax", "saturation", "meta"):
        record = ThresholdRecord.load(folder / "out" / f"t5_multi30k_{score}.parquet")
        assert record.n == 12
        assert set(record.losses) == {"bleu", "rouge_l"}
        assert set(record.costs) >= {"layers", "flops"}
    assert set(json.loads((folder / "out" / "scores.json").read_text())["bleu"]) == set(
        records.PARTS
    )
    (folder / "out" / "t5_multi30k_meta_shards" / "shard-00000.parquet").unlink()
    monkeypatch.setattr(records, "train_meta", None)  # goes on with the classifier that it has
    records.main()


def test_what_is_said_of_the_translator_is_in_its_tables():
    said = (ROOT / "experiments" / "translation" / "README.md").read_text(encoding="utf-8")
    table = (ROOT / "experiments" / "calm" / "results" / "calm_summary.csv").open(encoding="utf-8")
    with table:
        rows = [
            row
            for row in csv.DictReader(table)
            if (row["control"], row["n"]) == ("UCB (STaR)", "1000")
        ]
    for score in ("softmax", "shortlist", "saturation", "meta"):
        cells = [
            f"{float(row['mean_cost']):.1f}, {float(row['flops_gain']):.0f} %"
            for row in rows
            if row["score"] == score and float(row["epsilon"]) in (0.01, 0.02, 0.05, 0.1)
        ]
        assert f"| {' | '.join([score, *cells])} |" in said


def test_what_is_said_of_smollm2_is_in_its_records():
    from swiftsure import ThresholdRecord, calibrate

    rows = {}
    for name, cost in (("calm", "layers"), ("bild", "large_passes")):
        file = "smollm2_meta.parquet" if name == "calm" else "smollm2.parquet"
        record = ThresholdRecord.load(ROOT / "experiments" / name / "results" / file)
        for epsilon in (0.05, 0.1, 0.2, 0.3):
            policy = calibrate(record, risk="consistency", loss="rouge_l", epsilon=epsilon)
            place = int(abs(record.thresholds - policy.threshold).argmin())
            for key in (cost, "flops"):
                means = record.costs[key].mean(axis=0)
                saved = 100 * (1 - means[place] / means[0])
                rows.setdefault(f"{epsilon:g}", []).append(f"{saved:.1f} %")
    said = (ROOT / "experiments" / "translation" / "README.md").read_text(encoding="utf-8")
    for epsilon, cells in rows.items():
        assert f"| {' | '.join([epsilon, *cells])} |" in said


@pytest.mark.slow
def test_a_pair_is_swept(load, folder, monkeypatch):
    from transformers import T5Config, T5ForConditionalGeneration

    from swiftsure import ThresholdRecord

    data = load("data")
    pairs = data.multi30k(folder / "multi30k", "train")
    tokenizer = data.tokenizer_of(pairs, 60)
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2}
    for seed, (name, layers) in enumerate((("large", 3), ("small", 1))):
        torch.manual_seed(seed)
        config = T5Config(
            vocab_size=60, num_layers=layers, **small, decoder_start_token_id=0, eos_token_id=1
        )
        T5ForConditionalGeneration(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    records = importlib.import_module("experiments.bild.records")
    for part in records.PARTS:
        for k, language in enumerate(("de", "en")):
            lines = "".join(f"{part[5:9]} {text}\n" for text in pairs[k])
            (folder / "multi30k" / f"{part}.{language}").write_text(lines, encoding="utf-8")
    arguments = ["records", "--data", str(folder), "--output", str(folder / "out")]
    for name in ("large", "small"):
        arguments += [f"--{name}", str(folder / name)]
    found = []
    for workers in ("1", "2"):
        monkeypatch.setattr(sys, "argv", [*arguments, "--sentences", "2", "--workers", workers])
        records.main()
        found.append(ThresholdRecord.load(folder / "out" / "bild.parquet"))
    for record in found:
        assert record.ids.tolist() == list(range(6))
        assert set(record.losses) == {"bleu", "rouge_l"}
    for name, losses in found[0].losses.items():
        assert (found[1].losses[name] == losses).all()
    timing = importlib.import_module("experiments.bild.seconds")
    file = folder / "out" / "bild.parquet"
    arguments = ["seconds", "--data", str(folder), "--record", str(file), *arguments[5:]]
    monkeypatch.setattr(sys, "argv", [*arguments, "--sentences", "1", "--repeats", "1"])
    timing.main()
    timed = json.loads((folder / "out" / "bild.seconds.json").read_text())
    assert timed["thresholds"] == found[1].thresholds.tolist()
    assert len(timed["seconds"]) == len(timed["thresholds"])
    assert min(timed["seconds"]) > 0


def test_what_is_said_of_drafts_is_in_their_table():
    said = (ROOT / "experiments" / "translation" / "README.md").read_text(encoding="utf-8")
    names = {"UCB (STaR)": "UCB (STaR)", "CRC (monotone)": "CRC (monotone)"}
    names["LTT (Hoeffding-Bentkus)"] = "LTT (HB, zero-bounded)"
    with (ROOT / "experiments" / "bild" / "results" / "bild_costs.csv").open() as table:
        rows = list(csv.DictReader(table))
    for shown, label in names.items():
        cells = [
            f"{float(row['passes of the large model']):.2f}, {float(row['sentences a second']):.1f}"
            for row in rows
            if row["control"] == label and float(row["ε"]) in (0.01, 0.02, 0.05)
        ]
        assert f"| {' | '.join([shown, *cells])} |" in said
