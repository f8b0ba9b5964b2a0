"""The experiment on how `crc` splits ε, from a small record."""

import swiftsure as ss
from experiments.crc.reproduce import RULES, crc
from swiftsure.study.simulate import Population


def test_every_rule_is_compared_where_something_is_certified(tmp_path):
    sample = Population(n_exits=3).sample(700, 0)
    record = ss.ExitRecord.from_logits(sample.logits, sample.labels, costs={"flops": [1, 2, 4]})
    record.save(tmp_path / "simulated.parquet")
    result = crc(tmp_path, epsilons=(0.1, 0.2), sizes=(300, 3000), splits=3)
    assert {row["n"] for row in result.rows} == {300}
    assert {row["loss"] for row in result.rows} == {"zero_one", "brier"}
    (table,) = result.tables().values()
    assert [row["n"] for row in table] == [300, "all"]
    assert set(RULES) <= set(table[0])
    assert table[0]["largest mean risk / ε"] < 1.2  # of three splits, with their noise
    assert [file.name for file in result.write(tmp_path / "results")] == ["crc.csv"]
