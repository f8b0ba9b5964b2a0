"""Every kind of system that can be served: how it is made, and what is sent to it."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

import swiftsure as ss
from swiftsure.run import RunOptions
from swiftsure.serve import audit_monitor
from swiftsure.serve.engines.onnx import OnnxEngine
from swiftsure.serve.loading import engine_of
from swiftsure.torch import EarlyExit, attach_heads, collect
from tests.torch.builders import inputs, network

__all__ = ["SYSTEMS", "System", "certified", "engine", "made", "monitored", "other_policy", "same"]

QUIET = RunOptions(progress=False)


class System:
    """A kind of system.

    Attributes
    ----------
    samples : list
        What clients send.
    """

    samples = []  # noqa: RUF012
    request = {"risk": "consistency", "loss": "brier", "epsilon": 0.3}  # noqa: RUF012

    def __init__(self):
        torch.set_num_threads(1)

    @property
    def recorded(self):
        return record_of_kind(type(self))

    @property
    def policy(self):
        return policy_of_kind(type(self))

    def record(self, run=QUIET):
        """Return what the policy is made from."""
        raise NotImplementedError

    def runtime(self, policy, other=False, **options):
        """Return the system, or one of other weights, under a policy."""
        raise NotImplementedError

    def engine(self):
        return engine_of(self.runtime(self.policy), *self.beside())

    def beside(self):
        """Return what else the engine needs."""
        return ()

    def fast(self, device):
        """Return the system compiled or captured."""
        return self.runtime(self.policy, device=device, capture=True)


@cache
def record_of_kind(kind):
    return kind().record()


def certified(kind, record):
    """Return the policy from a record; its order is random, and tests by betting depend on it."""
    return ss.calibrate(replace(record, order=0), **kind.request)


@cache
def policy_of_kind(kind):
    policy = certified(kind, record_of_kind(kind))
    assert not policy.runs_full_model, "the tests should certify something"
    return policy


class Network(System):
    """A network that says what its stages are."""

    samples = [row.tolist() for row in inputs(6, seed=5)]  # noqa: RUF012
    request = System.request | {"epsilon": 0.8}

    def model(self, other=False):
        return network(seed=int(other))

    def batch(self, n, seed=0):
        return inputs(n, seed=seed)

    def record(self, run=QUIET):
        return collect(self.model(), [self.batch(300)], losses=["brier"], run=run)

    def runtime(self, policy, other=False, device="cpu", **options):
        return EarlyExit(self.model(other).to(device), policy, on_invalid="mark", **options)

    def fast(self, device):
        gpu = device == "cuda"
        return self.runtime(self.policy, device=device, capture=gpu, compile=not gpu)

    def beside(self):
        return (self.batch(2),)


class Attached(Network):
    """A plain network to which heads were attached."""

    def model(self, other=False):
        from torch import nn

        torch.manual_seed(int(other))
        plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
        return attach_heads(plain.eval(), ["0"], inputs(2)).eval()


class Encoder(Network):
    """A classifier of texts from transformers, with its tokenizer."""

    samples = ["w04 w05", "w06", {"text": "w11", "text_pair": "w12"}]  # noqa: RUF012

    def model(self, other=False):
        from tests.torch.test_pretrained import fast_bert

        model = fast_bert().model
        if other:
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
        return model

    def fast(self, device):
        """Its heads are not traced: blocks are compiled before."""
        fast = self.runtime(self.policy, device=device)
        for block in fast.model.network.bert.encoder.layer:
            block.compile()
        return fast

    def batch(self, n, seed=0):
        from tests.torch.test_pretrained import sentences

        return sentences(n, seed)

    def beside(self):
        from tests.text.tokenizing import tokenizer

        return None, tokenizer(model_input_names=["input_ids", "attention_mask"])


@cache
def exported():
    """The folder of a network, without a policy."""
    from swiftsure import onnx

    folder = Path(tempfile.mkdtemp()) / "exported"
    onnx.export(Network().model(), None, folder, example=inputs(20), threads=1)
    return folder


class Stages(Network):
    """Stages in ONNX."""

    def record(self, run=QUIET):
        from swiftsure import onnx

        return onnx.collect(exported(), [inputs(300)], losses=["brier"], run=run)

    def runtime(self, policy, other=False, **options):
        from swiftsure import onnx

        if other:  # exporting another network would take long, so it is another one's policy
            record = collect(Network().model(other), [inputs(300)], losses=["brier"])
            policy = ss.calibrate(record, **self.request)
        return onnx.EarlyExit.load(exported(), policy=policy, **options)

    def engine(self):
        from swiftsure import onnx

        onnx.save_policy(exported(), self.policy)
        return OnnxEngine.load(exported())


class Calm(System):
    """A language model that exits early."""

    samples = ["w04 w05", "w06 w07 w08", {"prompt": "w09"}]  # noqa: RUF012
    request = {"risk": "consistency", "loss": "token_f1", "epsilon": 0.6}  # noqa: RUF012
    kind = "llama"

    def model(self, other=False):
        from tests.text.builders import llama, t5

        return {"llama": llama, "t5": t5}[self.kind](seed=int(other))

    def record(self, run=QUIET):
        from swiftsure.text import CalmModel, CalmRule, Texts, sweep
        from tests.serve.texts import TOKENS
        from tests.text.calm.slow import fast_model
        from tests.text.tokenizing import texts, tokenizer

        model = self.model()
        return sweep(
            CalmModel(model, CalmRule(None)),
            Texts(texts(60), tokenizer()),
            thresholds=[fast_model(model, CalmRule(1.0)).rule.threshold],
            losses=["token_f1"],
            generation={"max_new_tokens": TOKENS},
            run=run,
        )

    def runtime(self, policy, other=False, device="cpu", **options):
        from swiftsure.text import CalmModel

        return CalmModel(self.model(other).to(device), policy, **options)

    def beside(self):
        from tests.text.tokenizing import tokenizer

        return (tokenizer(),)


class CalmEncoder(Calm):
    """A language model with an encoder."""

    kind = "t5"


class Pair(Calm):
    """A large and a small language model."""

    request = Calm.request | {"epsilon": 0.9}

    def record(self, run=QUIET):
        from swiftsure.text import Texts, sweep_pair
        from tests.serve.texts import TOKENS
        from tests.text.tokenizing import texts, tokenizer

        return sweep_pair(
            self.runtime(1.0),
            Texts(texts(60), tokenizer()),
            thresholds=[3.0],
            losses=["token_f1"],
            max_new_tokens=TOKENS,
            run=run,
        )

    def runtime(self, policy, other=False, device="cpu", **options):
        from swiftsure.text import BigLittle, self_draft

        model = self.model(other).to(device)
        return BigLittle(model, self_draft(model, 2), policy, **options)


class Sampler(System):
    """A sampler of images that exits early."""

    samples = [{"sample": k} for k in range(3)]  # noqa: RUF012
    request = System.request | {"loss": "mse", "epsilon": 0.2}

    def model(self, other=False):
        from tests.diffusion.builders import network as tiny

        return tiny(seed=int(other))

    def record(self, run=QUIET):
        from swiftsure.diffusion import DDIM, DeeDiff, sweep
        from tests.diffusion.builders import confidence_levels

        plain = DeeDiff(self.model(), sampler=DDIM(3))
        return sweep(plain, 60, thresholds=confidence_levels(plain)[1:2], losses=["mse"], run=run)

    def fast(self, device):
        return self.runtime(self.policy, device=device, graphs=True)

    def runtime(self, policy, other=False, device="cpu", **options):
        from swiftsure.diffusion import DeeDiff

        return DeeDiff(self.model(other).to(device), policy, **options)


class Cached(System):
    """A pipeline of diffusers with a cache."""

    samples = [{"sample": k, "class_labels": k} for k in range(3)]  # noqa: RUF012
    request = Sampler.request

    def record(self, run=QUIET):
        from swiftsure.diffusion.caches import sweep_cache
        from tests.diffusion.test_caches import CALL, Pipeline

        given = {"class_labels": [k % 10 for k in range(50)]}
        levels = {"thresholds": [0.4], "losses": ["mse"], "batch_size": 50}
        return sweep_cache(Pipeline(), given, **levels, run=run, **CALL)

    def runtime(self, policy, other=False, device="cpu"):
        from swiftsure.diffusion.caches import CachedPipeline
        from tests.diffusion.test_caches import Pipeline

        pipe = Pipeline(seed=int(other))
        pipe.transformer.to(device)
        return CachedPipeline(pipe, policy)

    def fast(self, device):
        fast = self.runtime(self.policy, device=device)
        fast.pipeline.transformer.compile(backend="eager")
        return fast


def small(number):
    """Whether a number is even; sure of odd ones only."""
    return ("odd", 0.9 if int(number) % 2 else 0.3, 1.0)


def large(number):
    """Whether a number is even."""
    return ("odd" if int(number) % 2 else "even", 1.0, 10.0)


small.fingerprint, large.fingerprint = "small 1", "large 1"


def changed(number):
    """The small model, after a change."""
    return small(number)


changed.fingerprint = "small 2"


class Functions(System):
    """Two functions in a row."""

    samples = [1, 2, 3, 4]  # noqa: RUF012
    request = System.request | {"loss": "exact_match", "epsilon": 0.05}

    def models(self, other=False):
        return ss.Cascade({"small": changed if other else small, "large": large})

    def record(self, run=QUIET):
        return self.models().collect(range(400), folder=run.shards, progress=False)

    def runtime(self, policy, other=False):
        return self.models(other).run(policy)

    def engine(self):
        return engine_of(self.models(), self.policy)


def cascade():
    """A cascade and its policy, as a function that is served returns them."""
    return Functions().models(), Functions().policy


SYSTEMS = {
    "PyTorch network": Network,
    "PyTorch network with attached heads": Attached,
    "Hugging Face encoder": Encoder,
    "ONNX stages": Stages,
    "CALM": Calm,
    "CALM with an encoder": CalmEncoder,
    "BiLD": Pair,
    "DeeDiff": Sampler,
    "diffusion cache": Cached,
    "cascade": Functions,
}


def engine(name):
    """Return a new engine of a kind; workers call it."""
    return SYSTEMS[name]().engine()


@cache
def made(name):
    """One engine of each kind, for tests that do not change it."""
    return engine(name)


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
