"""ExitRecord: what it takes, what it refuses, and the curves it gives."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import special

import swiftsure as ss
from swiftsure.records import logits as record_logits
from tests.builders import along_path, random_logits, random_record, refused

CONFIDENCES = [[0.9, 0.3], [0.4, 0.8], [0.1, 0.2]]
LOSSES = [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0], [1.0, 0.0, 1.0]]
DISTANCES = [[0.0, 0.5, 0.0], [0.25, 0.0, 0.0], [1.0, 0.0, 0.0]]


def small(**changes):
    arguments = {
        "confidences": CONFIDENCES,
        "losses": {"zero_one": LOSSES},
        "inconsistencies": {"other": DISTANCES},
    }
    return ss.ExitRecord(**{**arguments, **changes})


def test_a_record_holds_what_it_is_given():
    record = small(costs={"flops": [1, 2, 4], "ms": np.ones((3, 3))}, fingerprint="abc")
    assert (record.n, record.n_exits) == (3, 3)
    assert np.array_equal(record.confidences["top1"], np.float32(CONFIDENCES))
    assert np.array_equal(record.losses["zero_one"], LOSSES)
    assert np.array_equal(record.inconsistencies["other"], DISTANCES)
    assert record.costs["flops"].tolist() == [1, 2, 4]
    assert record.costs["ms"].shape == (3, 3)
    assert record.fingerprint == "abc"


def test_defaults():
    record = small()
    assert record.ids.tolist() == [0, 1, 2]
    assert record.groups is None
    assert record.fingerprint is None
    assert {k: v.tolist() for k, v in record.costs.items()} == {"exit": [1, 2, 3]}
    assert record.loss_ranges == {"zero_one": ss.LossRange(0, 1, whole=True)}
    assert record.inconsistency_ranges == {"other": ss.LossRange(0, 1)}


def test_ranges_are_those_given_then_those_of_the_loss_then_zero_to_one():
    record = small(
        losses={"zero_one": LOSSES, "mine": LOSSES, "brier": LOSSES},
        inconsistencies={"mine": DISTANCES, "brier": DISTANCES, "other": DISTANCES},
        loss_ranges={"mine": (0, 3)},
        inconsistency_ranges={"brier": (-2, 2)},
    )
    assert record.loss_ranges["mine"] == ss.LossRange(0, 3)
    assert record.loss_ranges["brier"] == ss.LossRange(0, 2)
    assert record.inconsistency_ranges["mine"] == ss.LossRange(0, 3)
    assert record.inconsistency_ranges["brier"] == ss.LossRange(-2, 2)
    assert record.inconsistency_ranges["other"] == ss.LossRange(0, 1)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(np.float32, np.float32), (np.float64, np.float64), (int, np.float64)]
)
def test_confidences_are_float32_and_losses_keep_their_precision(dtype, kept):
    record = small(losses={"zero_one": np.asarray(LOSSES, dtype)})
    assert record.confidences["top1"].dtype == np.float32
    assert record.losses["zero_one"].dtype == kept
    curve = record.curve(path="breakpoints")
    assert curve.losses().dtype == np.float64


@pytest.mark.parametrize("layout", [np.asfortranarray, lambda a: np.repeat(a, 2, axis=0)[::2]])
def test_any_memory_layout_gives_the_same_curve(layout):
    record = small(
        confidences=layout(np.asarray(CONFIDENCES)), losses={"zero_one": layout(np.asarray(LOSSES))}
    )
    assert np.array_equal(record.curve().losses(), small().curve().losses())


def test_several_scores():
    scores = {"entropy": CONFIDENCES, "margin": np.asarray(CONFIDENCES) / 2}
    record = small(confidences=scores)
    with pytest.raises(ValueError, match="`score` must be given; this record has: entropy, margin"):
        record.curve()
    one = record.curve(score="margin", path=[0.3]).losses()
    assert np.array_equal(one, record.curve(score="entropy", path=[0.6]).losses())
    record = small(confidences={**scores, "top1": CONFIDENCES})
    assert np.array_equal(record.curve(path=[0.6]).losses(), one)  # top1 is preferred


def test_the_loss_must_be_named_where_there_are_several():
    record = small(losses={"zero_one": LOSSES, "mine": LOSSES})
    with pytest.raises(ValueError, match="`loss` must be given; this record has: zero_one, mine"):
        record.curve()
    assert record.curve(loss="mine").statistic.loss == "mine"
    assert record.curve("consistency").statistic.loss == "other"


def test_gap_and_consistency_by_hand():
    settings = [[math.inf, math.inf], [0.8, 0.8], [0.3, 0.3]]
    gap = np.asarray(LOSSES) - np.asarray(LOSSES)[:, -1:]
    curve = small().curve("gap", path=[0.8, 0.3])
    assert np.array_equal(curve.losses(), along_path(gap, CONFIDENCES, settings))
    assert curve.loss_range == ss.LossRange(-1, 1, whole=True)
    assert (curve.statistic.risk, curve.statistic.loss) == ("gap", "zero_one")
    curve = small().curve("consistency", path=[0.8, 0.3])
    assert np.array_equal(curve.losses(), along_path(DISTANCES, CONFIDENCES, settings))
    assert curve.loss_range == ss.LossRange(0, 1)
    assert curve.statistic.risk == "consistency"


def test_options_of_the_curve():
    record = small()
    bounded = record.curve("zero-bounded gap")
    assert bounded.loss_range.binary
    assert np.array_equal(bounded.losses(), np.maximum(record.curve().losses(), 0))
    assert (record.curve(rule=ss.ExitRule(min_exit=2)).losses() == 0).all()
    at_its_own, strict = float(np.float32(0.9)), ss.ExitRule(strict=True)
    assert record.curve(path=[at_its_own]).exit_shares()[1].tolist() == pytest.approx(
        [1 / 3, 0, 2 / 3]
    )
    assert record.curve(path=[at_its_own], rule=strict).exit_shares()[1].tolist() == [0, 0, 1]


def test_the_default_path_is_the_logit_grid():
    curve = small().curve()
    assert np.array_equal(curve.thresholds, ss.Path.logit_grid().thresholds)
    assert curve.path_kind == ss.Path.logit_grid().kind


def test_making_a_curve_leaves_the_record_as_it_was():
    record = random_record()
    before = {k: v.copy() for k, v in record.losses.items()}
    record.curve("zero-bounded gap", "zero_one").shuffled(0)
    assert all(np.array_equal(record.losses[k], before[k]) for k in before)


def test_groups_make_their_means_the_unit():
    curve = small(groups=["b", "a", "b"]).curve(path="breakpoints")
    alone = small().curve(path="breakpoints").losses()
    assert curve.units.grouped
    assert curve.n == 2
    np.testing.assert_allclose(curve.losses(), [alone[1], (alone[0] + alone[2]) / 2])


# Bad input

TRIPLE = np.zeros((3, 3))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"confidences": [0.5, 0.5, 0.5]}, "confidences"),
        ({"confidences": np.empty((0, 2))}, "confidences"),
        ({"confidences": np.empty((3, 0))}, "confidences"),
        ({"confidences": np.full((3, 2), 1.01)}, "confidences"),
        ({"confidences": np.full((3, 2), -0.01)}, "confidences"),
        ({"confidences": np.full((3, 2), math.nan)}, "confidences"),
        ({"confidences": np.full((3, 2), math.inf)}, "confidences"),
        ({"confidences": [["a", "b"]] * 3}, "confidences"),
        ({"confidences": {}}, "confidences"),
        ({"confidences": {"a": CONFIDENCES, "b": [[0.5, 0.5]]}}, "confidences"),
        ({"losses": {"mine": TRIPLE[:, :2]}}, "losses"),
        ({"losses": {"mine": TRIPLE[:2]}}, "losses"),
        ({"losses": {"mine": TRIPLE[0]}}, "losses"),
        ({"losses": {"mine": TRIPLE + math.nan}}, "losses"),
        ({"losses": {"mine": TRIPLE + math.inf}}, "losses"),
        ({"losses": {"mine": TRIPLE + 1.1}}, "losses"),
        ({"losses": {"mine": TRIPLE - 0.1}}, "losses"),
        ({"losses": {"zero_one": TRIPLE + 0.5}}, "losses"),
        ({"losses": {"mine": [["a"] * 3] * 3}}, "losses"),
        ({"losses": {}, "inconsistencies": {}}, "losses"),
        ({"inconsistencies": {"other": TRIPLE + 0.1}}, "inconsistencies"),
        ({"inconsistencies": {"other": TRIPLE[:2]}}, "inconsistencies"),
        ({"inconsistencies": {"other": TRIPLE + math.nan}}, "inconsistencies"),
        ({"costs": {"flops": [1, 2]}}, "costs"),
        ({"costs": {"flops": [1, 2, -3]}}, "costs"),
        ({"costs": {"flops": [1, 2, math.inf]}}, "costs"),
        ({"costs": {"flops": np.ones((2, 3))}}, "costs"),
        ({"loss_ranges": {"zero_one": (1, 0)}}, "loss_range"),
        ({"ids": [1, 2]}, "ids"),
        ({"ids": [1, 2, 1]}, "ids"),
        ({"ids": ["a", "b", "a"]}, "ids"),
        ({"ids": [0.5, 1.5, 2.5]}, "ids"),
        ({"temperatures": [1.0, 2.0]}, "temperatures"),
        ({"temperatures": [1.0, 2.0, 0.0]}, "temperatures"),
        ({"temperatures": [1.0, 2.0, math.nan]}, "temperatures"),
        ({"groups": [1, 2]}, "groups"),
        ({"groups": [0.5, 1.5, 2.5]}, "groups"),
    ],
)
def test_bad_input_is_refused_by_name(changes, name):
    with refused(name):
        small(**changes)


def test_losses_past_their_range_by_rounding_are_clipped():
    record = small(losses={"brier": TRIPLE + 2.0000019})
    assert record.losses["brier"].max() == 2.0
    with refused("losses"):
        small(losses={"brier": TRIPLE + 2.0000021})


def test_the_last_column_of_inconsistencies_is_the_full_model_with_itself():
    with pytest.raises(
        ValueError,
        match=r"`inconsistencies\['other'\]` must be 0 in column 2, the full model.* 0\.25",
    ):
        small(inconsistencies={"other": [[0, 0, 0.25]] * 3})


def test_shape_errors_name_the_table_and_both_shapes():
    with pytest.raises(
        ValueError,
        match=r"`losses\['mine'\]` .*\(n=3, n_exits=3\), but got \(3, 2\)\. .* none for the last",
    ):
        small(losses={"mine": TRIPLE[:, :2]})
    with pytest.raises(
        ValueError, match=r"`confidences\['b'\]` .*\(n=3, n_exits - 1=2\).*\(1, 2\)"
    ):
        small(confidences={"a": CONFIDENCES, "b": [[0.5, 0.5]]})


def test_an_id_used_twice_is_named():
    with pytest.raises(ValueError, match="`ids` must be unique, but x7 is used 2 times"):
        small(ids=["x7", "x8", "x7"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"risk": "gaps"}, "`risk` must be one of: gap, consistency, .* Did you mean 'gap'"),
        ({"loss": "zero-one"}, "`loss` must be one of: zero_one; .* Did you mean 'zero_one'"),
        ({"loss": "other"}, "`loss` must be one of: zero_one"),
        ({"score": "top2"}, "`score` must be one of: top1; .* Did you mean 'top1'"),
        ({"path": "grid"}, "`path` must be one of: logit, breakpoints"),
        ({"path": [[0.5, 0.5, 0.5]]}, r"`path` .*\(K, n_exits - 1=2\), but got \(2, 3\)"),
        ({"rule": ss.ExitRule("top2")}, "`score` must be one of: top1; .* Did you mean 'top1'"),
    ],
)
def test_bad_options_of_the_curve_are_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        small().curve(**arguments)


def test_a_record_without_losses_has_no_gap():
    for loss in (None, "zero_one"):
        with pytest.raises(
            ValueError, match=r"no losses against labels, .* ask for the risk 'consistency'"
        ):
            small(losses={}).curve("gap", loss)


# What users have at hand


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"])
def test_labels_of_any_integers(dtype):
    logits, labels = random_logits(30)
    expected = ss.ExitRecord.from_logits(logits, labels).losses
    found = ss.ExitRecord.from_logits(logits, labels.astype(dtype)).losses
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


def test_tensors_that_learn_or_are_short():
    torch = pytest.importorskip("torch")
    logits = torch.randn(9, 2, 3, requires_grad=True)
    labels = torch.zeros(9, dtype=torch.uint8)
    short = ss.ExitRecord.from_logits(logits.bfloat16(), labels, losses="brier")
    plain = ss.ExitRecord.from_logits(logits.detach().bfloat16().float().numpy(), labels)
    np.testing.assert_array_equal(short.losses["brier"], plain.losses["brier"])
    assert list(short.losses) == ["brier"]


def test_rounding_may_carry_a_confidence_past_one():
    above = np.nextafter(np.float32(1), np.float32(2))
    given = np.full((3, 2), [above, -1e-9])
    assert small(confidences=given).confidences["top1"].tolist() == [[1, 0]] * 3
    with pytest.raises(ValueError, match=r"`confidences\['top1'\]` must lie in \[0, 1\]"):
        small(confidences=given + 1e-4)


@pytest.mark.parametrize("changes", [{"losses": [[0, 0]]}, {"costs": [1, 2]}])
def test_what_must_have_names(changes):
    with pytest.raises(TypeError, match="must be a mapping of names to arrays, but got a list"):
        small(**changes)


def test_records_are_compared_by_identity():
    record = small()
    assert record == record
    assert record != small()


def test_a_record_is_no_npz(tmp_path):
    with refused("path"):
        small().save(tmp_path / "a.npz")
    assert not list(tmp_path.iterdir())


# Parts of a record


@pytest.mark.parametrize(
    "rows", [[2, 0], np.asarray([2, 0]), np.asarray([True, False, True]), [-1]]
)
def test_take_selects_by_position(rows):
    record = small(
        costs={"ms": np.arange(9.0).reshape(3, 3), "flops": [1, 2, 3]},
        ids=["a", "b", "c"],
        groups=[5, 6, 7],
        fingerprint="abc",
        inconsistency_ranges={"other": (-1, 2)},
    )
    part = record.take(rows)
    index = np.arange(3)[rows]
    assert part.ids.tolist() == record.ids[index].tolist()
    assert part.groups.tolist() == record.groups[index].tolist()
    assert np.array_equal(part.confidences["top1"], record.confidences["top1"][index])
    assert np.array_equal(part.losses["zero_one"], record.losses["zero_one"][index])
    assert np.array_equal(part.inconsistencies["other"], record.inconsistencies["other"][index])
    assert np.array_equal(part.costs["ms"], record.costs["ms"][index])
    assert np.array_equal(part.costs["flops"], record.costs["flops"])
    assert part.inconsistency_ranges == record.inconsistency_ranges
    assert part.fingerprint == "abc"


def test_take_refuses_a_sample_twice():
    with refused("ids"):
        small().take([0, 0])


def test_take_of_nothing_is_refused_by_name():
    with pytest.raises(ValueError, match="must not be empty"):
        small().take([])


def halves(groups=None, **changes):
    """A record of 40 samples, and its two halves."""
    logits, labels = random_logits(n=40)
    arguments = {"temperatures": [1.0, 2.0, 1.0, 1.0], "ids": np.arange(40), **changes}
    record = ss.ExitRecord.from_logits(
        logits,
        labels,
        costs={"ms": labels[:, None] + np.ones(4), "flops": [1, 2, 3, 4]},
        **arguments,
    )
    record = replace(record, groups=groups)
    return record, [record.take(np.arange(20)), record.take(np.arange(20, 40))]


@pytest.mark.parametrize("groups", [None, np.arange(40) // 2])
def test_records_of_one_model_are_joined(groups):
    record, parts = halves(groups=groups)
    joined = ss.ExitRecord.concatenate(parts)
    for table in ("confidences", "losses", "inconsistencies", "costs"):
        assert list(getattr(joined, table)) == list(getattr(record, table))
        for name, values in getattr(record, table).items():
            assert np.array_equal(getattr(joined, table)[name], values)
    assert np.array_equal(joined.ids, record.ids)
    assert np.array_equal(joined.groups, record.groups)
    assert joined.temperatures == (1.0, 2.0, 1.0, 1.0)
    assert joined.loss_ranges == record.loss_ranges


def test_records_that_differ_are_not_joined():
    _, (first, second) = halves()
    with refused("ids"):
        ss.ExitRecord.concatenate([first, first])
    with pytest.raises(ValueError, match="`records` must agree in `temperatures`"):
        ss.ExitRecord.concatenate([first, halves(temperatures=1.0)[1][1]])
    with pytest.raises(ValueError, match="`records` must agree in `confidences`"):
        ss.ExitRecord.concatenate([first, halves(score="entropy")[1][1]])
    with pytest.raises(ValueError, match="`records` must agree in `loss_ranges`"):
        ss.ExitRecord.concatenate([first, halves(losses=["brier"])[1][1]])
    with pytest.raises(ValueError, match="`records` must agree in `fingerprint`"):
        ss.ExitRecord.concatenate([first, replace(second, fingerprint="abc")])


def test_records_of_other_costs_are_not_joined():
    _, (first, second) = halves()
    other = replace(second, costs={**second.costs, "flops": [5, 6, 7, 8]})
    with refused("records"):
        ss.ExitRecord.concatenate([first, other])


# From logits


def test_costs_of_single_stages_are_suspected():
    logits = np.zeros((4, 3, 2))
    for costs in ([3.0, 2.0, 1.0], [[1, 2, 3], [9, 2, 3], [1, 2, 3], [1, 2, 3]]):
        with pytest.warns(UserWarning, match=r"costs\['ms'\] fall .* add them up") as caught:
            ss.ExitRecord.from_logits(logits, costs={"ms": costs})
        assert len(caught) == 1
    # Times are measured: one of four samples may well be faster at a later exit.
    noisy = [[1, 2, 3], [3, 2, 3], [1, 2, 3], [1, 2, 3]]
    ss.ExitRecord.from_logits(logits, costs={"ms": noisy, "flops": [2.0, 2.0, 3.0]})


def test_probabilities_in_place_of_logits_are_suspected():
    p = np.asarray([[[0.9, 0.1], [0.75, 0.25]], [[0.5, 0.5], [0.0, 1.0]]])
    with pytest.warns(UserWarning, match="look like probabilities"):
        ss.ExitRecord.from_logits(p)
    ss.ExitRecord.from_logits(p * 2)


def test_errors_say_what_to_do_next():
    logits = np.zeros((5, 3, 4))
    with pytest.raises(ValueError, match=r"shape \(5,\), one per sample of `logits`"):
        ss.ExitRecord.from_logits(logits, [0, 1, 2])
    with pytest.raises(ValueError, match=r"`labels` must be 0 to 3, because there are 4 classes"):
        ss.ExitRecord.from_logits(logits, [0, 1, 2, 3, 4])
    with pytest.raises(TypeError, match=r"`costs` must be a mapping of names to arrays, .* list"):
        ss.ExitRecord.from_logits(logits, costs=[1, 2, 3])
    for place in ("losses", "inconsistencies"):
        ranges = "loss_ranges" if place == "losses" else "inconsistency_ranges"
        with pytest.raises(ValueError, match=rf"declare its range: {ranges}={{'euros': \(low"):
            small(**{place: {"euros": [[4.0, 0, 0]] * 3}})


def test_from_logits_by_hand():
    logits, labels = random_logits(n=40)
    record = ss.ExitRecord.from_logits(logits, labels)
    p = special.softmax(logits, axis=-1)
    one_hot = np.eye(5)[labels][:, None]
    np.testing.assert_allclose(record.confidences["top1"], p[:, :-1].max(axis=-1), rtol=1e-6)
    assert np.array_equal(record.losses["zero_one"], p.argmax(axis=-1) != labels[:, None])
    np.testing.assert_allclose(record.losses["brier"], ((p - one_hot) ** 2).sum(axis=-1))
    last = p[:, -1:]
    agree = p.argmax(axis=-1) == last.argmax(axis=-1)
    assert np.array_equal(record.inconsistencies["zero_one"], ~agree)
    np.testing.assert_allclose(record.inconsistencies["brier"], ((p - last) ** 2).sum(axis=-1))
    assert list(record.confidences) == ["top1"]


def test_from_logits_takes_several_scores_and_few_losses():
    logits, labels = random_logits(n=40)
    record = ss.ExitRecord.from_logits(
        logits,
        labels,
        score=["entropy", "top_diff"],
        losses=["brier"],
        costs={"flops": [1, 2, 3, 4]},
        ids=np.arange(40) + 7,
    )
    assert list(record.confidences) == ["entropy", "top_diff"]
    assert list(record.losses) == list(record.inconsistencies) == ["brier"]
    assert record.costs["flops"].tolist() == [1, 2, 3, 4]
    assert record.ids[0] == 7


def test_from_logits_divides_by_temperatures():
    logits, labels = random_logits(n=40)
    scale = np.asarray([0.5, 1.0, 2.0, 4.0])
    tempered = ss.ExitRecord.from_logits(logits, labels, temperatures=scale)
    plain = ss.ExitRecord.from_logits(logits / scale[:, None], labels)
    for name in ("zero_one", "brier"):
        np.testing.assert_allclose(tempered.losses[name], plain.losses[name])
    np.testing.assert_allclose(tempered.confidences["top1"], plain.confidences["top1"], rtol=1e-6)
    assert tempered.temperatures == (0.5, 1.0, 2.0, 4.0)
    assert plain.temperatures is None
    assert ss.ExitRecord.from_logits(logits, temperatures=2).temperatures == (2.0,) * 4


def test_from_logits_without_labels_has_consistency_only():
    record = ss.ExitRecord.from_logits(random_logits(n=40)[0])
    assert record.losses == {}
    assert set(record.inconsistencies) == {"zero_one", "brier"}
    assert record.curve("consistency", "brier").n == 40


@pytest.mark.parametrize("label", ["expected", "sample", "argmax"])
def test_from_logits_works_by_chunks(monkeypatch, label):
    logits, labels = random_logits(n=50)
    labels[::3] = -1
    whole = ss.ExitRecord.from_logits(logits, labels, label=label)
    monkeypatch.setattr(record_logits, "CHUNK", 7 if label == "expected" else 50)
    parts = ss.ExitRecord.from_logits(logits, labels, label=label)
    assert np.array_equal(parts.predictions, whole.predictions)
    for table in ("confidences", "losses", "inconsistencies"):
        for name, values in getattr(whole, table).items():
            np.testing.assert_array_equal(getattr(parts, table)[name], values)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int64])
def test_from_logits_computes_in_float64(dtype):
    logits = (4 * random_logits(n=40)[0]).astype(dtype)
    record = ss.ExitRecord.from_logits(logits)
    expected = ss.ExitRecord.from_logits(logits.astype(np.float64))
    assert np.array_equal(record.inconsistencies["brier"], expected.inconsistencies["brier"])


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"logits": np.zeros((3, 2))}, "logits"),
        ({"logits": np.zeros((0, 2, 2))}, "logits"),
        ({"logits": np.zeros((3, 1, 2))}, "logits"),
        ({"logits": np.zeros((3, 2, 1))}, "logits"),
        ({"logits": np.full((3, 2, 2), math.nan)}, "logits"),
        ({"logits": np.full((3, 2, 2), math.inf)}, "logits"),
        ({"logits": [["a"]]}, "logits"),
        ({"labels": [0, 1]}, "labels"),
        ({"labels": [0, 1, 2]}, "labels"),
        ({"labels": [0, 1, 0.5]}, "labels"),
        ({"labels": [0, 1, math.inf]}, "labels"),
        ({"labels": ["a", "b", "c"]}, "labels"),
        ({"score": "top_1"}, "score"),
        ({"score": ["top1", "nope"]}, "score"),
        ({"losses": ["brie"]}, "losses"),
        ({"label": "max"}, "label"),
        ({"temperatures": 0.0}, "temperatures"),
        ({"temperatures": -1.0}, "temperatures"),
        ({"temperatures": math.nan}, "temperatures"),
        ({"temperatures": [1.0, 1.0, 1.0]}, "temperatures"),
        ({"ids": [0, 0, 1]}, "ids"),
        ({"costs": {"flops": [1]}}, "costs"),
    ],
)
def test_from_logits_refuses_bad_input_by_name(changes, name):
    with refused(name):
        ss.ExitRecord.from_logits(**{"logits": np.zeros((3, 2, 2)), **changes})


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(
        ValueError, match=r"`losses` must be one of: .*brier.* Did you mean 'brier'"
    ):
        ss.ExitRecord.from_logits(np.zeros((3, 2, 2)), losses=["brie"])
    with pytest.raises(
        ValueError, match=r"`score` must be one of: .*entropy.* Did you mean 'entropy'"
    ):
        ss.ExitRecord.from_logits(np.zeros((3, 2, 2)), score="entrop")


def test_text_of_a_data_frame_names_samples():
    names = np.asarray(["a", "b", "c"], object)
    record = ss.ExitRecord(np.full((3, 1), 0.5), losses={"x": np.zeros((3, 2))}, ids=names)
    assert record.ids.tolist() == ["a", "b", "c"]
    assert record.ids.dtype.kind == "U"


def test_a_record_is_shown_in_one_line():
    record = ss.ExitRecord(np.full((3, 1), 0.5), losses={"x": np.zeros((3, 2))})
    assert repr(record) == (
        "ExitRecord(n=3, n_exits=2, confidences=['top1'], losses=['x'], inconsistencies=[],"
        " costs=['exit'])"
    )
    record = ss.ThresholdRecord([1.0, 0.5], losses={"x": np.zeros((3, 2))})
    assert repr(record) == ("ThresholdRecord(n=3, K=2, losses=['x'], inconsistencies=[], costs=[])")
