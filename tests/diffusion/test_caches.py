"""Caches of diffusers' transformers: decisions per sample, counting, and what a policy binds."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("diffusers")

import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiTTransformer2DModel
from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig

import swiftsure as ss
from swiftsure import ThresholdRecord, calibrate
from swiftsure.diffusion.caches import CachedPipeline, DiffusersCache, SampleCache, sweep_cache
from swiftsure.diffusion.caches.hooks import BlockCounts, SampleReuse, cache_context, counted
from swiftsure.diffusion.caches.pipeline import sample_generators

N_BLOCKS, N_STEPS = 3, 8
LEVELS = [0.15, 0.25, 0.4, 0.8]
CALL = {"num_inference_steps": N_STEPS, "guidance_scale": 1.5}
LABELS = [1, 4, 0, 7, 3, 2]


class Pipeline:
    """A pipeline in the manner of diffusers, with guidance in one batch of two rows per image."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.transformer = DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=3,
            out_channels=3,
            num_layers=N_BLOCKS,
            sample_size=8,
            patch_size=4,
            num_embeds_ada_norm=10,
        ).eval()
        self.scheduler = DDIMScheduler()
        self.noise: list[torch.Tensor] = []

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer, "scheduler": self.scheduler}

    @torch.no_grad()
    def __call__(
        self,
        class_labels: list[int],
        guidance_scale: float,
        num_inference_steps: int,
        generator: list[torch.Generator],
        output_type: str = "pt",
    ) -> Any:
        images = torch.cat([torch.randn(1, 3, 8, 8, generator=each) for each in generator])
        self.noise.append(images)
        labels = torch.tensor([*class_labels, *[10] * len(class_labels)])
        self.scheduler.set_timesteps(num_inference_steps)
        for t in self.scheduler.timesteps:
            both = torch.cat([images, images])
            found = self.transformer(
                both, timestep=t.expand(len(both)), class_labels=labels, return_dict=False
            )[0]
            one, other = found.chunk(2)
            guided = other + guidance_scale * (one - other)
            images = self.scheduler.step(guided, t, images).prev_sample
        return SimpleNamespace(images=(images / 2 + 0.5).clamp(0, 1))


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline()


def swept(pipe: Pipeline, **options: Any) -> ThresholdRecord:
    given = {"thresholds": LEVELS, "losses": ["mse"], "batch_size": 4} | options
    return sweep_cache(pipe, {"class_labels": LABELS}, **given, **CALL)


@pytest.fixture(scope="module")
def record(pipe: Pipeline) -> ThresholdRecord:
    return swept(pipe)


@pytest.fixture(scope="module")
def policy(pipe: Pipeline) -> ss.Policy:
    labels = [k % 10 for k in range(50)]
    many = sweep_cache(
        pipe, {"class_labels": labels}, thresholds=[0.4], losses=["mse"], batch_size=50, **CALL
    )
    return calibrate(many, risk="consistency", loss="mse", epsilon=0.2)


def test_per_sample_cache_decides_as_diffusers_one_at_a_time(
    pipe: Pipeline, record: ThresholdRecord
) -> None:
    alone = swept(pipe, cache=DiffusersCache(FirstBlockCacheConfig()))
    np.testing.assert_array_equal(record.costs["blocks"], alone.costs["blocks"])
    np.testing.assert_allclose(
        record.inconsistencies["mse"], alone.inconsistencies["mse"], atol=1e-5
    )
    reused = record.costs["blocks"][:, 1:]
    assert len(np.unique(reused)) > 3  # samples and thresholds differ: rows were gathered
    assert (np.ptp(reused, axis=0) > 0).any()


def test_mean_over_a_batch_would_decide_otherwise(pipe: Pipeline, record: ThresholdRecord) -> None:
    """The reason for refusing batches: FirstBlockCache decides otherwise for them."""
    fast = CachedPipeline(pipe, cache=DiffusersCache(FirstBlockCacheConfig()), **CALL)
    fast.cache.decides = "the schedule"  # what it is not
    differs = []
    for k, level in enumerate(LEVELS):
        _, counts = fast.run(
            {"class_labels": LABELS, "generator": sample_generators(0, range(len(LABELS)))},
            [level] * len(LABELS),
            [None] * len(LABELS),
        )
        differs.append((counts.runs != record.costs["blocks"][:, k + 1]).any())
    assert any(differs)


def test_blocks_are_counted_as_they_run(pipe: Pipeline, record: ThresholdRecord) -> None:
    blocks = record.costs["blocks"]
    assert (blocks[:, 0] == N_BLOCKS * N_STEPS).all()
    # A step runs the first block or all of them; the first step runs all.
    steps_in_full = (blocks - N_STEPS) / (N_BLOCKS - 1)
    np.testing.assert_array_equal(steps_in_full, steps_in_full.round())
    assert (steps_in_full >= 1).all()
    runs: list[int] = []
    hooks = [
        block.attn1.register_forward_hook(lambda *_: runs.append(1))
        for block in pipe.transformer.transformer_blocks
    ]
    try:
        fast = CachedPipeline(pipe, threshold=LEVELS[-1], **CALL)
        _, found = fast.run(
            {"class_labels": LABELS[:1], "generator": sample_generators(0, [0])},
            [LEVELS[-1]],
            [None],
        )
    finally:
        for hook in hooks:
            hook.remove()
    assert isinstance(found, SampleReuse)
    assert len(runs) == found.counts.runs[0] == blocks[0, -1]


def test_every_setting_gets_the_same_noise(pipe: Pipeline) -> None:
    pipe.noise.clear()
    swept(pipe, batch_size=6)
    swept(pipe, batch_size=1, thresholds=LEVELS[:1])
    first = pipe.noise[0]
    assert all(torch.equal(each, first[: len(each)]) for each in pipe.noise if len(each) == 6)
    alone = [each for each in pipe.noise if len(each) == 1]
    assert all(any(torch.equal(each[0], row) for row in first) for each in alone)
    other = sample_generators(1, [0])[0]
    assert not torch.equal(torch.randn(1, 3, 8, 8, generator=other)[0], first[0])


def test_thresholds_that_a_run_covers_are_exact(pipe: Pipeline, record: ThresholdRecord) -> None:
    for k, level in enumerate(LEVELS):
        alone = swept(pipe, thresholds=[level])
        np.testing.assert_array_equal(alone.costs["blocks"][:, 1], record.costs["blocks"][:, k + 1])


def test_warm_up_is_a_second_dial(pipe: Pipeline, record: ThresholdRecord) -> None:
    both = swept(pipe, thresholds=LEVELS, warm_ups=[N_STEPS, 0])
    assert list(both.dials) == ["threshold", "warm_up"]
    k = len(LEVELS)
    assert (both.costs["blocks"][:, 1 : k + 1] == N_BLOCKS * N_STEPS).all()
    np.testing.assert_array_equal(both.costs["blocks"][:, k + 1 :], record.costs["blocks"][:, 1:])
    with pytest.raises(ValueError, match="dial of SampleCache"):
        swept(pipe, warm_ups=[1], cache=DiffusersCache(FirstBlockCacheConfig()))


def test_certified_batch_mean_refuses_batches(pipe: Pipeline) -> None:
    labels = [k % 10 for k in range(12)]
    alone = sweep_cache(
        pipe,
        {"class_labels": labels},
        thresholds=[0.8],
        losses=["mse"],
        cache=DiffusersCache(FirstBlockCacheConfig()),
        **CALL,
    )
    made = calibrate(alone, risk="consistency", loss="mse", epsilon=0.5)
    fast = CachedPipeline(pipe, made)
    assert fast.threshold > 0
    fast(class_labels=[1], generator=sample_generators(0, [0]))
    with pytest.raises(ValueError, match="once per batch"):
        fast(class_labels=[1, 2], generator=sample_generators(0, [0, 1]))


def test_schedule_cache_takes_batches(pipe: Pipeline) -> None:
    ratios = MagCacheConfig(
        mag_ratios=[1.0] + [0.97] * (N_STEPS - 1), num_inference_steps=N_STEPS, retention_ratio=0.0
    )
    cache = DiffusersCache(ratios)
    together = swept(pipe, cache=cache, thresholds=[0.05, 0.2])
    alone = swept(pipe, cache=cache, thresholds=[0.05, 0.2], batch_size=1)
    np.testing.assert_array_equal(together.costs["blocks"], alone.costs["blocks"])
    assert (together.costs["blocks"][:, 1] < N_BLOCKS * N_STEPS).all()


def test_policy_runs_and_leaves_the_pipeline_alone(pipe: Pipeline, policy: ss.Policy) -> None:
    given = {"class_labels": [1, 5], "generator": sample_generators(3, [0, 1])}
    before = pipe(**given, **CALL).images
    fast = CachedPipeline(pipe, ss.Policy.model_validate_json(policy.model_dump_json()))
    again = {"class_labels": [1, 5], "generator": sample_generators(3, [0, 1])}
    cached = fast(**again).images
    assert not torch.equal(cached, before)
    after = {"class_labels": [1, 5], "generator": sample_generators(3, [0, 1])}
    assert torch.equal(pipe(**after, **CALL).images, before)


def test_policy_refuses_what_it_was_not_made_for(policy: ss.Policy, pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="num_inference_steps=8, but got 4"):
        CachedPipeline(pipe, policy, num_inference_steps=4)
    fast = CachedPipeline(pipe, policy)
    with pytest.raises(ValueError, match=r"guidance_scale=1.5, but got 4.0"):
        fast(class_labels=[1], guidance_scale=4.0)
    with pytest.raises(ValueError, match="without `eta`"):
        fast(class_labels=[1], eta=1.0)
    other = Pipeline()
    other.scheduler = DDPMScheduler()
    with pytest.raises(ValueError, match="scheduler="):
        CachedPipeline(other, policy)
    other = Pipeline()
    other.scheduler = DDIMScheduler(beta_end=0.03)
    with pytest.raises(ValueError, match="scheduler="):
        CachedPipeline(other, policy)
    with pytest.raises(ValueError, match="another model"):
        CachedPipeline(Pipeline(seed=1), policy)
    with pytest.raises(ValueError, match="sets the cache"):
        CachedPipeline(pipe, policy, threshold=0.5)


def test_policy_refuses_another_version(
    policy: ss.Policy, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusers.__version__", "0.0.1")
    with pytest.raises(ValueError, match=r"but 0.0.1 is installed"):
        CachedPipeline(pipe, policy)


def test_reuse_forgets_between_images(pipe: Pipeline) -> None:
    fast = CachedPipeline(pipe, threshold=LEVELS[-1], **CALL)
    images = [
        fast(class_labels=[label], generator=sample_generators(0, [0])).images
        for label in (3, 7, 3)
    ]
    assert torch.equal(images[0], images[2])


def test_rows_must_match_samples(pipe: Pipeline) -> None:
    counts = BlockCounts(2)
    reuse = SampleReuse(np.full(2, 0.5, np.float32), np.zeros(2, np.int64), counts)
    with (
        counted(pipe.transformer, counts),
        reuse.installed(pipe.transformer),
        cache_context(pipe.transformer),
        torch.no_grad(),
        pytest.raises(ValueError, match="3 rows for 2 samples"),
    ):
        pipe.transformer(
            torch.zeros(3, 3, 8, 8), timestep=torch.zeros(3), class_labels=torch.zeros(3).long()
        )


def test_bad_arguments(pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="one length"):
        sweep_cache(pipe, {"a": [1], "b": [1, 2]}, thresholds=[0.1], **CALL)
    with pytest.raises(ValueError, match="must rise"):
        swept(pipe, thresholds=[0.4, 0.2])
    with pytest.raises(ValueError, match="number or a text"):
        CachedPipeline(pipe, cross_attention_kwargs={})
    with pytest.raises(TypeError, match="with a transformer"):
        CachedPipeline(object())
    with pytest.raises(ValueError, match="`warm_up` must"):
        SampleCache(warm_up=-1)
