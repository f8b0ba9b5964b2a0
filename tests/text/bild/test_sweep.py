"""Sweeps of a pair: what K separate runs would have recorded, for less, and after a kill."""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.losses import LOSSES
from swiftsure.text import (
    BigLittle,
    CalmModel,
    Rollback,
    Speculative,
    Texts,
    fit_exit_heads,
    pair_fingerprint,
    self_draft,
    sweep,
    sweep_pair,
)
from swiftsure.text.bild.model import Passage
from swiftsure.text.bild.readers import ModelReader
from swiftsure.text.inputs import encode
from tests.text.bild.drafting import PAIRS, near
from tests.text.builders import EOS, llama, t5
from tests.text.tokenizing import texts, tokenizer

GRID = [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0, 15.0]
N = 5
EAGER = Rollback(None, fallback=0.1, max_draft=4)


def one_by_one(large, small, rule, grid):
    """The same record from one run for each text and level; the first by the large model alone."""
    words = tokenizer()
    answers, large_passes, small_passes, flops = [], [], [], []
    for k, text in enumerate(texts(N)):
        source = encode([text], words, large)["input_ids"]
        runs = [
            BigLittle(large, small, rule.at(level))
            .generate(source, max_new_tokens=8, sequence_ids=[k])
            .runs[0]
            for level in [0.0 if rule.samples else None, *grid[1:]]
        ]
        answers.append(words.batch_decode([r.tokens for r in runs], skip_special_tokens=True))
        large_passes.append([1, *(r.large_passes / len(r.tokens) for r in runs[1:])])
        small_passes.append([0, *(r.small_passes / len(r.tokens) for r in runs[1:])])
        flops.append([runs[0].alone_flops, *(r.flops for r in runs[1:])])
    costs = {"large_passes": large_passes, "small_passes": small_passes, "flops": flops}
    return np.asarray(answers, object), costs


@pytest.mark.parametrize(
    ("name", "rule", "grid"),
    [
        ("T5", EAGER, GRID),
        ("Llama", EAGER, GRID),
        ("T5", Rollback(None, fallback=0.1, max_draft=4, published=True), GRID),
        ("Llama", Speculative(temperature=1.5), [0.0, 0.02, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0]),
    ],
)
def test_a_sweep_is_one_run_for_each_level(name, rule, grid, monkeypatch):
    large, small = PAIRS[name]()
    answers, costs = one_by_one(large, small, rule, grid)
    runs = []
    run = Passage.run

    def counting(self, rule):
        runs.append(rule.level)
        return run(self, rule)

    monkeypatch.setattr(Passage, "run", counting)
    record = sweep_pair(
        BigLittle(large, small, rule),
        Texts(texts(N), tokenizer(), texts(N, seed=1)),
        thresholds=grid[1:],  # 0 is put before them
        losses=["token_f1", "rouge_l", "bleu"],
        max_new_tokens=8,
    )
    assert record.thresholds.tolist() == grid
    f1 = LOSSES["token_f1"]
    wanted = f1.against_labels(answers, texts(N, seed=1))
    np.testing.assert_allclose(record.losses["token_f1"], wanted)
    wanted = f1.against_labels(answers, answers[:, 0].tolist())
    np.testing.assert_allclose(record.inconsistencies["token_f1"], wanted)
    assert record.inconsistencies["bleu"].max() > 0
    assert set(record.costs) == set(costs)
    for key, values in costs.items():
        np.testing.assert_allclose(record.costs[key], values)
    assert len(runs) < N * len(grid) * 0.9
    if rule == EAGER:
        assert (record.inconsistencies["token_f1"][:, 1] == 0).all()  # 0.5 is below log 2
    assert record.dial == rule.dial
    assert record.fingerprint == pair_fingerprint(large, small)


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_models_run_once_on_what_runs_have_in_common(name, monkeypatch):
    pair = BigLittle(*PAIRS[name](), EAGER)
    source = encode(texts(1), tokenizer(), pair.large)["input_ids"]
    ran = []
    run = ModelReader._run

    def counting(self, new, last):
        ran.append(len(new))
        return run(self, new, last)

    monkeypatch.setattr(ModelReader, "_run", counting)
    found = []
    for remember in (False, True):
        passage = pair.passage(source, max_new_tokens=12, remember=remember)
        runs = [passage.run(EAGER.at(level)) for level in [None, *GRID, *GRID]]
        found.append(([(each.tokens, each.flops, each.large_passes) for each in runs], len(ran)))
        ran.clear()
    (apart, passes), (together, fewer) = found
    assert together == apart
    assert fewer < passes / 3


def small_sweep(pair, given=None, *, rule=EAGER, tokenizers=None, **options):
    known = {"thresholds": [0.5, 4.0], "max_new_tokens": 6, "losses": ["rouge_l"]}
    made = BigLittle(*pair, rule, tokenizers=tokenizers)
    return sweep_pair(made, given or Texts(texts(5), tokenizer()), **known | options)


def test_the_fallback_threshold_of_the_paper():
    record = small_sweep(PAIRS["T5"](), given=Texts(texts(2), tokenizer()), rule=None)
    assert record.settings["fallback"] == 0.5
    assert record.settings["scheme"] == "rollback"


@pytest.mark.parametrize("ids", [None, [0, 1]])
def test_a_sweep_remembers_whether_ids_were_given(ids, tmp_path):
    record = small_sweep(
        PAIRS["T5"](),
        Texts(texts(2), tokenizer(), ids=ids),
        run=ss.RunOptions(shards=tmp_path, shard_size=1),
    )
    assert record.ids.tolist() == [0, 1]
    assert record.has_ids == (ids is not None)


@pytest.fixture(scope="module")
def calibrated():
    pair = PAIRS["T5"]()
    record = small_sweep(pair, Texts(texts(40), tokenizer()))
    return pair, record, ss.calibrate(record, risk="consistency", loss="rouge_l", epsilon=0.5)


def test_from_a_record_to_generation(calibrated, tmp_path):
    """The whole way: sweep, calibrate, save, load, generate."""
    pair, record, policy = calibrated
    record.save(tmp_path / "record.parquet")
    assert ss.ThresholdRecord.load(tmp_path / "record.parquet").settings == record.settings
    policy.save(tmp_path / "policy.json")
    loaded = ss.Policy.load(tmp_path / "policy.json")
    assert loaded.threshold in (0.5, 4.0)
    assert loaded.settings["rollback"] == loaded.threshold
    assert loaded.settings["fallback"] == 0.1
    assert "large_passes" in str(loaded)
    fast = BigLittle(*pair, loaded)
    assert fast.rule == Rollback(loaded.threshold, fallback=0.1, max_draft=4)
    given = encode(texts(3), tokenizer(), pair[0])
    output = fast.generate(**given)
    assert output.lengths.max() <= 6
    same = BigLittle(*pair, fast.rule).generate(**given, max_new_tokens=6)
    assert output.runs == same.runs
    assert fast.generate(**given, max_new_tokens=6).runs == same.runs


def test_nothing_certified_is_the_large_model_alone(calibrated):
    pair, record, _ = calibrated
    policy = ss.calibrate(record.take(range(3)), risk="consistency", loss="rouge_l", epsilon=0.01)
    assert policy.threshold is None
    assert policy.settings["rollback"] == 0
    fast = BigLittle(*pair, policy)
    output = fast.generate(**encode(texts(2), tokenizer(), pair[0]))
    assert (output.large_passes == 1).all()
    assert (output.small_passes == 0).all()


def test_policies_of_others(calibrated):
    (large, small), _, policy = calibrated
    for pair in [(large, near(small)), (t5(7, layers=2), small), (small, large)]:
        with pytest.raises(ValueError, match="made for another model"):
            BigLittle(*pair, policy)
    with pytest.raises(ValueError, match="made for max_new_tokens=6, but got 7"):
        BigLittle(large, small, policy).generate(
            **encode(texts(1), tokenizer(), large), max_new_tokens=7
        )
    fast = BigLittle(large, small, policy)
    given = encode(texts(1), tokenizer(), large)
    with pytest.raises(ValueError, match=f"made for eos_token_id={EOS}, but got None"):
        fast.generate(**given, eos_token_id=None)
    assert fast.generate(**given, eos_token_id=[EOS]).runs == fast.generate(**given).runs
    exits = sweep(
        CalmModel(large),
        Texts(texts(3), tokenizer()),
        thresholds=[0.5],
        generation={"max_new_tokens": 3},
    )
    with pytest.raises(ValueError, match="not made for bild but for calm"):
        BigLittle(large, small, ss.calibrate(exits, risk="consistency", epsilon=0.5))


def test_a_killed_sweep_goes_on(tmp_path, monkeypatch):
    pair = PAIRS["Llama"]()
    given = Texts(texts(5), tokenizer(), texts(5, seed=1))
    wanted = small_sweep(pair, given)
    options = {"given": given, "run": ss.RunOptions(shards=tmp_path / "shards", shard_size=2)}
    encoded = []

    def killing(given, *rest):
        encoded.append(given)
        if len(encoded) == 4:
            raise KeyboardInterrupt
        return encode(given, *rest)

    monkeypatch.setattr("swiftsure.text.inputs.encode", killing)
    with pytest.raises(KeyboardInterrupt):
        small_sweep(pair, **options)
    assert len(list((tmp_path / "shards").glob("*.parquet"))) == 1
    record = small_sweep(pair, **options)
    assert len(encoded) == 4 + 3  # the first shard's two texts were not run again
    for name in ("losses", "inconsistencies", "costs"):
        for key, values in getattr(wanted, name).items():
            np.testing.assert_allclose(getattr(record, name)[key], values)
    assert record.ids.tolist() == wanted.ids.tolist()
    with pytest.raises(ValueError, match="another run, with other thresholds"):
        small_sweep(pair, **options, thresholds=[0.6, 4.0])
    with pytest.raises(ValueError, match="another run, with other data"):
        small_sweep(pair, **options | {"given": Texts(texts(5), tokenizer())})
    with pytest.raises(ValueError, match="another run, with other settings"):
        small_sweep(pair, **options, rule=Rollback(None, fallback=0.2))
    with pytest.raises(ValueError, match="another run, with other model"):
        small_sweep((pair[0], pair[0]), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"given": Texts(["w03", " "], tokenizer())},
            "`texts` must not be empty, but number 1 is",
        ),
        ({"thresholds": [2.0, 1.0]}, "must rise"),
        ({"thresholds": [-1.0, 1.0]}, "`threshold` must be at least 0"),
        ({"thresholds": []}, "list of numbers"),
        ({"thresholds": [0.5, 2.0], "rule": Speculative()}, r"`tolerance` must be in \[0, 1\]"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1"),
        ({"losses": ["rouge"]}, "Did you mean 'rouge_l'"),
    ],
)
def test_what_cannot_be_swept(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small_sweep(PAIRS["T5"](), run=ss.RunOptions(shards=tmp_path, shard_size=1), **options)
    assert not list(tmp_path.iterdir())  # nothing was run


def test_texts_that_the_draft_was_fitted_on():
    model, words, given = llama(layers=4), tokenizer(), texts(N)
    heads, others = (
        fit_exit_heads(model, Texts(given[:n], words), exits=[1], max_new_tokens=4) for n in (2, 1)
    )
    draft = self_draft(model, 2, heads=heads)
    options = {"thresholds": [1.0], "max_new_tokens": 4}
    with pytest.raises(
        ValueError, match=r"new to the draft's head, which saw 1 of them .*number 1"
    ):
        sweep_pair(BigLittle(model, draft), Texts([given[3], given[1]], words), **options)
    record = sweep_pair(BigLittle(model, draft), Texts(given[2:], words), **options)
    assert record.n == N - 2
    # What is certified with this head is not certified with another, or with none.
    drafts = [draft, self_draft(model, 2, heads=others), self_draft(model, 2)]
    found = [pair_fingerprint(model, small) for small in drafts]
    assert record.fingerprint == found[0]
    assert len(set(found)) == 3


def test_another_tokenizer():
    other = tokenizer()
    other.add_tokens(["w99"])
    with pytest.raises(ValueError, match="token 48 is missing"):
        small_sweep(PAIRS["T5"](), tokenizers=(tokenizer(), other))
