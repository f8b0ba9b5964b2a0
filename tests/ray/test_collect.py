"""Collecting in Ray actors: the same record, resumable by either engine, whatever dies."""

import pytest
import torch

from swiftsure import RunOptions
from swiftsure.torch import collect
from swiftsure.torch.collecting import InterruptedCollectionError
from tests.ray.builders import SETTINGS, batches, same
from tests.torch.builders import network


class Dies:
    """A loader that stops part-way."""

    def __init__(self, given, after):
        self.given, self.after = given, after

    def __iter__(self):
        yield from self.given[: self.after]
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("first", "second"),
    [("local", "ray"), pytest.param("ray", "local", marks=pytest.mark.slow)],
)
def test_either_engine_resumes_the_other_and_gives_the_same_record(
    cluster, tmp_path, first, second
):
    model, data = network(), batches()
    expected = collect(model, data, **SETTINGS)
    place = {"shards": tmp_path, "shard_size": 50}
    workers = {"ray": 2, "local": None}
    with pytest.raises(InterruptedCollectionError, match="the disk is gone") as stopped:
        collect(
            model,
            Dies(data, 9),
            run=RunOptions(engine=first, workers=workers[first], **place),
            **SETTINGS,
        )
    assert stopped.value.n_saved >= 50
    found = collect(
        model, data, run=RunOptions(engine=second, workers=workers[second], **place), **SETTINGS
    )
    same(found, expected)


@pytest.mark.slow
def test_errors_of_workers_are_those_of_the_model(cluster):
    data = batches()
    bad = data[2][0].clone()
    bad[0] = torch.nan
    given = [*data[:2], (bad, data[2][1])]
    with pytest.raises(InterruptedCollectionError, match=r"exit 1 is NaN .* sample 46"):
        collect(network(), given, run=RunOptions(engine="ray", workers=1), **SETTINGS)
