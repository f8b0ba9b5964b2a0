import pytest

from swiftsure import RunOptions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shard_size": 0}, "`shard_size` must be at least 1"),
        ({"shard_seconds": "a"}, "`shard_seconds` must be a number"),
        ({"shard_seconds": float("nan")}, "`shard_seconds` must be at least 0"),
        ({"shard_seconds": -1}, "`shard_seconds` must be at least 0"),
        ({"engine": "spark"}, "`engine` must be one of"),
        ({"workers": 2}, "`workers` needs engine='ray'"),
    ],
)
def test_values_that_are_refused(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        RunOptions(**given)
