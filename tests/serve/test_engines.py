"""What every engine can: answer, be audited, change its policy, mix slices, live in a worker."""

import base64

import numpy as np
import pytest
import torch

from swiftsure.serve import (
    InvalidRequestError,
    engine_of,
    load_engine,
)
from swiftsure.serve.engine import EngineOptions
from swiftsure.serve.engines.tokens import LENGTHS
from swiftsure.torch import EarlyExit
from tests.serve.systems import SYSTEMS, made


@pytest.fixture(params=SYSTEMS)
def name(request):
    return request.param


@pytest.mark.parametrize(
    "wrong",
    [None, True, "", "text", [], {}, {"sample": -1}, {"sample": "x"}, {"prompt": 3}, [[1], [1, 2]]],
    ids=str,
)
def test_no_input_breaks_an_engine(name, wrong):
    """It is refused, or answered; nothing else."""
    engine = made(name)
    try:
        sample = engine.inputs.sample(wrong)
    except InvalidRequestError:
        return
    if name == "cascade":  # takes anything; its functions decide
        return
    assert len(engine.answer([sample], full=False)) == 1


def test_texts_are_padded_to_a_few_lengths():
    engine = made("Hugging Face encoder")
    sizes = []
    run = engine._run
    engine._run = lambda batch, n, fast: (
        sizes.append((n, batch["input_ids"].shape[1])),
        run(batch, n, fast),
    )[1]
    texts = [" ".join(["w05"] * n) for n in (1, 3, 4, 7, 8, 9, 15)]
    samples = [engine.inputs.sample(each) for each in texts]
    together = engine.answer(samples, full=False)
    assert sizes == [(5, 8), (2, 16)]
    assert all(size in LENGTHS for _, size in sizes)
    for sample, one in zip(samples, together, strict=True):  # padding changes no answer
        batch = {k: torch.from_numpy(v)[None] for k, v in sample.items()}
        out = engine.fast(batch)
        np.testing.assert_allclose(one.content["outputs"], out.outputs[0], atol=1e-5)
        assert one.exit == out.exits[0]
        assert one.content["label"] == f"LABEL_{one.content['prediction']}"
    engine._run = run
    with pytest.raises(InvalidRequestError, match="at most 20 tokens"):
        engine.inputs.sample("w05 " * 30)


def test_an_encoder_is_served_from_its_folder_with_its_tokenizer(tmp_path):
    from tests.text.tokenizing import tokenizer
    from tests.torch.test_pretrained import fast_bert

    words = tokenizer(model_input_names=["input_ids", "attention_mask"])
    fast = fast_bert()
    fast.save_pretrained(tmp_path / "model", words)
    engine = load_engine(tmp_path / "model")
    own = engine_of(EarlyExit(fast.model, fast.policy, on_invalid="mark"), None, words)
    for text in ("w04 w05 w06", "w20"):
        (one,), (two,) = (
            each.answer([each.inputs.sample(text)], full=False) for each in (engine, own)
        )
        assert one.content == two.content
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        load_engine(tmp_path / "model")


def test_a_pipeline_of_transformers_runs_early_exits():
    from transformers import pipeline

    from tests.text.tokenizing import tokenizer
    from tests.torch.test_pretrained import fast_bert

    fast = fast_bert()
    words = tokenizer(model_input_names=["input_ids", "attention_mask"])
    classify = pipeline("text-classification", model=fast, tokenizer=words)
    texts = ["w04 w05", "w06 w07 w08"]
    for text, found in zip(texts, classify(texts), strict=True):
        out = fast(dict(words(text, return_tensors="pt")))
        assert found["label"] == f"LABEL_{int(out.predictions[0])}"
        assert found["score"] == pytest.approx(float(out.outputs.softmax(1).max()), abs=1e-6)


def test_images_are_png_files_and_repeat():
    engine = made("DeeDiff")
    sample = engine.inputs.sample({"sample": 7})
    (one,), (two,) = (engine.answer([sample], full=False) for _ in range(2))
    assert one.content == two.content
    assert base64.b64decode(one.content["image"]).startswith(b"\x89PNG")
    numbers = {engine.inputs.sample({})["sample"] for _ in range(5)}
    assert len(numbers) == 5


def test_systems_come_from_functions_and_folders():
    engine = load_engine("tests.serve.systems:cascade")
    assert engine.answer([engine.inputs.sample(3)], full=False)[0].content["answer"] == "odd"
    with pytest.raises(ValueError, match="has none"):
        load_engine("tests.serve.systems:nothing")
    with pytest.raises(TypeError, match="can be served"):
        engine_of(object())
    with pytest.raises(TypeError, match="example batch"):
        engine_of(made("PyTorch network").fast)
    with pytest.raises(ValueError, match="`device` must not be given"):
        load_engine("tests.serve.systems:cascade", EngineOptions(device="cuda"))
    assert EarlyExit is type(made("PyTorch network").fast)
