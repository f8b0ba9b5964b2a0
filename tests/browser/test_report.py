"""The page about a policy in a real browser: it runs, it moves, it prints, it fits a phone."""

import re
import time

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.certify.policy import percent
from swiftsure.report import policy_page
from swiftsure.report.findings import findings
from swiftsure.report.sentences import threshold_words
from swiftsure.study.simulate import Population

ARROW_RIGHT = "\ue014"
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 23, 27)"
MOVE = """
const slider = document.querySelectorAll("input[data-promise]")[arguments[0]];
slider.value = arguments[1];
slider.dispatchEvent(new Event("input", { bubbles: true }));
"""
SHOWN = """
const texts = (name) => [...document.querySelectorAll(`.what-if-panel [${name}]`)]
  .map((element) => element.textContent.replaceAll("\\u00a0", " "));
return {
  epsilon: texts("data-epsilon"), threshold: texts("data-threshold"),
  saved: texts("data-saved"), risk: texts("data-risk"),
  shares: [...document.querySelectorAll("[data-share]")].map((element) => element.textContent),
  marks: [...document.querySelectorAll("[data-what-if-setting]")]
    .map((line) => line.x1.baseVal.value),
  warned: !document.querySelector(".what-if-panel [data-other]").hidden,
};
"""
TOO_SMALL = """
return [...document.querySelectorAll("svg text")]
  .map((text) => text.getBoundingClientRect()).filter((box) => box.height < 9).length;
"""
OUTSIDE = """
return [...document.querySelectorAll("svg")].flatMap((drawing) => {
  const frame = drawing.getBoundingClientRect();
  return [...drawing.querySelectorAll("text")].filter((text) => {
    const box = text.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1;
  }).map((text) => text.textContent);
});
"""
CONTRAST = """
const channels = (color) => color.match(/\\d+/g).slice(0, 3).map((value) => {
  const share = Number(value) / 255;
  return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
});
const weights = [0.2126, 0.7152, 0.0722];
const light = (color) => channels(color).reduce((sum, c, k) => sum + c * weights[k], 0);
const behind = (element) => {
  const color = getComputedStyle(element).backgroundColor;
  return color === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : color;
};
const texts = [...document.querySelectorAll("p, td, th, dt, dd, output, svg text")];
return Math.min(...texts.map((element) => {
  const style = getComputedStyle(element);
  const paper = light(behind(element));
  const ink = light(element instanceof SVGElement ? style.fill : style.color);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
}));
"""


@pytest.fixture(scope="module")
def record():
    sample = Population(n_exits=4, overconfidence=1.5).sample(800, 0)
    return ss.ExitRecord.from_logits(sample.logits, sample.labels, costs={"layers": [3, 6, 9, 12]})


@pytest.fixture
def visit(browser, tmp_path):
    """Write a page and open it."""

    def opened(page, **screen):
        (tmp_path / "page.html").write_text(page, encoding="utf-8")
        browser.emulate(**{"width": 1100, **screen})
        browser.open(tmp_path / "page.html")
        return browser

    return opened


@pytest.fixture(scope="module")
def policy(record):
    return ss.calibrate(record, loss="zero_one", epsilon=0.05)


@pytest.fixture(scope="module")
def page(record, policy):
    return policy_page(record, policy)


def test_the_slider_moves_the_numbers(visit, record, policy, page):
    window = visit(page)
    found = findings(record, policy)
    choices = found.by_epsilon[0]
    before = window.script(SHOWN)
    assert before["epsilon"] == ["0.05"]
    assert before["threshold"] == [threshold_words(policy.threshold)]
    assert not before["warned"]
    for position in (0, len(choices.epsilons) - 1, choices.own - 8):
        window.script(MOVE, 0, position)
        now = window.script(SHOWN)
        setting = found.settings[choices.settings[position]]
        assert now["epsilon"] == [f"{choices.epsilons[position]:.6g}"]
        assert now["threshold"] == [threshold_words(setting.threshold)]
        assert now["risk"] == [f"{setting.risks[0]:.4g}"]
        assert now["saved"][1] == percent(setting.saved["layers"])
        assert now["warned"]
        assert now["marks"] != before["marks"]
        assert now["shares"] != before["shares"]
    window.script("document.getElementById('back').click()")
    assert window.script(SHOWN) == before
    assert window.console() == []


@pytest.mark.parametrize("broken", ["throw new Error('oh')", "console.error('oh')", "fetch('x')"])
def test_the_check_itself_notices(visit, broken):
    page = f"<!DOCTYPE html><link rel=icon href=data:,><script>{broken}</script>"
    window = visit(page)
    end = time.monotonic() + 30
    while not (found := window.console()) and time.monotonic() < end:
        pass  # a refused request is told of when it has been refused, which may be after the load
    assert found


def test_arrow_keys_move_it_too(visit, record, policy, page):
    window = visit(page)
    slider = "document.querySelector('input[data-promise]')"
    window.script(f"{slider}.focus()")
    window.press(ARROW_RIGHT)
    choices = findings(record, policy).by_epsilon[0]
    epsilon = f"{choices.epsilons[choices.own + 1]:.6g}"
    assert window.script(SHOWN)["epsilon"] == [epsilon]
    assert window.script(f"return {slider}.getAttribute('aria-valuetext')") == f"ε = {epsilon}"


def test_several_sliders_show_the_safest_of_their_settings(visit, record):
    promises = [
        ss.Promise("zero_one", epsilon=0.05),
        ss.Promise("brier", risk="consistency", epsilon=0.1),
    ]
    policy = ss.calibrate(record, promises)
    found = findings(record, policy)
    window = visit(policy_page(record, policy))
    for first, second in [(60, 5), (5, 60), (60, 60)]:
        window.script(MOVE, 0, first)
        window.script(MOVE, 1, second)
        index = min(found.by_epsilon[0].settings[first], found.by_epsilon[1].settings[second])
        assert window.script(SHOWN)["threshold"] == [
            threshold_words(found.settings[index].threshold)
        ]
    assert window.console() == []


@pytest.mark.parametrize("kind", ["nothing", "crc", "thresholds", "budget"])
def test_every_page_runs_without_a_complaint(visit, record, kind):
    if kind == "thresholds":
        rng = np.random.default_rng(0)
        record = ss.ThresholdRecord([1, 0.5], losses={"rouge_l": rng.random((100, 2))})
    options = {
        "nothing": {"loss": "zero_one", "epsilon": 0.001},
        "crc": {"loss": "brier", "control": "crc", "epsilon": 0.05},
        "thresholds": {"epsilon": 0.3},
    }
    if kind == "budget":
        budget = ss.planning.Budget(saving=0.3, cost="exit")
        policy = ss.planning.lowest_epsilon(record, budget, loss="brier").policy
    else:
        policy = ss.calibrate(record, **options[kind])
    window = visit(policy_page(record, policy))
    assert window.script("return document.querySelector('.promise').textContent")
    assert window.console() == []


def test_nothing_from_a_file_runs(visit):
    evil = "</script><script>document.title = 'gone'</script><img src=x onerror='document.title=1'>"
    losses = np.column_stack([np.full(300, 0.01), np.zeros(300)])
    record = ss.ExitRecord({evil: np.full((300, 1), 0.5)}, losses={evil: losses})
    window = visit(policy_page(record, ss.calibrate(record, epsilon=0.2)))
    assert window.script("return document.title") == "Swiftsure report"
    assert window.script("return document.images.length") == 0
    assert window.console() == []


@pytest.mark.parametrize(("scheme", "paper"), [("light", LIGHT), ("dark", DARK)])
def test_both_colour_schemes_can_be_read(visit, page, scheme, paper):
    window = visit(page, scheme=scheme)
    assert window.script("return getComputedStyle(document.body).backgroundColor") == paper
    assert window.script(CONTRAST) >= 4.5


@pytest.mark.parametrize("width", [360, 768, 1400])
def test_it_fits_the_screen(visit, page, width):
    window = visit(page, width=width)
    assert window.script("return document.documentElement.scrollWidth") <= width
    assert window.script(TOO_SMALL) == 0
    assert window.script(OUTSIDE) == []


def test_it_prints_on_white_without_the_slider(visit, page):
    window = visit(page, scheme="dark", media="print")
    assert window.script("return getComputedStyle(document.body).backgroundColor") == LIGHT
    slider = "getComputedStyle(document.querySelector('input[data-promise]'))"
    assert window.script(f"return {slider}.display") == "none"
    printed = window.pdf()
    assert printed.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type /Page\b", printed)) <= 8
    assert window.console() == []
