"""What every runtime does with tiny models of fixed seeds: exits, tokens, settings.

Only whole numbers and texts are frozen, and thresholds lie in the widest gap among a model's own
confidences, so that another machine, or a GPU, does the same although it rounds otherwise. Like
`cases`, this speaks the library's API and changes together with it; the names of the cases stay.
"""

from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from tests.golden.frozen import digits

__all__ = ["EXITS", "ON_GPU", "exact", "exported"]

EXITS = {}
ON_GPU = set()
"""Cases that also run on a GPU, with the same result."""
TOKENS = 10
ENDS = [1, 5, 17, 30, 41, 44, 46]


def runs(needs=(), gpu=True):
    """Freeze what a function of the device returns; it needs some packages."""

    def register(make):
        def made(device="cpu"):
            for package in needs:
                pytest.importorskip(package)
            return make(device)

        EXITS[make.__name__] = made
        if gpu:
            ON_GPU.add(make.__name__)
        return make

    return register


@contextmanager
def exact():
    """Multiply in float32 on a GPU, not in TF32."""
    import torch

    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [each.allow_tf32 for each in flags]
    for each in flags:
        each.allow_tf32 = False
    yield
    for each, allowed in zip(flags, before, strict=True):
        each.allow_tf32 = allowed


def in_widest_gap(confidences):
    """Return a threshold among confidences that are neither rare nor common."""
    found = np.unique(np.asarray(confidences, float))
    middle = found[len(found) // 3 : 2 * len(found) // 3 + 2]
    k = np.diff(middle).argmax()
    return float(middle[k : k + 2].mean())


def moved(batch, device):
    return {name: value.to(device) for name, value in batch.items()}


# ------------------------------------------------------------------------------- networks in stages


def early_exit(model, batch, device, score="top1", shared=True, **fields):
    """Exits and predictions of one call, with a shared threshold or one per exit."""
    from swiftsure.torch import EarlyExit
    from tests.torch.builders import full_confidences, policy_of

    seen = full_confidences(model, batch, score)
    level = in_widest_gap(seen) if shared else tuple(in_widest_gap(each) for each in seen.T)
    policy = policy_of(level, model.n_exits, score, **fields)
    fast = EarlyExit(model.to(device), policy, capture=device == "cuda")
    out = fast(batch.to(device))
    return {"exits": digits(out.exits), "predictions": digits(out.predictions)}


@runs(["torch"])
def early_exit_of_linear_stages(device):
    from tests.torch.builders import inputs, network

    return early_exit(network(), inputs(40), device)


@runs(["torch"])
def early_exit_by_entropy_strict_and_late(device):
    from tests.torch.builders import inputs, network

    return early_exit(
        network(seed=1), inputs(40, seed=1), device, "entropy", strict=True, min_exit=1
    )


@runs(["torch"])
def early_exit_with_a_threshold_for_each_exit(device):
    from swiftsure.torch import EarlyExit
    from tests.torch.builders import full_confidences, inputs, network, policy_of

    model, batch = network(seed=2), inputs(40, seed=2)
    first, _, third = full_confidences(model, batch).T
    policy = policy_of((in_widest_gap(first), None, in_widest_gap(third)), model.n_exits)
    out = EarlyExit(model.to(device), policy)(batch.to(device))
    return {"exits": digits(out.exits), "predictions": digits(out.predictions)}


@runs(["torch"], gpu=False)
def early_exit_captured(device):
    from swiftsure.torch import EarlyExit
    from tests.torch.builders import full_confidences, inputs, network, policy_of

    model, batch = network(seed=3), inputs(40, seed=3)
    policy = policy_of(in_widest_gap(full_confidences(model, batch)), model.n_exits)
    out = EarlyExit(model, policy, capture=True)(batch)
    return {"exits": digits(out.exits), "predictions": digits(out.predictions)}


@runs(["torch"])
def early_exit_of_msdnet(device):
    from tests.torch.builders import inputs
    from tests.zoo.test_msdnet import random_network

    images = inputs(24, 3 * 32 * 32).view(24, 3, 32, 32)
    return early_exit(random_network(), images, device, shared=False)


@runs(["torch"])
def early_exit_of_a_vision_transformer(device):
    from tests.torch.builders import inputs
    from tests.zoo.test_dvit import TINY, random_network

    side = TINY["image_size"]
    return early_exit(random_network(), inputs(24, 3 * side**2).view(24, 3, side, side), device)


@runs(["torch"])
def early_exit_of_a_network_with_attached_heads(device):
    import torch

    from swiftsure.torch import attach_heads
    from tests.torch.builders import inputs
    from tests.torch.test_cut import Residual

    torch.manual_seed(0)
    batch = inputs(40, seed=6)
    model = attach_heads(Residual().eval(), ["layer1", "layer2"], batch).eval()
    return early_exit(model, batch, device, shared=False)


@runs(["torch"])
def early_exit_of_a_cascade_of_networks(device):
    import torch

    from swiftsure.torch import Cascade
    from tests.torch.builders import inputs

    torch.manual_seed(0)
    model = Cascade([torch.nn.Linear(6, 5), torch.nn.Linear(6, 5), torch.nn.Linear(6, 5)]).eval()
    return early_exit(model, inputs(40, seed=7), device, "top_diff", shared=False)


@runs(["torch"])
def stream_in_order_and_out_of_order(device):
    from swiftsure.torch import EarlyExit, Stream
    from tests.torch.builders import full_confidences, inputs, network, policy_of

    model, batch = network(seed=4), inputs(60, seed=4)
    policy = policy_of(in_widest_gap(full_confidences(model, batch)), model.n_exits)
    fast = EarlyExit(model.to(device), policy, capture=device == "cuda")
    batches = [each.to(device) for each in batch.split([7, 20, 3, 30])]
    found = list(Stream(fast, batch_size=16, max_wait=4).run(batches))
    ordered = Stream(fast, batch_size=16, max_wait=4).run(batches, ordered=True)
    exits = np.full(60, 9)
    for each in found:
        exits[each.ids.cpu()] = each.exit
    return {
        "exits": digits(exits),
        "ordered": digits(np.concatenate([each.exits.cpu() for each in ordered])),
    }


@cache
def exported():
    """The folder of an exported network, and inputs for it; it lives as long as this process."""
    from swiftsure import onnx
    from tests.torch.builders import full_confidences, inputs, network, policy_of

    model, batch = network(n_exits=2, seed=5), inputs(40, seed=5)
    policy = policy_of(in_widest_gap(full_confidences(model, batch)), model.n_exits)
    folder = TemporaryDirectory(prefix="golden-")
    made = Path(folder.name) / "made"
    onnx.export(model, policy, made, example=batch, threads=1)
    return made, batch.numpy(), folder


@runs(["torch", "onnxruntime", "onnxscript"], gpu=False)
def exported_to_onnx(device):
    from swiftsure import onnx

    made, batch, _ = exported()
    fast = onnx.EarlyExit.load(made)
    out = fast(batch)
    streamed = onnx.Stream(fast, 16).run(np.array_split(batch, 7), ordered=True)
    return {
        "exits": digits(out.exits),
        "predictions": digits(out.predictions),
        "streamed": digits(np.concatenate([each.exits for each in streamed])),
    }


# --------------------------------------------------------------------------------------------- text


def calm(model, rule, device):
    """Tokens and layers of a batch."""
    from swiftsure.text import CalmModel
    from tests.text.builders import batch
    from tests.text.calm.slow import fast_model

    fast = fast_model(model, rule)
    fast = CalmModel(fast.model.to(device), fast.rule, capture=device == "cuda")
    options = {"max_new_tokens": TOKENS, "eos_token_id": ENDS}
    output = fast.generate(**moved(batch(5, model), device), **options)
    return {
        "tokens": output.sequences.tolist(),
        "layers": [digits(each) for each in output.exit_layers],
    }


@runs(["torch", "transformers"])
def calm_of_t5_by_softmax_with_decay(device):
    from swiftsure.text import CalmRule, Decay
    from tests.text.builders import t5

    return calm(t5(), CalmRule(1.0, decay=Decay(TOKENS)), device)


@runs(["torch", "transformers"])
def calm_of_t5_by_saturation(device):
    from swiftsure.text import CalmRule
    from tests.text.builders import t5

    return calm(t5(), CalmRule(1.0, score="saturation"), device)


@runs(["torch", "transformers"])
def calm_of_llama_with_few_looks(device):
    from swiftsure.text import CalmRule
    from tests.text.builders import llama

    return calm(llama(), CalmRule(1.0, look_at=(0, 2)), device)


def drafted(name, rule, device):
    """Tokens and calls of a large model with a small one."""
    from swiftsure.text import BigLittle
    from tests.text.bild.drafting import PAIRS
    from tests.text.builders import batch

    large, small = (model.to(device) for model in PAIRS[name]())
    output = BigLittle(large, small, rule, capture=device == "cuda").generate(
        **moved(batch(3, large), device), max_new_tokens=12, eos_token_id=[1, 5, 17, 30]
    )
    return {
        "tokens": output.sequences.tolist(),
        "drafted": [run.drafted for run in output.runs],
        "rolled_back": [run.rollbacks for run in output.runs],
        "calls": [
            "-".join(call.model[0] + call.event[0] for call in run.calls) for run in output.runs
        ],
    }


@runs(["torch", "transformers"])
def bild_of_t5_with_rollback(device):
    from swiftsure.text import Rollback

    return drafted("T5", Rollback(2.0, fallback=0.3, max_draft=4), device)


@runs(["torch", "transformers"])
def bild_of_llama_speculative(device):
    from swiftsure.text import Speculative

    return drafted("Llama", Speculative(0.1, max_draft=3), device)


# ------------------------------------------------------------------------------------------- images


@runs(["torch"])
def deediff_of_a_small_unet(device):
    from swiftsure.diffusion import DDIM, DeeDiff, Schedule
    from tests.diffusion.builders import network

    model, sampler = network().to(device), DDIM(5, Schedule(40))
    seen = DeeDiff(model, 1.0, sampler=sampler).confidences(6)
    made = DeeDiff(model, in_widest_gap(seen), sampler=sampler).generate(6)
    return {"exits": [digits(each) for each in made.exits]}


@runs(["torch", "diffusers"], gpu=False)
def cache_of_a_diffusers_pipeline(device):
    from swiftsure.diffusion.caches import CachedPipeline, sweep_cache
    from swiftsure.diffusion.caches.pipeline import sample_generators
    from tests.diffusion.test_caches import CALL, LABELS, LEVELS, Pipeline

    pipe = Pipeline()
    given = {"thresholds": LEVELS, "losses": ["mse"], "batch_size": 4}
    record = sweep_cache(pipe, {"class_labels": LABELS}, **given, **CALL)
    fast = CachedPipeline(pipe, threshold=LEVELS[1], **CALL)
    inputs = {"class_labels": LABELS, "generator": sample_generators(0, range(len(LABELS)))}
    _, found = fast.run(inputs, [LEVELS[1]] * len(LABELS), [None] * len(LABELS))
    return {
        "swept": record.costs["blocks"].astype(int).tolist(),
        "run": np.asarray(found.counts.runs).astype(int).tolist(),
    }


# ----------------------------------------------------------------------------------------- cascades


@runs(gpu=False)
def cascade_of_functions(device):
    import swiftsure as ss

    sure = np.random.default_rng(0).integers(0, 64, (80, 2)) / 64
    labels = ["even", "odd"] * 40
    cascade = ss.Cascade(
        {
            "small": lambda n: ("odd", sure[n, 0], 1.0),
            "middle": lambda n: (labels[n] if sure[n, 1] > 0.25 else "odd", sure[n, 1], 3.0),
            "large": lambda n: (labels[n], 1.0, 9.0),
        }
    )
    record = cascade.collect(range(80), labels, progress=False)
    policy = cascade.calibrate(record, epsilon=0.5, path=[0.75, 0.5], cost="exit")
    out = cascade.run(policy)(range(80))
    return {
        "threshold": policy.threshold,
        "exits": digits(out.exits),
        "right": digits(np.asarray(out.answers) == labels),
        "cost": out.cost["cost"],
    }


@runs(["sklearn"], gpu=False)
def cascade_of_estimators(device):
    from tests.golden import cases

    made = cases.estimators()
    rows = np.arange(600)[:, None]
    return {
        "exits": digits(made.exits(rows)),
        "predictions": digits(made.predict(rows)),
    }


@runs(gpu=False)
def policies_on_other_confidences(device):
    from tests.golden import cases

    other = cases.exits(60, 6).confidences["top1"]
    names = ["mean_gap_of_zero_one_losses", "strictly_above_the_threshold"]
    names += ["first_exit_is_never_taken", "thresholds_for_each_exit"]
    found = {name: digits(cases.policy_of(name).exits(other)) for name in names}
    own = cases.policy_of("a_setting_for_each_slice_together")
    slices = np.where(np.arange(60) % 2, "north", "south")
    slices[::9] = "elsewhere"
    return found | {"by_slice": digits(own.exits(other, slices))}
