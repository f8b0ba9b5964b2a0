"""Every kind of system that can be served: how it is made, and what is sent to it."""

import tempfile
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

import swiftsure as ss
from swiftsure.serve import audit_monitor
from swiftsure.serve.engines.onnx import OnnxEngine
from swiftsure.serve.loading import engine_of
from swiftsure.torch import EarlyExit
from tests.torch.builders import inputs, middle_threshold, network, policy_of

__all__ = ["SAMPLES", "SYSTEMS", "made", "monitored", "other_policy", "same"]


def early_exit():
    """A staged network."""
    torch.set_num_threads(1)
    model, batch = network(), inputs(60)
    policy = policy_of(middle_threshold(model, batch), model.n_exits)
    return engine_of(EarlyExit(model, policy, on_invalid="mark"), batch)


def encoder():
    """A classifier of texts from transformers, with its tokenizer."""
    from tests.text.tokenizing import tokenizer
    from tests.torch.test_pretrained import fast_bert

    torch.set_num_threads(1)
    fast = fast_bert()
    words = tokenizer(model_input_names=["input_ids", "attention_mask"])
    return engine_of(EarlyExit(fast.model, fast.policy, on_invalid="mark"), None, words)


def exported():
    """Stages in ONNX."""
    from swiftsure import onnx

    folder = Path(tempfile.mkdtemp()) / "exported"
    fast = early_exit().fast
    onnx.export(fast.model, fast.policy, folder, example=inputs(40), threads=1)
    return OnnxEngine.load(folder)


def calm(kind="llama"):
    """A language model that exits early."""
    from tests.serve import texts
    from tests.text.tokenizing import tokenizer

    torch.set_num_threads(1)
    return engine_of(texts.calm(kind), tokenizer(), name="text")


def pair():
    """A large and a small language model."""
    from tests.serve import texts
    from tests.text.tokenizing import tokenizer

    torch.set_num_threads(1)
    return engine_of(texts.pair(), tokenizer(), name="text")


def deediff():
    """A sampler of images that exits early."""
    from swiftsure.diffusion import DDIM, DeeDiff, sweep
    from tests.diffusion.builders import confidence_levels, network

    torch.set_num_threads(1)
    plain = DeeDiff(network(), sampler=DDIM(3))
    record = sweep(plain, 60, thresholds=confidence_levels(plain)[1:2], losses=["mse"])
    return engine_of(DeeDiff(plain.model, _mse(record)))


def cached():
    """A pipeline of diffusers with a cache."""
    from swiftsure.diffusion.caches import CachedPipeline, sweep_cache
    from tests.diffusion.test_caches import CALL, Pipeline

    torch.set_num_threads(1)
    pipe = Pipeline()
    labels = {"class_labels": [k % 10 for k in range(50)]}
    record = sweep_cache(pipe, labels, thresholds=[0.4], losses=["mse"], batch_size=50, **CALL)
    return engine_of(CachedPipeline(pipe, _mse(record)))


def _mse(record):
    return ss.calibrate(record, risk="consistency", loss="mse", epsilon=0.2)


def small(number):
    """Whether a number is even; sure of odd ones only."""
    return ("odd", 0.9 if int(number) % 2 else 0.3, 1.0)


def large(number):
    """Whether a number is even."""
    return ("odd" if int(number) % 2 else "even", 1.0, 10.0)


def cascade():
    """Two functions in a row."""
    models = ss.Cascade({"small": small, "large": large})
    record = models.collect(range(400), progress=False)
    policy = models.calibrate(record, risk="consistency", loss="exact_match", epsilon=0.05)
    return engine_of(models, policy)


SYSTEMS = {
    "PyTorch network": early_exit,
    "Hugging Face encoder": encoder,
    "ONNX stages": exported,
    "CALM": calm,
    "CALM with an encoder": partial(calm, "t5"),
    "BiLD": pair,
    "DeeDiff": deediff,
    "diffusion cache": cached,
    "cascade": cascade,
}
SAMPLES = {
    "PyTorch network": [row.tolist() for row in inputs(6, seed=5)],
    "Hugging Face encoder": ["w04 w05", "w06", {"text": "w11", "text_pair": "w12"}],
    "ONNX stages": [row.tolist() for row in inputs(6, seed=5)],
    "CALM": ["w04 w05", "w06 w07 w08", {"prompt": "w09"}],
    "CALM with an encoder": ["w04 w05", "w06 w07 w08", {"prompt": "w09"}],
    "BiLD": ["w04 w05", "w06 w07 w08", {"prompt": "w09"}],
    "DeeDiff": [{"sample": k} for k in range(3)],
    "diffusion cache": [{"sample": k, "class_labels": k} for k in range(3)],
    "cascade": [1, 2, 3, 4],
}
"""What clients send."""


@cache
def made(name):
    """One engine of each kind, for tests that do not change it."""
    return SYSTEMS[name]()


def other_policy(policy):
    """Another policy of the same setting, as if it had been calibrated again."""
    certificate = policy.certificate.model_copy(update={"delta": 0.2})
    return policy.model_copy(update={"certificate": certificate})


def monitored(policy, alpha=0.01):
    """A monitor of what a policy promises, or of the inconsistency if it promises a gap."""
    gap = policy.certificate.promises[0].risk == "gap"
    return audit_monitor(policy, alpha, 0.5 if gap else None)


def same(one, other):
    """Whether two answers are the same, up to rounding."""
    for key in one.keys() - {"id", "confidence"}:
        if isinstance(one[key], float | list) and key == "outputs":
            np.testing.assert_allclose(one[key], other[key], atol=1e-5)
        else:
            assert one[key] == other[key], key
    return True
