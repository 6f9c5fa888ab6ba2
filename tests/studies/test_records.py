"""What the repository keeps of each study belongs to the file that runs it again."""

from pathlib import Path

import pytest

from malleable.reports.comparison import read_results
from malleable.reports.plan import read_plan

ROOT = Path(__file__).parents[2]
STUDIES = [path for path in sorted((ROOT / "studies").glob("*/*.yaml")) if path.stem != "base"]
RECORDED = {path: ROOT / plan.record for path in STUDIES if (plan := read_plan(path)).record}
KEPT = {path: record / "results.json" for path, record in RECORDED.items() if (record / "results.json").is_file()}


@pytest.mark.parametrize("path", KEPT, ids=lambda path: str(path.relative_to(ROOT / "studies")))
def test_every_study_asks_for_the_runs_that_it_records(path: Path) -> None:
    assert read_results(KEPT[path], read_plan(path))  # refuses other settings, and results that nobody asks for
