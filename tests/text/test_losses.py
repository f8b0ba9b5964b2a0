"""Losses of texts, against their definitions and against the packages they stand on."""

import numpy as np
import pytest

from swiftsure.losses import BLEU, LOSSES, ROUGE_L, TOKEN_F1
from swiftsure.losses import text as text_losses


@pytest.mark.parametrize("loss", [ROUGE_L, TOKEN_F1, BLEU])
def test_known_and_in_range(loss):
    assert LOSSES[loss.name] is loss
    predictions = [["a cat sat", "dogs run far away", "", "the cat sat down"]] * 2
    references = ["the cat sat down", ["nothing like it", "dogs run far away"]]
    table = loss.against_labels(predictions, references)
    assert table.shape == (2, 4)
    assert ((table >= 0) & (table <= 1)).all()
    assert table[0, 3] == table[1, 1] == 0
    assert table[0, 2] == 1  # nothing said
    inconsistencies = loss.against_last(predictions)
    assert (inconsistencies[:, 3] == 0).all()
    assert np.array_equal(inconsistencies[0], loss.against_labels(predictions, references)[0])


@pytest.mark.parametrize("loss", [ROUGE_L, TOKEN_F1, BLEU])
def test_saying_nothing_is_right_where_nothing_is_to_be_said(loss):
    assert loss.against_last([["a word", ""]]).tolist() == [[1, 0]]
    assert loss.against_labels([["", "a word"]], [[""]]).tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("text", "reference", "score"),
    [
        ("The cat!", "a cat", 1.0),
        ("new york city", "New York", 0.8),
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0.0),
        ("the", "", 1.0),  # articles are nothing
    ],
)
def test_token_f1_is_squads(text, reference, score):
    assert text_losses.token_f1(text, [reference]) == pytest.approx(score)


def test_rouge_l_is_that_of_the_longest_common_subsequence():
    # 3 of 4 words against 3 of 5, in order.
    found = text_losses.rouge_l("police kill the gunman", ["police killed that old gunman the"])
    assert found == pytest.approx(2 * (3 / 4) * (3 / 6) / (3 / 4 + 3 / 6))


def test_bleu_is_sacrebleus():
    sacrebleu = pytest.importorskip("sacrebleu")
    text, references = "the cat sat on a mat today", ["the cat sat on the mat", "a cat was there"]
    wanted = sacrebleu.sentence_bleu(text, references, use_effective_order=True).score / 100
    assert text_losses.bleu(text, references) == pytest.approx(wanted)


def test_what_is_no_text():
    with pytest.raises(TypeError, match="texts"):
        ROUGE_L.against_last(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="one a sample, 1, but got 2"):
        ROUGE_L.against_labels([["a"]], ["a", "b"])
    with pytest.raises(ValueError, match="a text, or several"):
        ROUGE_L.against_labels([["a"]], [[]])


@pytest.mark.parametrize(("name", "package"), [("rouge_l", "rouge-score"), ("bleu", "sacrebleu")])
def test_a_missing_package_is_named(name, package, monkeypatch):
    def missing(module):
        raise ImportError(module)

    monkeypatch.setattr(text_losses, "import_module", missing)
    text_losses._rouge.cache_clear()
    text_losses._sentence_bleu.cache_clear()
    with pytest.raises(ImportError, match=rf"{package}: pip install 'swiftsure\[text\]'"):
        LOSSES[name].against_last([["a", "b"]])
