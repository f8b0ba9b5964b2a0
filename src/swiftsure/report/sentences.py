"""The sentences in a report."""

from swiftsure.certify.bounds import minimum_samples
from swiftsure.certify.certificate import Certificate
from swiftsure.certify.policy import Policy
from swiftsure.certify.wording import average_sentence, fewest_samples, percent
from swiftsure.losses import LossRange
from swiftsure.report.drawings import cost_words
from swiftsure.report.figures import threshold_text
from swiftsure.report.findings import Findings
from swiftsure.report.quality import ExitLoss
from swiftsure.report.sensitivity import LARGEST, BySize, Threshold

__all__ = [
    "about_average",
    "about_bound",
    "about_choice",
    "about_exits",
    "about_order_of_exits",
    "about_order_of_samples",
    "about_reliability",
    "about_sizes",
    "guarantee_words",
    "success_words",
    "threshold_words",
]

WORTH_SAYING = 0.005
"""Savings that differ by less than this share are reported as the same."""

NO_EXITS = (
    "This record holds whole runs at each threshold, so there are no exits to show: their"
    " shares, losses and reliability are left out."
)


def threshold_words(threshold: Threshold) -> str:
    """Format a threshold, or those of several exits; None is the full model."""
    if threshold is None:
        return "full model"
    if isinstance(threshold, str):
        return threshold
    if isinstance(threshold, tuple):
        return "(" + ", ".join("never" if t is None else threshold_text(t) for t in threshold) + ")"
    return f"{threshold:.4g}" if threshold < 0.995 else threshold_text(threshold)


def guarantee_words(policy: Policy) -> str:
    """Return the strength of the guarantee in a few words."""
    certificate = policy.certificate
    if policy.runs_full_model:
        return "always"
    if certificate.guarantee == "none":
        return "no guarantee"
    if certificate.guarantee == "expectation":
        return "on average"
    return f"{100 * (1 - (certificate.delta or 0)):.12g} %"


def about_choice(policy: Policy) -> str:
    """Return what the threshold applies to, or why there is none."""
    certificate = policy.certificate
    if not policy.runs_full_model:
        return f"of {policy.score}" if policy.score else ", ".join(policy.dials or policy.settings)
    if certificate.by_budget and certificate.promises[0].upper_bound is None:
        return "the budget allows it"
    return f"nothing faster is {'found' if certificate.guarantee == 'none' else 'certified'}"


def success_words(certificate: Certificate) -> tuple[str, str]:
    """Return the words for a calibration set that finds a faster setting: short and long."""
    if certificate.guarantee == "none":
        return "faster", "choose anything faster than the full model"
    return "certify", "certify anything"


def about_average(certificate: Certificate) -> str:
    """Return what has equal weight in risks and costs of grouped samples."""
    return average_sentence(certificate.samples.unit, certificate.samples.average)


def about_bound(found: Findings) -> str:
    """Explain the upper line of the risk chart."""
    along, certificate = found.risks[0], found.policy.certificate
    if along.upper is None:
        return (
            "This rule looks at the measured risk alone, which exceeds ε about half of the time"
            " at the setting where they meet."
        )
    if certificate.guarantee == "probability":
        text = "The upper bound holds for each threshold on its own, as if it alone were tested."
        if found.by_epsilon is None:  # a budget chose the setting
            return text
        if certificate.options.get("correction") == "bonferroni":
            return f"{text} Each is tested at δ shared among all, and the fastest that passes wins."
        return f"{text} Settings are tested from the safe end, up to the first that fails."
    if certificate.options.get("method") == "ucb":
        return (
            f"To keep the mean within ε, the upper bound is held at {along.tested_at:.4g}, a little"
            " below ε."
        )
    running = certificate.guarantee == "expectation"
    unit = certificate.samples.unit.removesuffix("s")
    losses = f"the largest loss of each {unit} so far" if running else "the losses"
    return f"CRC compares with ε the mean of {losses}, with one more {unit} of the largest loss."


def about_exits(found: Findings) -> str:
    """Say which samples the exit shares refer to."""
    if found.setting.shares is None:
        return NO_EXITS
    text = f"Of the {found.policy.certificate.samples.n_samples:,} calibration samples"
    if found.policy.certificate.samples.unit == "groups":
        text += ", each counted once, whatever its group"
    return f"{text}."


def about_order_of_exits(found: ExitLoss, n_samples: int) -> str:
    """Say whether a mean loss falls from exit to exit (Eq. 2 of the paper)."""
    if found.n == 0:
        return "No sample has a label, so there is nothing to show."
    if not found.rises:
        text = "Every exit is at least as good as the one before it."
    else:
        each = [
            f"exit {rise.exit + 1} is worse than exit {rise.exit} by {rise.by:.2g}"
            f" (± {rise.standard_error:.1g}{', more than noise' if rise.clear else ''})"
            for rise in found.rises
        ]
        text = f"Not every exit improves on the one before it: {'; '.join(each)}."
    if found.n < n_samples:
        text += (
            f" This uses only the {found.n:,} samples with a label. If labels were requested where"
            " exits disagree, these samples are not like the others."
        )
    return text


def about_order_of_samples(certificate: Certificate) -> str:
    """Say how the order of the samples was chosen."""
    seed, drawn = certificate.provenance.seed, certificate.provenance.seed_drawn
    if seed is None:
        return "does not matter"
    origin = {True: "drawn at random", False: "given", None: "of unknown origin"}
    return f"shuffled with seed {seed}, {origin[drawn]}"


def about_reliability(found: Findings) -> str:
    """Explain the reliability diagrams, or say what the record lacks for them."""
    if found.reliability is None:
        return (
            "Reliability diagrams need the probability of the predicted class (the score top1) and"
            " whether it was right (the loss zero_one) for every sample, which the record does not"
            " hold."
        )
    return (
        "On the diagonal, an exit with a confidence of 80 % is right 80 times out of 100. Above it,"
        " the exit is underconfident; below, overconfident. The number is the mean distance, the"
        " expected calibration error. The promise does not depend on any of this. The last exit"
        " has no confidence, because it takes all remaining samples."
    )


def about_sizes(found: Findings) -> str:
    """Say what more samples would save: "collect 400 more samples and save 9 points more"."""
    sizes, certificate = found.by_size, found.policy.certificate
    if sizes is None:
        if certificate.samples.population is not None:
            return "The effect of more samples is not shown for a finite pool."
        if certificate.samples.n > LARGEST:
            return "The effect of more samples is not shown, because drawing so many is slow."
        return "The effect of more samples is not shown: it is slow for this path and control."
    if sizes.saved is None or found.cost is None:
        return ""
    samples = certificate.samples
    own = sizes.sizes.index(samples.n)
    here, more = sizes.saved[own], sizes.saved[own + 1 :]
    of_cost = f"of {cost_words(found.cost)}"
    if not any(sizes.certified[own:]):
        return _nothing_by_size(certificate, sizes)
    if not more:  # nothing larger was drawn
        return ""
    if max(more) - here < WORTH_SAYING:
        largest = sizes.sizes[-1]
        return (
            f"More {certificate.samples.unit}, up to {largest:,}, would hardly save more {of_cost}."
        )
    # Suggest the first size that gains more than half of the possible extra saving.
    position = next(k for k, saved in enumerate(more) if saved - here > (max(more) - here) / 2)
    extra, then = sizes.sizes[own + 1 + position] - samples.n, more[position]
    return (
        f"Collect {extra:,} more {samples.unit} and save {100 * (then - here):.1f} points more"
        f" {of_cost}: on average {percent(then)} instead of {percent(here)}."
    )


def _nothing_by_size(certificate: Certificate, sizes: BySize) -> str:
    """Say that no size that was tried finds a faster setting, and which size might."""
    largest, unit = sizes.sizes[-1], certificate.samples.unit
    if certificate.guarantee == "none":
        return f"Nothing faster would be found with up to {largest:,} {unit}."
    text = f"Nothing would be certified with up to {largest:,} {unit}"
    fewest = fewest_samples(certificate)
    if fewest > largest:
        return f"{text}; even if every loss were 0, the tests here would need at least {fewest:,}."
    lossless = _lossless_samples(certificate)
    if lossless > largest:
        return f"{text}; even if none had a loss, it would take at least {lossless:,}."
    return f"{text}."


def _lossless_samples(certificate: Certificate) -> int:
    """Return how many samples without any loss certify the promises; 0 if unknown."""
    if certificate.guarantee != "probability" or certificate.delta is None:
        return 0
    return max(
        minimum_samples(promise.epsilon, certificate.delta, LossRange(0, promise.loss_range[1]))
        or 0
        for promise in certificate.promises
    )
