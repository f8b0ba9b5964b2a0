"""What is shipped: the wheel works in an empty environment, and the sdist passes its own tests."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

import swiftsure
from swiftsure.study.simulate import Population

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[2]
ZOO = importlib.util.find_spec("swiftsure_zoo")
MEGABYTE = 1_000_000
INSTALL = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")


def run(*command, **options):
    """Run a command; return what it printed, or fail with all of it."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(project, folder):
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", *options, "-w", folder, project)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """An environment with the wheel and this environment's dependencies, but no swiftsure-zoo.

    Its site-packages name ours in a .pth file, whose own .pth files, such as those of editable
    installs, are not followed.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])").strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", *INSTALL, wheel)
    return python


@pytest.fixture
def clean():
    """The environment's variables without those that lead to the sources."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_versions_are_in_step():
    described = tomllib.loads((ROOT / "zoo" / "pyproject.toml").read_text())
    assert described["project"]["version"] == swiftsure.__version__
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert f"swiftsure-zoo=={swiftsure.__version__}" in extras["zoo"]
    assert described["project"]["dependencies"] == [f"swiftsure[torch]=={swiftsure.__version__}"]


def test_what_describes_a_release_is_in_step():
    if not (ROOT / "conda").is_dir():
        pytest.skip("an sdist leaves the recipes to the repository")
    stated = f"version: {swiftsure.__version__}\n"
    assert stated in (ROOT / "CITATION.cff").read_text("utf-8")
    recipe = (ROOT / "conda" / "recipe.yaml").read_text("utf-8")
    assert stated.replace("0", '"0', 1).replace("\n", '"\n') in recipe
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    _, _, run_ = recipe.partition("  run:\n")
    needed = re.findall(r"^    - ([\w-]+) (>=\S+)$", run_.partition("\n\n")[0], re.M)
    needed = [name.removesuffix("-base") + floor for name, floor in needed if name != "python"]
    assert needed == project["dependencies"]


def test_the_wheel_holds_code_and_little_data(wheel):
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    assert "swiftsure/demo/record.parquet" in sizes
    assert {name.partition("/")[0] for name in sizes} == {
        "swiftsure",
        f"swiftsure-{swiftsure.__version__}.dist-info",
    }
    data = {name: size for name, size in sizes.items() if not name.endswith(".py")}
    assert sum(data.values()) < 2 * MEGABYTE
    assert not any("reproduce" in name or "zoo/data" in name for name in sizes)
    assert any(name.endswith("licenses/src/swiftsure/demo/NOTICE") for name in sizes)


def data_files(folder):
    """Return the files of a folder that are not code, relative to it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix()
        for path in files
        if path.suffix not in {".py", ".pyc"} and path.name != "NOTICE"
    }


def named_in(notice):
    """Return the words of a NOTICE: a file's name must stand there whole."""
    return {word.rstrip(",") for word in notice.read_text(encoding="utf-8").split()}


def test_every_data_file_of_the_wheel_is_in_its_notice():
    folder = ROOT / "src" / "swiftsure" / "demo"
    files = data_files(folder)
    assert {"weights.safetensors", "record.parquet", "images.webp"} <= files
    assert files <= named_in(folder / "NOTICE")


def test_every_data_file_of_the_zoo_is_in_its_notice():
    notice = ROOT / "zoo" / "NOTICE"
    if not notice.is_file():
        pytest.skip("an sdist leaves the zoo to its own distribution")
    files = data_files(ROOT / "zoo" / "swiftsure_zoo" / "data")
    folders = {file.partition("/")[0] for file in files}
    named = {word for word in named_in(notice) if word.partition("/")[0] in folders and "/" in word}
    assert named == files


def test_images_come_with_their_licence():
    notices = [ROOT / "src" / "swiftsure" / "demo" / "NOTICE", ROOT / "zoo" / "NOTICE"]
    for notice in filter(Path.is_file, notices):
        text = notice.read_text(encoding="utf-8")
        assert "Copyright (c) 2017 Zalando SE" in text
        assert "Permission is hereby granted, free of charge" in text


def test_segmentation_ships_no_labels():
    if ZOO is None:
        pytest.skip("swiftsure-zoo is not installed")
    from swiftsure_zoo.records import SEGMENTATION

    with np.load(SEGMENTATION.with_suffix(".npz")) as arrays:
        assert sorted(arrays) == [
            "early_confidences",
            "early_predictions",
            "late_confidences",
            "late_predictions",
        ]


def test_the_wheel_demonstrates_its_network(python, clean, tmp_path):
    shown = run(python.parent / "swiftsure", "demo", cwd=tmp_path, env=clean)
    assert shown.startswith("A network for Fashion-MNIST")
    if importlib.util.find_spec("torch") is not None:
        assert "early exits, ε = 0.01" in shown


WITHOUT_TORCH = (
    "import sys; sys.modules.update(torch=None, safetensors=None); sys.argv[0] = 'swiftsure';"
    " from swiftsure.cli import main; main()"
)


def test_the_wheel_needs_no_torch(python, clean, tmp_path):
    sample = Population(n_exits=3).sample(600, 0)
    swiftsure.ExitRecord.from_logits(sample.logits, sample.labels).save(tmp_path / "r.parquet")
    alone = (python, "-c", WITHOUT_TORCH)
    shown = run(*alone, "demo", cwd=tmp_path, env=clean)
    assert 'pip install "swiftsure[torch]"' in shown
    calibrate = ("calibrate", "r.parquet", "--loss", "zero_one", "--epsilon", "0.1")
    found = run(*alone, *calibrate, "-o", "policy.json", "--json", cwd=tmp_path, env=clean)
    assert json.loads(found)
    assert swiftsure.Policy.load(tmp_path / "policy.json").certificate.samples.n == 600


def test_the_wheel_is_what_was_run(python, clean, tmp_path):
    """Else the sources beside the tests would pass for it."""
    code = "import importlib.util as u, swiftsure; print(swiftsure.__file__)"
    code += "; print(u.find_spec('swiftsure_zoo'))"
    file, zoo = run(python, "-c", code, cwd=tmp_path, env=clean).split()
    assert str(ROOT) not in file
    assert zoo == "None"


def interpreter(version):
    """Return the interpreter of that name on the PATH, if it is one: pyenv's shims may not be."""
    found = shutil.which(f"python{version}")
    if found is None:
        return None
    asked = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([found, "-c", asked], capture_output=True, text=True, check=False)
    return found if done.stdout.strip() == version else None


SMOKE = """
import swiftsure as ss
from swiftsure.study.simulate import Population

sample = Population(n_exits=3).sample(600, 0)
record = ss.ExitRecord.from_logits(sample.logits, sample.labels)
print(ss.calibrate(record, loss="zero_one", epsilon=0.1, seed=0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_wheel_runs_on_later_pythons(version, wheel, clean, tmp_path):
    """With its dependencies as that Python gets them, and without PyTorch."""
    later = interpreter(version)
    if later is None:
        pytest.skip(f"python{version} is not on the PATH")
    run(later, "-m", "venv", tmp_path / "environment", env=clean)
    python = tmp_path / "environment" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    probe = [*map(str, install), "--dry-run", "--no-deps", "--retries", "0", "numpy"]
    if subprocess.run(probe, capture_output=True, check=False, env=clean).returncode:
        pytest.skip("no package index can be reached for the dependencies")
    run(*install, wheel, env=clean)
    assert "It exits at the first of 3 exits" in run(python, "-c", SMOKE, cwd=tmp_path, env=clean)
    simulate = (python.parent / "swiftsure", "simulate", "--draws", "20", "--json")
    assert json.loads(run(*simulate, cwd=tmp_path, env=clean))
    shown = run(python.parent / "swiftsure", "demo", cwd=tmp_path, env=clean)
    assert 'pip install "swiftsure[torch]"' in shown


@pytest.mark.slow
def test_both_wheels_run_the_readme_in_an_empty_environment(python, clean, tmp_path):
    if ZOO is None or not (ROOT / "zoo" / "NOTICE").is_file():
        pytest.skip("the zoo is not here")
    zoo = build_wheel(ROOT / "zoo", tmp_path)
    run(sys.executable, "-m", "pip", "--python", python, "install", *INSTALL, zoo)
    script = Path(__file__).with_name("run_readme.py")
    shown = run(python, script, ROOT / "README.md", cwd=tmp_path, env=clean)
    assert "of FLOPs saved" in shown
    assert "tensor(" in shown  # what the network answered
    homes = "import swiftsure, swiftsure_zoo as z; print(swiftsure.__file__, z.__file__)"
    assert str(ROOT) not in run(python, "-c", homes, cwd=tmp_path, env=clean)


@pytest.mark.slow
def test_the_zoo_is_whole(tmp_path):
    if not (ROOT / "zoo" / "NOTICE").is_file():
        pytest.skip("an sdist leaves the zoo to its own distribution")
    with zipfile.ZipFile(build_wheel(ROOT / "zoo", tmp_path)) as archive:
        names = archive.namelist()
    shipped = {name for name in names if name.startswith("swiftsure_zoo/")}
    folder = ROOT / "zoo" / "swiftsure_zoo"
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert shipped == {str(path.relative_to(folder.parent)) for path in files}
    assert any(name.endswith("licenses/NOTICE") for name in names)


@pytest.mark.slow
def test_the_sdist_passes_its_own_tests(tmp_path):
    if ZOO is None:
        pytest.skip("the tests need swiftsure-zoo")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (file,) = tmp_path.glob("*.tar.gz")
    assert file.stat().st_size < 10 * MEGABYTE
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / file.name.removesuffix(".tar.gz")
    paths = [folder / "src", *ZOO.submodule_search_locations]
    paths = [str(path).removesuffix("/swiftsure_zoo") for path in paths]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # All are collected, which imports all; the quick folders run, without the rest of this file.
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow")
    run(*pytest_, "--collect-only", "tests", cwd=folder, env=environment)
    parts = ("tests/records", "tests/experiments", "tests/test_docs.py", "tests/test_imports.py")
    shown = run(*pytest_, "-n", "2", *parts, cwd=folder, env=environment)
    assert " passed" in shown
