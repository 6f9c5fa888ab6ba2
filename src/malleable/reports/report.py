"""``malleable report``: runs beside each other, and beside the paper, in one HTML file that opens from disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

from malleable.figures.style import INK, LINES
from malleable.files import write_whole
from malleable.progress import with_progress
from malleable.reports import sections
from malleable.reports.outcome import Group, read_run
from malleable.reports.page import Html, element, page, paragraph, section
from malleable.reports.statistics import shown_p

SIGNATURE = "Written by malleable"
"""What tells a report of ours from another page."""

SIGNIFICANT = 0.05
"""A difference with a p-value below it is not called chance."""

_COLOURS = tuple("var(--ink)" if colour == INK else colour for colour in LINES)  # as the curves have them


def write_report(groups: Mapping[str, Sequence[Path]], out: Path, title: str, intro: str = "") -> None:
    """Write the report of ``groups``: shown name → its runs' folders, several of them if they are seeds of one method.

    Figures are those of the last validation of training, however a run was evaluated afterwards. The first group
    without depth, or the first of all, is what the others are compared with. ``out`` is replaced if it exists.
    """
    read = [Group(name, tuple(read_run(run, evaluated=False) for run in runs)) for name, runs in groups.items()]
    _write(read, out, title, intro)


def _write(groups: Sequence[Group], out: Path, title: str, intro: str = "") -> None:
    if not groups or not all(group.runs for group in groups):
        raise ValueError("groups must hold at least one run each")
    colours = {group.name: _COLOURS[number % len(_COLOURS)] for number, group in enumerate(groups)}
    baseline = _baseline(groups)
    parts: list[tuple[str, Callable[[], list[Html]]]] = [
        ("Results", lambda: sections.results(groups, baseline, colours)),
        ("Figures", lambda: sections.comparison(groups)),
        ("Classes", lambda: sections.classes(groups, colours)),
        ("Settings", lambda: sections.settings(groups)),
        ("Cost and speed", lambda: sections.cost(groups, baseline)),
        *(("Runs", partial(sections.run, group, run, baseline.runs[0])) for group in groups for run in group.runs),
    ]
    content: dict[str, list[Html]] = {}
    for name, part in with_progress(parts, len(parts), out.name):
        content.setdefault(name, []).extend(part())
    anchors = {name: name.lower().replace(" ", "-") for name in content}
    links = [element("li", element("a", name, href=f"#{anchor}")) for name, anchor in anchors.items()]
    setting = _setting(groups, baseline)
    header = element(
        "header",
        element("h1", title),
        paragraph(*_headline(groups, baseline), kind="headline"),
        paragraph(setting, kind="setting") if setting else None,
        paragraph(intro) if intro else None,
        element("nav", element("ul", *links), aria_label="Contents"),
    )
    body = element("main", *(section(anchors[name], name, *found) for name, found in content.items()))
    footer = element("footer", paragraph(f"{SIGNATURE} {version('malleable')} on {_today()}."))
    write_whole(out, page(title, header, body, footer).encode())


def _baseline(groups: Sequence[Group]) -> Group:
    """What the others are compared with."""
    measured = [group for group in groups if group.miou is not None] or groups
    return next((group for group in measured if group.config.model.conv is None), measured[0])


def _best(groups: Sequence[Group], baseline: Group) -> Group:
    """The one furthest above the baseline; one that lacks seeds of the baseline's only if all others do."""
    compared = [(gain.mean, gain.n, group) for group in groups if (gain := group.ahead(baseline))]
    whole = [(mean, group) for mean, n, group in compared if n == len(baseline.counted) and group is not baseline]
    above = whole or [(mean, group) for mean, _, group in compared]
    return max([(0.0, baseline), *above], key=lambda pair: pair[0])[1]


def _apart(groups: Sequence[Group], baseline: Group) -> list[Group]:
    """Those with figures that may not be compared with the baseline's."""
    return [group for group in groups if group.miou is not None and group.ahead(baseline) is None]


def _headline(groups: Sequence[Group], baseline: Group) -> list[object]:
    """The one sentence that matters, and what it cannot tell of."""
    best, apart = _best(groups, baseline), _apart(groups, baseline)
    ahead = best.ahead(baseline)
    if best.miou is None or ahead is None:
        return ["No run has a result yet."]
    words: list[object] = [best.name, " reaches ", element("strong", f"{best.miou.mean:.1f} mIoU")]
    further = [group.name for group in groups if (gain := group.ahead(baseline)) and gain.mean > ahead.mean]
    if best is not baseline and round(ahead.mean, 1) == 0:
        words.append(f", level with {baseline.name}.")
    elif best is not baseline:
        words += [", ", element("strong", f"{ahead.mean:.1f} above"), f" {baseline.name}."]
    else:
        compared = any(group is not baseline and group.ahead(baseline) is not None for group in groups)
        nothing = compared and not further
        words.append(f"; no {'run compared with it' if apart else 'other run'} is above it." if nothing else ".")
    if further:
        words.append(f" Further above {baseline.name}, but with fewer seeds: {', '.join(further)}.")
    if apart:
        scores = ", ".join(f"{group.name} ({group.miou.mean:.1f} mIoU)" for group in apart if group.miou)
        words.append(f" Not compared with {baseline.name}: {scores}.")
    return words


def _setting(groups: Sequence[Group], baseline: Group) -> str:
    """What the headline's figures were measured on, and what to mind in reading them."""
    settings = dict.fromkeys(group.setting for group in groups if group.setting is not None)
    sentences = [f"Measured on {'; '.join(settings)}."] if settings else []
    best = _best(groups, baseline)
    ahead = best.ahead(baseline)
    if ahead and (ahead.p_value or 0) >= SIGNIFICANT:
        found = f"p = {shown_p(ahead)} with {ahead.n} seeds"
        sentences.append(f"That {best.name} is above {baseline.name} may be chance: {found}.")
    near = _near(groups, best)
    if near:
        sentences.append(f"No further from {best.name} than a standard deviation: {', '.join(near)}.")
    if any(group.seeds != baseline.seeds and group.seeds & baseline.seeds for group in groups):
        sentences.append("Differences are taken over the seeds that both have.")
    if _apart(groups, baseline):
        sentences.append(
            "Compared are only figures that were measured alike, at the end of training or after the same step, of "
            "common seeds if there are several."
        )
    if len({(group.runs[0].budget, group.config.model.backbone) for group in groups}) > 1:
        sentences.append("The runs were not trained alike: see Settings.")
    unfinished = [group.name for group in groups if not all(run.finished for run in group.runs)]
    if unfinished:
        sentences.append(f"Not finished yet: {', '.join(unfinished)}.")
    if len(settings) == 1 < len(groups) and all(len(group.runs) == 1 for group in groups):
        sentences.append("There is one run of each, so part of a difference may be chance.")
    return " ".join(sentences)


def _near(groups: Sequence[Group], best: Group) -> list[str]:
    """The groups that are no further from the best than a standard deviation.

    It is that of the differences seed by seed, or, where there is only one, the larger one of the two groups.
    """

    def near(group: Group) -> bool:
        distance = best.ahead(group)
        own = [average.spread for average in (group.miou, best.miou) if average and average.spread is not None]
        spread = distance and (distance.spread if distance.n > 1 else max(own, default=None))
        return distance is not None and spread is not None and abs(distance.mean) <= spread

    return [group.name for group in groups if group is not best and near(group)]


def _today() -> str:
    today = date.today()
    return f"{today.day} {today:%B %Y}"
