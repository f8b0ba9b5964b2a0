"""Help: every verb shows a complete example, and the examples run."""

import inspect
import re
import shlex

import pytest
import typer

import swiftsure
from swiftsure.cli.app import app

QUICK = {
    "simulate": ["--draws", "5"],
    "evaluate": ["--splits", "3"],
    "reproduce": ["--splits", "2"],
}


def verbs():
    """Every command that does something, by its words."""
    found = {}

    def walk(command, words):
        children = getattr(command, "commands", None)
        if children is None:
            found[words] = command
        else:
            for name, child in children.items():
                walk(child, (*words, name))

    walk(typer.main.get_command(app), ())
    return found


VERBS = verbs()


def joined(text):
    """The text with lines that a backslash continues made one."""
    return re.sub(r" *\\\s+", " ", text)


def examples(command):
    lines = [line.strip() for line in joined(command.help).splitlines()]
    return [line for line in lines if line.startswith("swiftsure ")]


EXAMPLES = [
    example
    for words, command in VERBS.items()
    if words not in {("collect",), ("convert",)}  # they need a model, and a pickle
    for example in examples(command)
] + [example for example in examples(typer.main.get_command(app)) if example != "swiftsure demo"]


def test_the_verbs_are_all_there():
    assert {words[0] for words in VERBS} >= {"demo", "calibrate", "evaluate", "plan", "reproduce"}


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_help_shows_a_complete_example(run, words, flag):
    done = run(*words, flag)
    assert (done.status, done.err) == (0, "")
    shown = examples(VERBS[words])
    assert shown
    text = " ".join(joined(done.out).split())
    for example in shown:
        assert example.startswith(f"swiftsure {' '.join(words)} ")
        assert " ".join(example.split()) in text
    assert "--json" in done.out
    assert "<bool>" not in done.out


@pytest.mark.parametrize("words", [(), *VERBS], ids=" ".join)
def test_80_columns_are_enough(words):
    """Help keeps its line breaks, so a longer line would be broken once more."""
    command = VERBS.get(words, typer.main.get_command(app))
    assert max(map(len, inspect.cleandoc(command.help).splitlines())) <= 74


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_every_option_is_explained(words):
    for parameter in VERBS[words].params:
        assert getattr(parameter, "help", None), parameter.name


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_examples_run(run, example, made):
    _, *arguments = shlex.split(example)
    done = run(*arguments, *QUICK.get(arguments[0], []))
    assert (done.status, done.err) == (0, "")
    wanted = re.findall(r"(?:-o|--figure) (\S+)", example)
    assert {name.partition("/")[0] for name in wanted} <= made()


def test_the_first_help_names_every_verb(run):
    done = run("--help")
    assert done.status == 0
    for words in VERBS:
        assert words[0] in done.out
    assert examples(typer.main.get_command(app))
    assert "<bool>" not in done.out


def test_the_first_help_explains_the_exit_status(run):
    assert "Exit status" in run("--help").out


def test_nothing_to_do_is_bad_usage_with_help(run):
    done = run()
    assert done.status == 2
    assert "calibrate" in done.out + done.err


def test_the_version(run):
    assert run("--version").out == f"swiftsure {swiftsure.__version__}\n"
