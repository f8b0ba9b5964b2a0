"""Help: every verb shows a complete example, and the examples run."""

import inspect
import re
import shlex
from itertools import chain

import pytest
import typer

import swiftsure
from swiftsure.certify.control import OPTIONS
from swiftsure.cli.app import app

QUICK = {
    "simulate": ["--draws", "5"],
    "evaluate": ["--splits", "3"],
}


def commands():
    """Every command by its words: those that do something, and those that hold others."""
    verbs, groups = {}, {}

    def walk(command, words):
        children = getattr(command, "commands", None)
        (verbs if children is None else groups)[words] = command
        for name, child in (children or {}).items():
            walk(child, (*words, name))

    walk(typer.main.get_command(app), ())
    return verbs, groups


VERBS, GROUPS = commands()


def joined(text):
    """The text with lines that a backslash continues made one."""
    return re.sub(r" *\\\s+", " ", text)


def examples(command):
    lines = [line.strip() for line in joined(command.help).splitlines()]
    return [line for line in lines if line.startswith("swiftsure ")]


EXAMPLES = {  # a group may show one of its verbs'
    example: None
    for words, command in {**VERBS, **GROUPS}.items()
    # They need a model or a pickle, and a server does not end; tests/serve starts it.
    if words not in {("collect",), ("convert",), ("export",), ("serve",)}
    for example in examples(command)
    if words or example != "swiftsure demo"
}


def test_the_verbs_are_all_there():
    assert {words[0] for words in VERBS} >= {"demo", "calibrate", "evaluate", "plan"}


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


@pytest.mark.parametrize("words", GROUPS, ids=" ".join)
def test_help_of_a_group_shows_a_complete_example(run, words):
    done = run(*words, "--help")
    assert (done.status, done.err) == (0, "")
    shown = examples(GROUPS[words])
    assert shown
    for example in shown:
        assert example.startswith(" ".join(["swiftsure", *words, ""]))
        assert f"    {example}" in done.out


@pytest.mark.parametrize("words", [*VERBS, *GROUPS], ids=" ".join)
def test_80_columns_are_enough(words):
    """Help keeps its line breaks, so a longer line would be broken once more."""
    command = {**VERBS, **GROUPS}[words]
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
    shown = run("--help").out
    assert "Exit status" in shown
    assert "70 a bug in swiftsure" in shown


def test_help_names_every_option_of_the_controls(run):
    shown = run("calibrate", "--help").out
    for option in {"bound", *chain.from_iterable(OPTIONS.values())}:
        assert re.search(rf"\b{option}\b", shown), option


def test_nothing_to_do_is_bad_usage_with_help(run):
    done = run()
    assert done.status == 2
    assert "calibrate" in done.out + done.err


def test_the_version(run):
    assert run("--version").out == f"swiftsure {swiftsure.__version__}\n"
