"""One exit rule: every runtime and kernel over one table of cases, and no second copy of it."""

import ast
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import swiftsure
from swiftsure._lib import kernels
from swiftsure.cascade.running import CascadeRunner
from swiftsure.exits import can_exit, exit_indices, exits_in_use, reaches
from swiftsure.run import same_exits
from tests.builders import exit_rule_cases

SOURCES = Path(swiftsure.__file__).parent
CASES = exit_rule_cases()
CONFIDENCES = np.float32([case[0] for case in CASES])
THRESHOLDS = np.float32([case[1] for case in CASES])
STRICT = np.asarray([case[2] for case in CASES])
EXITS = np.asarray([case[3] for case in CASES])
RULES = [False, True]


def torch_devices():
    try:
        import torch
    except ImportError:
        return []
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("strict", RULES)
def test_arrays_and_numbers(strict):
    rows = strict == STRICT
    found = reaches(CONFIDENCES[rows], THRESHOLDS[rows], strict=strict)
    assert found.tolist() == EXITS[rows].tolist()
    for confidence, threshold, its_strict, exits in CASES:
        assert bool(reaches(confidence, threshold, strict=its_strict)) == exits


@pytest.mark.parametrize("device", torch_devices())
@pytest.mark.parametrize("strict", RULES)
def test_tensors(strict, device):
    import torch

    rows = strict == STRICT
    both = (torch.from_numpy(each[rows]).to(device) for each in (CONFIDENCES, THRESHOLDS))
    assert reaches(*both, strict=strict).tolist() == EXITS[rows].tolist()


def test_the_compiled_loop_of_records():
    for confidence, threshold, strict, exits in CASES:
        row = np.float32([confidence]), np.float32([threshold])
        assert (kernels.first_exit(*row, strict, 0) == 0) == exits
        if not math.isnan(confidence):  # records must not hold NaN
            assert (exit_indices([[confidence]], threshold, strict=strict)[0] == 0) == exits


@pytest.mark.parametrize("device", torch_devices())
@pytest.mark.parametrize("strict", RULES)
def test_decisions_of_captured_stages(strict, device):
    import torch

    from swiftsure.run.graphs.row_compaction import Decision, decide

    for threshold in np.unique(THRESHOLDS):
        rows = (strict == STRICT) & (threshold == THRESHOLDS)
        n = int(rows.sum())
        it = Decision(
            live=torch.tensor(n, device=device),
            ids=torch.arange(n, device=device),
            answers=torch.full((n,), -1, device=device),
            exits=torch.full((n + 1,), -1, device=device),
            decided=torch.zeros(n + 1, device=device),
            fill=torch.tensor(0, device=device),
            next_ids=torch.full((n + 1,), -1, device=device),
            flags=torch.zeros(n, dtype=torch.int8, device=device),
            places=torch.full((n,), -1, device=device),
        )
        scores = torch.from_numpy(CONFIDENCES[rows]).to(device)
        decide(scores, float(threshold), strict, 2, it)
        assert (it.exits[:n] == 2).tolist() == EXITS[rows].tolist()
        assert it.flags.tolist() == (~EXITS[rows]).tolist()


@pytest.mark.parametrize("device", torch_devices())
@pytest.mark.parametrize("strict", RULES)
def test_decisions_of_captured_decoders(strict, device):
    import torch

    from swiftsure.text.calm.looks import Batch, decide

    rows = strict == STRICT
    n = int(rows.sum())
    scores, levels = (torch.from_numpy(x[rows]).to(device) for x in (CONFIDENCES, THRESHOLDS))
    whole = torch.zeros(n, dtype=torch.long, device=device)
    batch = Batch(**dict.fromkeys(Batch._fields, whole))._replace(
        levels=levels,
        exited=torch.zeros(n, dtype=torch.bool, device=device),
        left=torch.zeros((), dtype=torch.bool, device=device),
        log=torch.zeros((1, 1, n), device=device),
        behind=torch.zeros(1, dtype=torch.long, device=device),
    )
    decide(scores, 0, None, batch, strict=strict)
    assert batch.exited.tolist() == EXITS[rows].tolist()


@pytest.mark.parametrize("device", torch_devices())
@pytest.mark.parametrize("strict", RULES)
def test_decisions_of_captured_samplers(strict, device):
    import torch

    from swiftsure.diffusion import DeeDiffRule
    from swiftsure.diffusion.graphs import RecordedSteps
    from tests.diffusion.builders import Sure
    from tests.diffusion.test_graphs import batch_of

    rows = strict == STRICT
    scores, levels = (torch.from_numpy(x[rows]).to(device) for x in (CONFIDENCES, THRESHOLDS))

    class Known(Sure):
        def head(self, exit_index, state):
            return super().head(exit_index, state)._replace(confidence=scores)

    model = Known(0.5).to(device)
    batch = tuple(each.to(device) for each in batch_of(model, 0, len(scores)))
    with torch.inference_mode():
        rule = DeeDiffRule(None, strict=strict)
        found = RecordedSteps(model, batch, rule, looks=True, dtype=None)(batch, levels)
    assert (found.exits == 0).tolist() == EXITS[rows].tolist()


def test_cascades():
    for confidence, threshold, strict, exits in CASES:
        policy = SimpleNamespace(
            thresholds=np.float32([threshold]), strict=strict, min_exit=0, score="given"
        )
        runner = CascadeRunner([None, None], policy, "given")
        assert runner.leaves(0, confidence) == exits
        assert runner.can_exit(0) == bool(can_exit(threshold, strict=strict))


def test_an_exit_is_in_use_if_the_largest_confidence_exits_there():
    for _, threshold, strict, _ in CASES:
        expected = next(exits for c, t, s, exits in CASES if (c, t, s) == (1.0, threshold, strict))
        assert bool(can_exit(threshold, strict=strict)) == expected
        assert exits_in_use([threshold], strict=strict) == [0] * expected
        assert exits_in_use([threshold], strict=strict, min_exit=1) == []
    assert exits_in_use([[1.0, 0.5], [2.0, 2.0]], strict=True) == [1]


@pytest.mark.parametrize("strict", RULES)
def test_the_same_exits_follow_from_the_rule(strict):
    values = [value for value in np.unique(CONFIDENCES) if not math.isnan(value)]
    for skipped in values:
        for taken in values:
            expected = [
                not reaches(skipped, level, strict=strict) and reaches(taken, level, strict=strict)
                for level in THRESHOLDS
            ]
            assert same_exits(THRESHOLDS, skipped, taken, strict=strict).tolist() == expected
    assert not same_exits(THRESHOLDS, np.float32("nan"), np.float32(1), strict=strict).any()
    assert not same_exits(THRESHOLDS, np.float32(0), np.float32("nan"), strict=strict).any()


# ----------------------------------------------------------------------- there is no second copy

THE_RULE = {"exits.py"}
KERNELS = {
    "_lib/kernels.py",  # numba
    "certify/bounds/_bets.py",  # numba
    "run/graphs/_row_kernels.py",  # Triton
    "text/calm/_look_kernels.py",  # Triton
    "diffusion/_look_kernels.py",  # Triton
}
LEVELS_OF_PROMISES = ("certify", "study", "cli", "report")
"""Where a level is that of a promise; nothing is run there."""

OTHER_COMPARISONS = {
    "levels > 1": "thresholds above 1 are refused",
    "levels[1:] >= levels[:-1]": "do settings rise",
    "levels[1:] <= levels[:-1]": "do settings fall",
    "thresholds[1:] <= thresholds[:-1]": "are the settings of a path nested",
    "route.thresholds >= np.float32(threshold)": "settings that are at least as safe",
    "thresholds > 0": "a cache's threshold of 0 means never",
    "each > 0": "does a cache reuse anything",
    "self.levels > 0": "does a cache reuse anything",
    "level <= 0": "does a cache reuse nothing",
    "values > level": "which candidates of a path lie above a setting",
    "ratios <= self._thresholds": "a cache reuses a block whose change is small",
    "self.levels >= found.max_reused[:, None]": "a cache would reuse the same blocks",
    "self.levels < found.min_computed[:, None]": "a cache would reuse the same blocks",
    "distance <= level": "a draft's token is rejected where the models differ too much",
    "0 <= _number('tolerance', level) <= 1": "tolerances are refused elsewhere",
    "_number('threshold', level) >= 0": "distances below 0 are refused",
}
"""Comparisons of thresholds that are not the exit rule, each with what it asks."""


def named(side):
    """The name of what is compared, of an item of it, or of what it is converted from."""
    while isinstance(side, ast.Subscript | ast.Call):
        side = side.value if isinstance(side, ast.Subscript) else (side.args or [side.func])[-1]
    return getattr(side, "attr", getattr(side, "id", ""))


def comparisons(tree):
    """Ordering comparisons of levels or thresholds, as source."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Compare):
            continue
        if any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops):
            names = map(named, (node.left, *node.comparators))
            if any(name.endswith(("level", "levels", "threshold", "thresholds")) for name in names):
                yield ast.unparse(node)


def copies(root):
    found = []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if name in THE_RULE | KERNELS or name.startswith(LEVELS_OF_PROMISES):
            continue
        sources = comparisons(ast.parse(file.read_text()))
        found += [f"{name}: {each}" for each in sources if each not in OTHER_COMPARISONS]
    return found


def test_no_file_compares_confidences_with_thresholds_by_itself():
    assert copies(SOURCES) == [], "call swiftsure.exits.reaches or can_exit"


@pytest.mark.parametrize(
    "line",
    [
        "staying = scores <= level if strict else scores < level",
        "reachable = self.thresholds[k] <= 1.0",
        "leaves = [c for c in row if c >= self._thresholds[k]]",
    ],
)
def test_a_copy_would_be_found(line, tmp_path):
    (tmp_path / "new.py").write_text(line + "\n")
    assert copies(tmp_path)
