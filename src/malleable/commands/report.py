"""``malleable report`` shows runs beside each other, and beside the paper, in one HTML file that opens from disk."""

from __future__ import annotations

from pathlib import Path

from malleable.files import check_free
from malleable.reports.outcome import grouped, read_run
from malleable.reports.report import write_page


def report(
    runs: list[str], out: str = "report.html", title: str = "Report", overwrite: bool = False, trust: bool = False
) -> None:
    """Show runs beside each other in one HTML file that needs no network.

    Runs that learn alike but for their seed are shown as one, with mean and standard deviation.

    Args:
        runs: folders of runs, finished or not; scores of results.json go before the last validation of training,
            unless that is of a later step.
        out: the HTML file to write.
        title: what stands at the top of the page.
        overwrite: replace a file that exists.
        trust: import the package.module:factory that a run names as its network, and run it.
    """
    path = Path(out)
    check_free(path, overwrite)
    folders: dict[Path, Path] = {}
    for folder in map(Path, runs):
        folders.setdefault(folder.resolve(), folder)
    write_page(grouped(read_run(folder, trust=trust) for folder in folders.values()), path, title)
    print(f"{path} shows {len(folders)} {'run' if len(folders) == 1 else 'runs'}")
