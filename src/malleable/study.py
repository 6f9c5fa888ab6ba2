"""``malleable study``: train every row of a comparison with every seed, and put the figures beside each other."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from malleable.files import write_whole
from malleable.journal import METRICS
from malleable.plan import Plan, Run, read_plan, share, slug
from malleable.report import write_report
from malleable.runfolder import SETTINGS, differences, read_config, write_settings
from malleable.tally import Result, Tally, read_results

RESULTS, TABLE, LOGS, REPORT = "results.json", "table.md", "logs", "report.html"

_STOPPED = {code for number in (signal.SIGINT, signal.SIGTERM) for code in (-number, 128 + number)}


def study(
    file: str,
    out: str | None = None,
    record: str | None = None,
    report: str | None = None,
    steps: int | None = None,
    only: str | None = None,
    launcher: str | None = None,
) -> int:
    """Train each row of a study with each seed. What is finished is not trained again, what was stopped goes on.

    Args:
        file: YAML with title, out, seeds, settings and rows; see docs/studies.md.
        out: folder for the runs, instead of the file's.
        record: folder for results.json, table.md and logs/, instead of the file's; the runs' folder if neither says.
        report: HTML file to write when all runs are done; report.html in the runs' folder by default.
        steps: updates of every run, instead of the file's.
        only: i/n takes the i-th of n parts of the runs, for as many processes or machines.
        launcher: the command that starts a run, for example "srun --gpus=1" or "sbatch --gpus=1".
    """
    plan = read_plan(Path(file), steps)
    folder = Path(out or plan.out)
    kept = Path(record or plan.record or folder)
    tally = collect(plan, folder, kept)
    failed: list[Run] = []
    for run in share(plan.runs, only):
        if run in tally.results:
            continue
        place = plan.runs.index(run) + 1
        print(f"[{place}/{len(plan.runs)}] {run}: {run.config.train.steps} steps", file=sys.stderr, flush=True)
        code = start(run, folder / run.folder, launcher)
        if code in _STOPPED:
            print("stopped; the same command goes on", file=sys.stderr)
            return 128 + abs(code) % 128
        if code:
            failed.append(run)
            print(f"{run} failed with exit code {code}; going on with the next", file=sys.stderr)
        tally = collect(plan, folder, kept)
    tally.print()
    missing = [run for run in plan.runs if run not in tally.results]
    if missing:
        names = "; ".join(map(str, missing))
        print(f"{len(missing)} of {len(plan.runs)} runs have no result yet: {names}", file=sys.stderr)
    else:
        write_page(plan, folder, folder / REPORT if report is None else Path(report))
    return 1 if failed else 0


def start(run: Run, folder: Path, launcher: str | None) -> int:
    """Train ``run`` in ``folder`` from its newest checkpoint or from the start. Returns the exit code."""
    write_settings(folder, run.config)
    arguments = ["train", "--config", str(folder / SETTINGS), "--resume", "auto"]
    process = subprocess.Popen([*shlex.split(launcher or ""), *_malleable(), *arguments])
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    interrupted = 0
    try:
        while True:
            try:
                return process.wait() or interrupted
            except KeyboardInterrupt:  # the run got the signal too: it writes a checkpoint and ends
                interrupted = 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, before)


def _malleable() -> Sequence[str]:
    """The command that this process was started by: a script, as sbatch wants it, if it is installed."""
    script = shutil.which("malleable", path=str(Path(sys.executable).parent))
    return [sys.executable, "-m", "malleable"] if script is None else [script]


def collect(plan: Plan, folder: Path, kept: Path) -> Tally:
    """The results of all runs that are done, whether they were kept or lie in ``folder``; all are kept then."""
    results = read_results(kept / RESULTS, plan)
    for run in plan.runs:
        if run in results or not (folder / run.folder / SETTINGS).is_file():
            continue
        changed = differences(read_config(folder / run.folder), run.config)
        if changed:
            raise ValueError(
                f"{folder / run.folder} was started with other settings: {'; '.join(changed)}. Give another folder "
                "with --out, or move this one away"
            )
        result = Result.of_run(folder / run.folder, run.config)
        if result is not None:
            results[run] = result
            if kept != folder:
                log = kept / LOGS / f"{slug(run.row)}-seed{run.seed}.jsonl"
                log.parent.mkdir(parents=True, exist_ok=True)
                write_whole(log, (folder / run.folder / METRICS).read_bytes())
    tally = Tally(plan, results)
    kept.mkdir(parents=True, exist_ok=True)
    write_whole(kept / RESULTS, (json.dumps(tally.to_dict(), indent=1) + "\n").encode())
    write_whole(kept / TABLE, tally.to_markdown().encode())
    return tally


def write_page(plan: Plan, folder: Path, page: Path) -> None:
    """The report of the runs whose folders are here."""
    groups = {
        row: [folder / run.folder for run in plan.runs if run.row == row and (folder / run.folder / SETTINGS).is_file()]
        for row in plan.rows
    }
    groups = {row: folders for row, folders in groups.items() if folders}
    if not groups:
        print(f"no report: the runs' folders are not in {folder}", file=sys.stderr)
        return
    page.parent.mkdir(parents=True, exist_ok=True)
    write_report(groups, page, plan.title, plan.intro)
    print(f"To see the report, open {page.resolve().as_uri()} in a browser")
