"""The grammar of promises."""

import pytest

import swiftsure as ss
from swiftsure.cli.promises import PromiseError, parse_promise, promise_text

STATEMENTS = {
    "gap zero_one <= 0.01": ss.Promise("zero_one", epsilon=0.01),
    "gap<=1%": ss.Promise(epsilon=0.01),
    "consistency brier <= 0.05": ss.Promise("brier", risk="consistency", epsilon=0.05),
    "zero-bounded gap brier ≤ .05": ss.Promise("brier", risk="zero-bounded gap", epsilon=0.05),
    "P(gap brier > 0.1) <= 0.05": ss.Promise("brier", above=0.1, epsilon=0.05),
    "P ( gap > 0 ) <= 0.05": ss.Promise(above=0.0, epsilon=0.05),
    "worst 10% of gap brier <= 0.3": ss.Promise("brier", worst=0.1, epsilon=0.3),
    "worst 0.1 of gap brier above 0.05 <= 0.3": ss.Promise(
        "brier", worst=0.1, above=0.05, epsilon=0.3
    ),
    "gap zero_one among exits <= 0.08": ss.Promise("zero_one", among="exits", epsilon=0.08),
    "gap zero_one within slices <= 0.05": ss.Promise("zero_one", within="slices", epsilon=0.05),
    "P(gap brier > 0.1) among exits within each slice <= 0.05": ss.Promise(
        "brier", above=0.1, among="exits", within="each slice", epsilon=0.05
    ),
    'gap "my (own) loss" <= 0.05': ss.Promise("my (own) loss", epsilon=0.05),
    'gap "among" <= 0.05': ss.Promise("among", epsilon=0.05),
    "cost flops <= 3e9": ss.CostPromise("flops", at_most=3e9),
    'cost "US dollars" <= 0.01': ss.CostPromise("US dollars", at_most=0.01),
}


@pytest.mark.parametrize("text", STATEMENTS)
def test_every_statement_is_read_and_written(text):
    promise = parse_promise(text)
    assert promise == STATEMENTS[text]
    assert parse_promise(promise_text(promise)) == promise


@pytest.mark.parametrize(
    ("text", "expected", "place"),
    [
        ("gap zero_one < 0.01", "<=", "< 0.01"),
        ("gap zero_one <= lots", "a number", "lots"),
        ("gp zero_one <= 0.01", "a risk (gap or consistency)", "gp"),
        ("P(gap brier) <= 0.01", ">", ") <="),
        ("P gap brier > 0.1 <= 0.01", "(", "gap"),
        ("worst gap brier <= 0.01", "a number", "gap"),
        ("worst 10% gap brier <= 0.01", "of", "gap"),
        ("gap zero_one among all <= 0.01", "exits", "all"),
        ("gap zero_one within slice <= 0.01", "slices, or each slice", "slice"),
        ("gap zero_one <= 0.01 0.02", "nothing more", "0.02"),
        ("cost <= 3e9", "the name of a cost", "<="),
        ("gap zero_one", "<=", ""),
        ("", "a risk (gap or consistency)", ""),
    ],
)
def test_what_cannot_be_read_is_marked(text, expected, place):
    with pytest.raises(PromiseError) as raised:
        parse_promise(text)
    first, _, shown, mark, _, *grammar = str(raised.value).splitlines()
    assert first == f"a promise cannot be read; expected {expected} at the mark:"
    assert shown == f"  {text}"
    column = mark.index("^") - 2
    assert text[column:].startswith(place)
    assert (column == len(text)) == (place == "")
    assert '"gap zero_one <= 0.01"' in "\n".join(grammar)


def test_values_that_cannot_be_are_refused():
    with pytest.raises(PromiseError, match="'cost flops <= -1' cannot be kept: `at_most`"):
        parse_promise("cost flops <= -1")


def test_the_command_shows_the_grammar(run):
    done = run("calibrate", "record.parquet", "--promise", "gap zero_one < 0.01")
    assert (done.status, done.out) == (2, "")
    lines = done.err.splitlines()
    assert lines[0] == "swiftsure: a promise cannot be read; expected <= at the mark:"
    assert lines[2:4] == ["  gap zero_one < 0.01", "               ^"]
    assert lines[5] == "A promise is one of"
