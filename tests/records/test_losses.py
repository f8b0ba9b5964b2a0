"""Losses by hand, their ranges, and how a new one is added."""

import dataclasses

import numpy as np
import pytest

import swiftsure as ss
from swiftsure import losses
from swiftsure.losses import VOID, classification, segmentation
from swiftsure.scores import probabilities
from tests.builders import random_logits, refused

P = np.asarray([[[0.7, 0.2, 0.1], [0.3, 0.6, 0.1]], [[0.2, 0.2, 0.6], [0.5, 0.5, 0.0]]])
LABELS = np.asarray([0, 1])


def test_zero_one_by_hand():
    assert classification.zero_one(P, LABELS).tolist() == [[0, 1], [1, 1]]  # the first of a tie


def test_brier_by_hand():
    expected = [
        [0.3**2 + 0.2**2 + 0.1**2, 0.7**2 + 0.6**2 + 0.1**2],
        [0.2**2 + 0.8**2 + 0.6**2, 0.5**2 + 0.5**2],
    ]
    np.testing.assert_allclose(classification.brier(P, LABELS), expected)


def test_brier_reaches_both_ends_of_its_range():
    one_hot = np.asarray([[[1.0, 0.0], [0.0, 1.0]]])
    assert classification.brier(one_hot, np.asarray([0])).tolist() == [[0.0, 2.0]]
    assert (losses.BRIER.range.low, losses.BRIER.range.high) == (0.0, 2.0)


def test_zero_one_inconsistency_by_hand():
    assert classification.zero_one_inconsistency(P).tolist() == [[1, 0], [1, 0]]


def test_brier_inconsistency_by_hand():
    expected = [[0.4**2 + 0.4**2, 0], [0.3**2 + 0.3**2 + 0.6**2, 0]]
    np.testing.assert_allclose(classification.brier_inconsistency(P), expected)


def test_brier_inconsistency_is_the_mean_over_labels_drawn_from_the_last_exit():
    p = probabilities(random_logits(n=50)[0])
    mean = sum(
        p[:, -1, label, None] * (losses - losses[:, -1:])
        for label in range(p.shape[-1])
        for losses in [classification.brier(p, np.full(len(p), label))]
    )
    np.testing.assert_allclose(classification.brier_inconsistency(p), mean, atol=1e-12)


# Segmentation: one image of 2 x 2 pixels, whose last pixel is void

PIXELS = np.asarray([[[[0.7, 0.2, 0.1], [0.3, 0.6, 0.1]], [[0.2, 0.7, 0.1], [0.0, 0.0, 1.0]]]])
PIXELS = np.stack([PIXELS, np.roll(PIXELS, 1, axis=-1)], axis=1)  # predicts 0 1 1 2, and 1 2 2 0
PIXEL_LABELS = np.asarray([[[0, 0], [1, VOID]]])


def test_miou_by_hand():
    """Class 2 is in neither, for the void pixel does not count; at the second exit it is."""
    found = losses.MIOU.against_labels(PIXELS, PIXEL_LABELS)
    np.testing.assert_allclose(found, [[1 - (1 / 2 + 1 / 2) / 2, 1.0]])


def test_miou_counts_classes_of_prediction_or_label():
    one_hot = np.eye(4)[np.asarray([[[[0, 0, 0, 1]]]])]  # (1, 1, 1, 4, 4)
    labels = np.asarray([[[0, 0, 2, 2]]])
    # 2 of 3 for class 0, 0 of 1 for class 1, 0 of 2 for class 2; class 3 is nowhere
    assert losses.MIOU.against_labels(one_hot, labels).item() == pytest.approx(1 - (2 / 3) / 3)


def test_miscoverage_by_hand():
    np.testing.assert_allclose(
        losses.MISCOVERAGE.against_labels(PIXELS, PIXEL_LABELS), [[1 / 3, 1.0]]
    )


def test_pixel_brier_by_hand():
    first = [0.3**2 + 0.2**2 + 0.1**2, 0.7**2 + 0.6**2 + 0.1**2, 0.2**2 + 0.3**2 + 0.1**2]
    found = segmentation.pixel_brier(PIXELS, PIXEL_LABELS)
    assert found[0, 0] == pytest.approx(sum(first) / 3)


def test_inconsistencies_count_all_pixels():
    assert losses.MISCOVERAGE.against_last(PIXELS).tolist() == [[1.0, 0.0]]
    # 0 1 1 2 against 1 2 2 0: the classes are all there, and never in the same place
    assert losses.MIOU.against_last(PIXELS).tolist() == [[1.0, 0.0]]
    distance = np.square(PIXELS[0, 0] - PIXELS[0, 1]).sum(axis=-1).mean()
    np.testing.assert_allclose(segmentation.pixel_brier_inconsistency(PIXELS), [[distance, 0]])


def test_pixel_brier_is_the_mean_of_the_pixels_brier():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), size=(2, 3, 5, 7))
    labels = rng.integers(4, size=(2, 5, 7))
    flat = [
        classification.brier(q.reshape(3, 35, 4).swapaxes(0, 1), y.ravel())
        for q, y in zip(p, labels, strict=True)
    ]
    np.testing.assert_allclose(segmentation.pixel_brier(p, labels), np.mean(flat, axis=1))
    flat = [classification.brier_inconsistency(q.reshape(3, 35, 4).swapaxes(0, 1)) for q in p]
    np.testing.assert_allclose(segmentation.pixel_brier_inconsistency(p), np.mean(flat, axis=1))


@pytest.mark.parametrize("void", [VOID, -1, -100])
@pytest.mark.parametrize("name", ["miou", "miscoverage", "pixel_brier"])
def test_what_is_void_is_never_seen(name, void):
    labels = PIXEL_LABELS.copy()
    labels[0, 1, 1] = void
    other = PIXELS.copy()
    other[:, :, 1, 1] = [0.0, 1.0, 0.0]
    against = losses.LOSSES[name].against_labels
    assert np.array_equal(against(PIXELS, labels), against(other, labels))


@pytest.mark.parametrize("dtype", ["u1", "u2", "i2", "i8", "f4"])
@pytest.mark.parametrize("name", ["miou", "miscoverage", "pixel_brier"])
def test_masks_of_any_integers(name, dtype):
    labels = PIXEL_LABELS.copy()
    labels[0, 1, 1] = VOID
    against = losses.LOSSES[name].against_labels
    assert np.array_equal(against(PIXELS, labels.astype(dtype)), against(PIXELS, labels))


@pytest.mark.parametrize("name", ["miou", "miscoverage", "pixel_brier"])
def test_labels_of_pixels_that_are_none(name):
    against = losses.LOSSES[name].against_labels
    with pytest.raises(ValueError, match=r"`labels` must be .* below 3, .*sample 0 has 3"):
        against(PIXELS, np.asarray([[[0, 3], [1, VOID]]]))
    with pytest.raises(ValueError, match=r"sample 0 has 0\.5"):
        against(PIXELS, np.asarray([[[0, 0.5], [1, VOID]]]))
    with pytest.raises(ValueError, match="sample 0 is all void"):
        against(PIXELS, np.full((1, 2, 2), VOID))
    with refused("labels"):
        against(PIXELS, np.zeros((1, 2, 3), int))


@pytest.mark.parametrize("name", ["miou", "miscoverage", "pixel_brier"])
def test_losses_of_images_refuse_what_is_none(name):
    with refused("probabilities"):
        ss.ExitRecord.from_logits(random_logits(n=5)[0], losses=[name])


# The three ways to score distributions against the last exit


def test_expected_is_the_default_and_the_closed_form():
    logits, _ = random_logits(n=50)
    expected = classification.brier_inconsistency(probabilities(logits))
    for arguments in ({}, {"label": "expected"}):
        record = ss.ExitRecord.from_logits(logits, **arguments)
        assert np.array_equal(record.inconsistencies["brier"], expected)
        assert record.inconsistency_ranges["brier"] == ss.LossRange(0, 2)


def test_sample_is_unbiased_for_the_closed_form():
    logits, _ = random_logits(n=3, seed=5)
    many = 20_000
    record = ss.ExitRecord.from_logits(np.repeat(logits, many, axis=0), label="sample")
    drawn = record.inconsistencies["brier"].reshape(3, many, -1)
    exact = classification.brier_inconsistency(probabilities(logits))
    error = drawn.std(axis=1) / np.sqrt(many)
    assert (error[:, :-1] > 0).all()
    assert (np.abs(drawn.mean(axis=1) - exact) <= 5 * error).all()


def test_sample_draws_one_label_a_sample_from_its_seed():
    logits, _ = random_logits(n=200)

    def drawn(seed):
        record = ss.ExitRecord.from_logits(logits, label="sample", seed=seed)
        return record.inconsistencies["brier"]

    assert np.array_equal(drawn(1), drawn(1))
    assert not np.array_equal(drawn(1), drawn(2))
    p = probabilities(logits)
    against = [classification.brier(p, np.full(200, y)) for y in range(5)]
    possible = np.stack([losses - losses[:, -1:] for losses in against], axis=1)
    close = np.isclose(possible, drawn(1)[:, None]).all(axis=2)  # one label explains all exits
    assert close.any(axis=1).all()


def test_argmax_is_the_gap_to_the_likeliest_class_and_may_be_negative():
    p = np.asarray([[[0.9, 0.1], [0.6, 0.4]]])  # surer of the same class than the last exit
    record = ss.ExitRecord.from_logits(np.log(p), label="argmax")
    gap = (0.1**2 + 0.1**2) - (0.4**2 + 0.4**2)
    assert record.inconsistencies["brier"].tolist() == [[pytest.approx(gap), 0.0]]
    assert gap < 0


@pytest.mark.parametrize("label", ["sample", "argmax"])
def test_against_one_label_the_range_is_that_of_a_gap(label):
    record = ss.ExitRecord.from_logits(random_logits(n=20)[0], label=label)
    assert record.inconsistency_ranges["brier"] == ss.LossRange(-2, 2)
    assert record.inconsistency_ranges["zero_one"] == ss.LossRange(0, 1, whole=True)


# Ranges


def test_ranges_of_gaps_and_of_zero_bounded_losses():
    assert ss.LossRange(0, 2).gap() == ss.LossRange(-2, 2)
    assert ss.LossRange(-1, 3).gap() == ss.LossRange(-4, 4)
    assert ss.LossRange(-2, 2).zero_bounded() == ss.LossRange(0, 2)
    assert ss.LossRange(0.5, 2).zero_bounded() == ss.LossRange(0.5, 2)


def test_a_gap_of_binary_losses_is_whole_but_not_binary():
    binary = ss.LossRange(0, 1, whole=True)
    assert binary.binary
    assert not binary.gap().binary
    assert binary.gap().whole
    assert binary.gap().zero_bounded().binary
    assert not ss.LossRange(0, 1).binary
    assert not ss.LossRange(0, 2, whole=True).binary


def test_a_pair_will_do_for_a_range():
    assert ss.LossRange.of((0, 2)) == ss.LossRange(0.0, 2.0)
    assert ss.LossRange.of(np.asarray([-1, 1])) == ss.LossRange(-1, 1)


@pytest.mark.parametrize(
    "bad",
    [(1, 1), (2, 1), (0, np.inf), (np.nan, 1), (-2, -1), (-1, 0), (0, 1, True), 1.0, None, (0,)],
)
def test_ranges_that_hold_no_loss_of_interest_are_refused(bad):
    with refused("loss_range"):
        ss.LossRange.of(bad)


def test_a_range_of_text_is_refused_by_name():
    with refused("loss_range"):
        ss.LossRange.of(("a", 1))


# The registry


@pytest.fixture
def registry(monkeypatch):
    """The registry, restored afterwards."""
    kept = dict(losses.LOSSES)
    yield losses.LOSSES
    losses.LOSSES.clear()
    losses.LOSSES.update(kept)


def test_known_losses_are_registered():
    assert losses.LOSSES["zero_one"] is losses.ZERO_ONE
    assert losses.LOSSES["brier"] is losses.BRIER
    assert losses.ZERO_ONE.range.binary
    assert losses.ZERO_ONE.of == "prediction"
    assert losses.BRIER.of == "distribution"
    for name in ("miou", "miscoverage"):
        assert losses.LOSSES[name].range == ss.LossRange(0, 1)
        assert losses.LOSSES[name].of == "prediction"
    assert losses.PIXEL_BRIER.range == losses.BRIER.range
    assert losses.PIXEL_BRIER.of == "distribution"


def new_loss(name):
    def against_labels(p, labels):  # probability that misses the label
        return 1 - np.take_along_axis(p, labels[:, None, None], axis=-1)[..., 0]

    def against_last(p):  # total variation
        return 0.5 * np.abs(p - p[:, -1:]).sum(axis=-1)

    return losses.Loss(name, ss.LossRange(0, 1), "distribution", against_labels, against_last)


def test_a_new_loss_works_end_to_end(registry, tmp_path):
    losses.LOSSES.register(new_loss("missed"))
    logits, labels = random_logits(n=500)
    record = ss.ExitRecord.from_logits(logits, labels, losses=["missed", "zero_one"])
    p = probabilities(logits)
    expected = 1 - p[np.arange(500)[:, None], np.arange(4), labels[:, None]]
    np.testing.assert_allclose(record.losses["missed"], expected)
    assert record.loss_ranges["missed"] == ss.LossRange(0, 1)
    record.save(tmp_path / "record.parquet")
    loaded = ss.ExitRecord.load(tmp_path / "record.parquet")
    for risk in ("gap", "consistency"):
        policy = ss.calibrate(loaded, risk=risk, loss="missed", epsilon=0.2)
        assert policy.threshold is not None
        assert policy.certificate.promises[0].loss == "missed"


@pytest.mark.parametrize("label", ["sample", "argmax"])
def test_a_new_loss_is_itself_with_drawn_labels_too_or_refuses_them(registry, label):
    losses.LOSSES.register(new_loss("missed"))
    logits, _ = random_logits(n=500)
    try:
        record = ss.ExitRecord.from_logits(logits, losses=["missed"], label=label)
    except ValueError as error:
        assert "`label`" in str(error)  # noqa: PT017
        return
    p = probabilities(logits)
    of_class = 1 - p  # the loss if the label were that class
    possible = of_class - of_class[:, -1:]
    drawn = record.inconsistencies["missed"]
    assert np.isclose(drawn[..., None], possible).all(axis=1).any(axis=-1).all()


def test_a_loss_object_needs_no_registration():
    logits, labels = random_logits(n=50)
    loss = losses.Loss("doubled", ss.LossRange(0, 2), "distribution", against_last=lambda p: 2 * p)
    with pytest.raises(
        ValueError, match=r"'doubled' .* set the field `against_labels` of its Loss"
    ):
        ss.ExitRecord.from_logits(logits, labels, losses=[loss])
    missed = new_loss("missed")
    record = ss.ExitRecord.from_logits(logits, labels, losses=missed)
    assert record.loss_ranges == record.inconsistency_ranges == {"missed": missed.range}


def test_a_name_is_registered_once(registry):
    loss = losses.LOSSES.register(new_loss("missed"))
    assert losses.LOSSES.register(loss) is loss
    with pytest.raises(
        ValueError, match="`loss` must have a name of its own, but 'missed' is taken"
    ):
        losses.LOSSES.register(new_loss("missed"))
    with pytest.raises(ValueError, match="'brier' is taken"):
        losses.LOSSES.register(new_loss("brier"))
    assert losses.LOSSES["brier"] is losses.BRIER


def test_a_prediction_loss_must_be_registered_before_labels_may_be_missing():
    from swiftsure.losses import LOSSES, ZERO_ONE

    own = dataclasses.replace(ZERO_ONE, name="own")
    logits = np.random.default_rng(0).normal(size=(30, 3, 4))
    labels = np.where(logits.argmax(2).std(axis=1) > 0, 1, -1)  # missing where the exits agree
    with pytest.raises(ValueError, match="'own' allows only once it is known by name"):
        ss.ExitRecord.from_logits(logits, labels, losses=[own])
    LOSSES.register(own)
    try:
        record = ss.ExitRecord.from_logits(logits, labels, losses=[own])
    finally:
        del LOSSES["own"]
    assert list(record.losses) == ["own"]
