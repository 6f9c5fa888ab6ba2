"""``malleable study`` trains every row of a comparison with every seed, and puts their scores beside each other."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from malleable.files import locked, write_whole
from malleable.reports.comparison import Comparison, read_results
from malleable.reports.outcome import Run, read_training
from malleable.reports.plan import Plan, PlannedRun, part, read_plan, slug
from malleable.reports.report import SIGNATURE, write_report
from malleable.reports.tables import print_table, to_markdown
from malleable.runs.folder import SETTINGS, differences, read_config, write_settings
from malleable.runs.log import METRICS
from malleable.runs.settings import UsageError

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
    collect: bool = False,
    trust: bool = False,
) -> int:
    """Train each row of a study with each seed. What is finished is not trained again, what was stopped goes on.

    Args:
        file: YAML with title, out, seeds, settings and rows; see docs/studies.md.
        out: folder for the runs, and unless record says otherwise for their results, instead of the file's.
        record: folder for results.json, table.md and logs/, instead of the file's; the runs' folder if neither says.
        report: HTML file to write when all runs are done; report.html in the runs' folder by default.
        steps: updates of every run, instead of the file's; needs an out of its own.
        only: i/n takes the i-th of n parts of the runs, for as many processes or machines.
        launcher: the command that starts a run, for example "srun --gpus=1" or "sbatch --gpus=1".
        collect: start no run, only gather what finished ones reached; the report follows when all are done.
        trust: for the report, import the package.module:factory that a checkpoint names as its network, and run it.
    """
    if collect and only is not None:
        raise UsageError(f"collect gathers all runs, so only={only} has no meaning beside it; leave one out")
    if steps is not None and out is None:
        raise UsageError("steps makes other runs than the file's; give them a folder of their own with --out")
    plan = read_plan(Path(file), steps)
    chosen = () if collect else part(plan.runs, only)
    folder = Path(out or plan.out)
    kept = Path(record or (plan.record if out is None else None) or folder)
    page = folder / REPORT if report is None else Path(report)
    if collect and not folder.is_dir() and not (kept / RESULTS).is_file():
        raise UsageError(
            f"there is nothing to collect: neither {folder} nor {kept / RESULTS} exists; see --out, --record"
        )
    check_ours(page, kept)
    results = gather(plan, folder, kept)
    failed: list[PlannedRun] = []
    for run in chosen:
        if run in results:
            continue
        place = plan.runs.index(run) + 1
        print(f"[{place}/{len(plan.runs)}] {run}: {run.config.train.steps} steps", file=sys.stderr, flush=True)
        code, task = 0, None
        while not code and (left := next_task(run, folder / run.folder, plan)) not in (None, task):
            task = left
            code = start(task, launcher)
        if code in _STOPPED:
            print("stopped; the same command goes on", file=sys.stderr)
            return 128 + abs(code) % 128
        if code:
            failed.append(run)
            print(f"{run} failed with exit code {code}; going on with the next", file=sys.stderr)
        results = gather(plan, folder, kept)
    print_table(compared(plan, results, folder))
    missing = [run for run in plan.runs if run not in results]
    if missing:
        names = "; ".join(map(str, missing))
        print(f"{len(missing)} of {len(plan.runs)} runs have no result yet: {names}", file=sys.stderr)
    else:
        write_page(plan, folder, page, trust)
    return 1 if failed else 0


def check_ours(page: Path, kept: Path) -> None:
    """Refuse to replace files that no study wrote."""
    if page.exists() and SIGNATURE not in page.read_text(encoding="utf-8", errors="replace"):
        raise FileExistsError(f"{page} is no report of malleable and is left as it is; give another name with --report")
    if (kept / TABLE).exists() and not (kept / RESULTS).exists():
        raise FileExistsError(
            f"{kept / TABLE} is there without {RESULTS}, so no study wrote it; move it away, or give another --record"
        )


def next_task(run: PlannedRun, folder: Path, plan: Plan) -> list[str] | None:
    """Give the arguments of the command that ``run`` needs next: training, or testing it with faults; None if done."""
    trained = finished(run, folder)
    if trained is None:
        write_settings(folder, run.config)
        return ["train", "--config", str(folder / SETTINGS), "--resume", "auto"]
    if plan.stress and trained.scores is not None and not trained.scores.stress:
        faults = [f"--faults={json.dumps(plan.faults, ensure_ascii=False)}"] if plan.faults else []
        return ["evaluate", str(folder), "--stress", *faults, "--overwrite"]
    return None


def start(arguments: Sequence[str], launcher: str | None) -> int:
    """Run ``malleable`` with ``arguments``, to its end or to ours. Returns the exit code."""
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        received.append(number)
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, forward)
    try:
        process = subprocess.Popen([*shlex.split(launcher or ""), *_malleable(), *arguments])
        if received:  # while it was being started
            process.terminate()
        while True:
            try:
                code = process.wait()
                return 128 + received[0] if received else code
            except KeyboardInterrupt:  # the run got the signal too: it writes a checkpoint and ends
                received.append(signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


def _malleable() -> Sequence[str]:
    """Find the command that this process was started by: a script, as sbatch wants it, if it is installed."""
    script = shutil.which("malleable", path=str(Path(sys.executable).parent))
    return [sys.executable, "-m", "malleable"] if script is None else [script]


def gather(plan: Plan, folder: Path, kept: Path) -> dict[PlannedRun, Run]:
    """Find all runs that are done, whether they were kept or lie in ``folder``, and keep what they reached."""
    kept.mkdir(parents=True, exist_ok=True)
    with locked(kept):  # other parts of the study may be collecting too
        results = read_results(kept / RESULTS, plan)
        for run in plan.runs:
            result = None if run in results else finished(run, folder / run.folder)
            if result is not None and not (plan.stress and result.scores is not None and not result.scores.stress):
                results[run] = result
                if kept != folder:
                    log = kept / LOGS / f"{slug(run.row)}-seed{run.seed}.jsonl"
                    log.parent.mkdir(exist_ok=True)
                    write_whole(log, (folder / run.folder / METRICS).read_bytes())
        comparison = compared(plan, results, folder)
        write_whole(kept / RESULTS, (json.dumps(comparison.to_dict(), indent=1) + "\n").encode())
        write_whole(kept / TABLE, to_markdown(comparison).encode())
    return results


def compared(plan: Plan, results: Mapping[PlannedRun, Run], folder: Path) -> Comparison:
    """Put all rows beside the first; runs without a result are there too, but do not count."""
    rows: dict[str, list[Run]] = {row: [] for row in plan.rows}
    for run in plan.runs:
        rows[run.row].append(results.get(run) or Run(folder / run.folder, run.config))
    return Comparison(plan.title, rows, baseline=plan.rows[0])


def finished(run: PlannedRun, folder: Path) -> Run | None:
    """Read what ``run`` reached in ``folder``, None if it has not finished; refuse a run of other settings."""
    if not (folder / SETTINGS).is_file():
        return None
    changed = differences(read_config(folder), run.config)
    if changed:
        raise ValueError(
            f"{folder} was started with other settings: {'; '.join(changed)}. Give another folder with --out, or move "
            "this one away"
        )
    found = read_training(folder, run.config)
    return found if found.finished else None


def write_page(plan: Plan, folder: Path, page: Path, trust: bool) -> None:
    """Write the report if the folders of all runs are here."""
    gone = [str(run) for run in plan.runs if not (folder / run.folder / SETTINGS).is_file()]
    if gone:
        print(f"no report: {folder} has no folder of {'; '.join(gone)}", file=sys.stderr)
        return
    groups = {row: [folder / run.folder for run in plan.runs if run.row == row] for row in plan.rows}
    page.parent.mkdir(parents=True, exist_ok=True)
    write_report(groups, page, plan.title, plan.intro, trust)
    print(f"To see the report, open {page.resolve().as_uri()} in a browser")
