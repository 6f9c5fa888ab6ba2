"""``malleable study`` trains every row of a comparison with every seed, and puts their scores beside each other."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from typing_extensions import Self

from malleable.data.faults import chosen_stresses
from malleable.data.open import open_dataset, splits_of
from malleable.files import locked, write_whole
from malleable.models.foreign import is_own
from malleable.progress import available_cores
from malleable.reports.comparison import Comparison, read_results
from malleable.reports.outcome import Run, own_results, read_training
from malleable.reports.plan import Plan, PlannedRun, part, read_plan, slug
from malleable.reports.report import SIGNATURE, write_report
from malleable.reports.tables import print_table, to_markdown
from malleable.runs.folder import SETTINGS, differences, read_config, write_settings
from malleable.runs.log import METRICS
from malleable.runs.scores import RESULTS as EVALUATED
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
    jobs: int = 1,
    collect: bool = False,
    trust: bool = False,
) -> int:
    """Train each row of a study with each seed. What is finished is not trained again, what was stopped goes on.

    Args:
        file: YAML with title, out, seeds, settings and rows; see docs/studies.md.
        out: folder for the runs, and unless record says otherwise for their results, instead of the file's.
        record: folder for results.json, table.md and logs/, instead of the file's; the runs' folder if neither says.
        report: HTML file to write when all runs are done; report.html in the runs' folder by default.
        steps: updates of every run, instead of the file's, validated as often; needs an out of its own.
        only: i/n takes the i-th of n parts of the runs, for as many processes or machines.
        launcher: the command that starts a run, for example "srun --gpus=1" or "sbatch --gpus=1".
        jobs: how many runs to train at a time, each with its share of the cores; their lines are marked by the run.
        collect: start no run, only gather what finished ones reached; the report follows when all are done.
        trust: for the report, import the package.module:factory that a checkpoint names as its network, and run it.
    """
    if collect and only is not None:
        raise UsageError(f"collect gathers all runs, so only={only} has no meaning beside it; leave one out")
    if jobs < 1:
        raise UsageError(f"jobs must be at least 1, got {jobs}")
    if steps is not None and out is None:
        raise UsageError("steps makes other runs than the file's; give them a folder of their own with --out")
    plan = read_plan(Path(file), steps)
    chosen = () if collect else part(plan.runs, only)
    check_splits(plan, chosen)
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
    left = [run for run in chosen if not is_done(run, results, folder, plan)]
    with Workers(launcher, jobs) as workers, ThreadPoolExecutor(jobs) as pool:
        pending = {pool.submit(complete, run, folder / run.folder, plan, workers): run for run in left}
        try:
            while pending:
                done, _ = wait(pending, timeout=1, return_when=FIRST_COMPLETED)  # for ever would keep signals out
                for future in done:
                    run = pending.pop(future)
                    code = future.result()
                    if code and not workers.received:
                        failed.append(run)
                        print(f"{run} failed with exit code {code}; going on with the others", file=sys.stderr)
                    results = gather(plan, folder, kept)
        except BaseException:
            workers.stop(signal.SIGTERM)  # the pool waits for them
            raise
    if workers.received:
        print("stopped; the same command goes on", file=sys.stderr)
        return 128 + workers.received[0]
    print_table(compared(plan, results, folder))
    untested = "; ".join(str(run) for run, result in results.items() if not tested(result, plan))
    if untested:
        print(f"runs that lack some of the faults or splits: {untested}; {folder} must hold them", file=sys.stderr)
    missing = [run for run in plan.runs if run not in results]
    trained = [run for run in missing if finished(run, folder / run.folder)]
    advice = "; to test them, start the study again without --collect, with its --launcher" if collect else ""
    print_runs("are trained, but not tested yet", trained, plan, advice)
    print_runs("have no result yet", [run for run in missing if run not in trained], plan)
    if not missing:
        write_page(plan, folder, page, trust)
    return 1 if failed else 0


def print_runs(what: str, runs: Sequence[PlannedRun], plan: Plan, advice: str = "") -> None:
    """Say of which ``runs`` this is so, if there are any."""
    if runs:
        names = "; ".join(map(str, runs))
        print(f"{len(runs)} of {len(plan.runs)} runs {what}: {names}{advice}", file=sys.stderr)


def check_splits(plan: Plan, runs: Sequence[PlannedRun]) -> None:
    """Refuse splits that the data of ``runs`` does not have, or has without labels, before anything is trained."""
    for root in dict.fromkeys(run.config.data.root for run in runs if plan.also):
        known = splits_of(root)
        for split in plan.also:
            if split not in known:
                raise UsageError(f"also must be some of the splits of {root}, {', '.join(known)}; got {split!r}")
            if not open_dataset(root, split).labelled:
                raise UsageError(f"also must be splits with labels, to be scored; {split!r} of {root} has none")


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
    return None if tested(trained, plan) else evaluation(run, folder, plan)


def evaluation(run: PlannedRun, folder: Path, plan: Plan) -> list[str]:
    """Give the arguments of the command that tests ``run``; what was tested before, and is not asked for, goes along.

    Scores that were measured in another way are somebody's own, and an error.
    """
    before = own_results(folder, run.config, run.config.train.steps)
    if before is None and (folder / EVALUATED).exists():
        raise FileExistsError(
            f"{folder / EVALUATED} is of another split, step or way to show images than the study's, and is left as it "
            "is; move it away, or write it elsewhere with malleable evaluate --out"
        )
    stress, splits = ((), ()) if before is None else (before.stress, before.splits)
    faults = () if plan.stress and not plan.faults else (*plan.faults, *stress)  # none named are all
    listed = {"faults": dict.fromkeys(faults), "also": dict.fromkeys((*plan.also, *splits))}
    given = [f"--{name}={json.dumps(list(names), ensure_ascii=False)}" for name, names in listed.items() if names]
    switches = {
        "--stress": plan.stress or bool(stress),
        "--trust": is_own(run.config.model.network),  # the plan is one's own
        "--overwrite": before is not None,
    }
    return ["evaluate", str(folder), *(name for name, on in switches.items() if on), *given]


def is_done(run: PlannedRun, results: Mapping[PlannedRun, Run], folder: Path, plan: Plan) -> bool:
    """Tell whether nothing is left to do for ``run``: a result that lacks a test is completed if it can be."""
    return run in results and (tested(results[run], plan) or not (folder / run.folder / SETTINGS).is_file())


def tested(trained: Run, plan: Plan) -> bool:
    """Tell whether a finished run has all the scores that the study asks for."""
    if trained.scores is None:
        return True
    faults = {fault.name for fault in chosen_stresses(plan.faults)} if plan.stress else set()
    return faults <= trained.scores.stress.keys() and set(plan.also) <= trained.scores.splits.keys()


class Workers:
    """Runs ``malleable`` in ``jobs`` processes at a time, and passes on to them what asks this one to stop.

    received: the signals that did, or that stopped a process. None is started after that.
    """

    def __init__(self, launcher: str | None, jobs: int) -> None:
        self.received: list[int] = []
        self._command = [*shlex.split(launcher or ""), *_malleable()]
        self._jobs = jobs
        self._processes: set[subprocess.Popen[str]] = set()

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop(self, number: int, _: object = None) -> None:
        """Have the runs end as the signal ``number`` asks for, and start no other."""
        self.received.append(number)
        if number == signal.SIGTERM:  # Ctrl-C goes to the runs too: they write a checkpoint and end
            for process in tuple(self._processes):
                process.terminate()

    def run(self, name: str, arguments: Sequence[str]) -> int:
        """Run ``malleable`` with ``arguments`` to its end or to ours. Returns the exit code."""
        several: dict[str, Any] = {}
        if self._jobs > 1:
            threads = {"OMP_NUM_THREADS": str(max(1, available_cores() // self._jobs))}
            several = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": threads | os.environ}
        process = subprocess.Popen([*self._command, *arguments], text=True, errors="replace", **several)
        self._processes.add(process)
        if signal.SIGTERM in self.received:  # while it was being started
            process.terminate()
        for line in process.stdout or ():
            print(f"{name}: {line}", end="", file=sys.stderr, flush=True)
        code = process.wait()
        self._processes.discard(process)
        if code in _STOPPED:  # somebody stopped the run alone
            self.received.append(abs(code) % 128)
        return code


def complete(run: PlannedRun, folder: Path, plan: Plan, workers: Workers) -> int:
    """Do all that is left to do for ``run``. Returns the exit code of the last command, 0 if there was none."""
    code, task = 0, None
    while not workers.received and not code:
        try:
            left = next_task(run, folder, plan)
        except FileExistsError as error:
            print(f"{run}: {error}", file=sys.stderr)
            return 1
        if left in (None, task):
            break
        if task is None:
            place = plan.runs.index(run) + 1
            print(f"[{place}/{len(plan.runs)}] {run}: {run.config.train.steps} steps", file=sys.stderr, flush=True)
        task = left
        code = workers.run(str(run), left)
    return code


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
            if run in results and tested(results[run], plan):
                continue
            result = finished(run, folder / run.folder)
            if result is not None and tested(result, plan):
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
