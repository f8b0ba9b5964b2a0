"""Self-contained HTML reports about a policy."""

import hashlib
from base64 import b64encode
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import swiftsure
from swiftsure.certify.policy import Policy, average_words, percent, sentence_parts
from swiftsure.report import drawings, sentences
from swiftsure.report.charts import Chart
from swiftsure.report.findings import Findings, findings
from swiftsure.report.sensitivity import ByEpsilon

__all__ = ["policy_page", "rendered"]

TABLE_ROWS = 10
"""Rows in the table of levels, of the sixty or so that were tried."""


def policy_page(record: Any, policy: Policy, *, cost: str | None = None) -> str:
    """Return an HTML page about a policy: what it promises, what it saves, what it rests on.

    The page is self-contained: charts are inline SVG, and nothing is loaded. A slider shows the
    results at other levels; *choosing* a level with it voids the promise, unless you then calibrate
    on other samples. The same input gives the same page.

    Parameters
    ----------
    record : ExitRecord, ThresholdRecord or ShardedRecord
        The samples that the policy was calibrated on, with those of its pilot if it had one.
    policy : Policy
        Of a SlicedPolicy, that of one slice, whose samples are enough.
    cost : str, optional
        The cost to show; by default the one that `policy.evaluate` reports.

    Raises
    ------
    ValueError
        If calibrating again on the record gives another policy; the message says what differs.

    Examples
    --------
    >>> import swiftsure as ss
    >>> from swiftsure.study.simulate import Population
    >>> sample = Population().sample(1000, seed=0)
    >>> record = ss.ExitRecord.from_logits(sample.logits, sample.labels)
    >>> page = policy_page(record, ss.calibrate(record, loss="zero_one", epsilon=0.05))
    >>> page.splitlines()[0]
    '<!DOCTYPE html>'
    """
    return rendered(findings(record, policy, cost))


def rendered(found: Findings) -> str:
    """Render the page."""
    environment = _environment()
    script = _source("report.js")
    promise, conditions = sentence_parts(found.policy)
    return environment.get_template("report.html.j2").render(
        found=found,
        policy=found.policy,
        certificate=found.policy.certificate,
        promise=promise.rstrip(".") + ".",
        conditions=conditions.removeprefix(", ").removeprefix("; "),
        script=Markup(script),  # our own file
        style=Markup(_source("report.css")),
        script_hash=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=swiftsure.__version__,
        charts=_charts(found),
        what_if=_what_if(found),
        epsilon_rows=_epsilon_rows(found),
        sentences=sentences,
        percent=percent,
        cost_words=drawings.cost_words,
        below_zero=drawings.BELOW_ZERO,
        average_words=average_words(
            found.policy.certificate.unit, found.policy.certificate.average
        ),
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("swiftsure.report"),
        autoescape=True,  # names of losses, scores and costs come from files
        undefined=StrictUndefined,
        finalize=_with_no_break_spaces,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _with_no_break_spaces(value: Any) -> Any:
    """Keep numbers and their per cent signs on one line."""
    return value.replace(" %", "\N{NO-BREAK SPACE}%") if isinstance(value, str) else value


@cache
def _source(name: str) -> str:
    loader = _environment().loader
    if loader is None:
        raise TypeError("the environment has a loader")
    return loader.get_source(_environment(), name)[0]


def _charts(found: Findings) -> dict[str, Any]:
    """Return the charts of each section."""
    return {
        "risks": [drawings.risk_chart(found, k) for k in range(len(found.risks))],
        "saving": drawings.saving_chart(found),
        "exits": drawings.exit_shares_chart(found.setting),
        "movement": drawings.movement_charts(found),
        "losses": [
            (each, drawings.exit_loss_chart(each) if each.n else None)
            for each in found.exit_losses or ()
        ],
        "reliability": [drawings.reliability_chart(each) for each in found.reliability or ()],
    }


def _what_if(found: Findings) -> dict[str, Any] | None:
    """Return the slider's texts and positions, so that the script computes nothing.

    The setting that several promises allow together is the safest of theirs: the smallest index.
    """
    if found.by_epsilon is None or not found.separable:
        return None
    risks = [drawings.risk_chart(found, k) for k in range(len(found.risks))]
    first, last = found.shown[0], found.shown[-1]
    shares = drawings.exit_shares_chart(found.setting)
    return {
        "promises": [
            {
                "epsilons": [f"{value:.6g}" for value in each.epsilons],
                "settings": list(each.settings),
                "own": each.own,
                "heights": [axes.y(e) if axes.y.holds(e) else None for e in each.epsilons],
            }
            for each, axes in zip(found.by_epsilon, risks, strict=True)
        ],
        "settings": {
            str(k): {
                "threshold": sentences.threshold_words(each.threshold),
                "risks": [f"{risk:.4g}" for risk in each.risks],
                "saved": [_with_no_break_spaces(percent(share)) for share in each.saved.values()],
                "shares": [_with_no_break_spaces(percent(share)) for share in each.shares or ()],
                "widths": [] if shares is None else _widths(shares, each.shares or ()),
                "at": risks[0].x(min(max(k, first), last)),
            }
            for k, each in found.settings.items()
        },
    }


def _widths(axes: Chart, shares: tuple[float, ...]) -> list[float]:
    return [round(share * (axes.x.stop - axes.x.start), 1) for share in shares]


def _epsilon_rows(found: Findings) -> list[list[tuple[float, bool, Any]]]:
    """Return rows (level, whether it is the policy's own, setting) for each promise."""

    def rows(each: ByEpsilon) -> list[tuple[float, bool, Any]]:
        step = -(-len(each.epsilons) // TABLE_ROWS)
        picked = range(each.own % step, len(each.epsilons), step)  # includes the policy's own
        return [(each.epsilons[k], k == each.own, found.settings[each.settings[k]]) for k in picked]

    return [rows(each) for each in found.by_epsilon or ()]
