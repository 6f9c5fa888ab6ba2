"""Hold out a quarter of a data set's training images, to choose a recipe without looking at the test.

    python studies/nyudv2_half/hold_out.py data/nyudv2-half runs/held-out-nyudv2-half

The new folder has links to the data set's files and two splits, fit and hold. Neighbours in a split show one place,
so every fourth block of 20 ids is held out.
"""

from __future__ import annotations

import sys
from pathlib import Path

from malleable.data import FolderDataset

BLOCK, EVERY = 20, 4


def main(source: Path, view: Path) -> None:
    if view.exists():
        sys.exit(f"{view} is there already; use it, or name another folder")
    ids = FolderDataset(source, "train").ids
    held = [place // BLOCK % EVERY == EVERY - 1 for place in range(len(ids))]
    (view / "splits").mkdir(parents=True)
    for name in ("dataset.json", "images", "depth", "labels", "cameras"):
        if (source / name).exists():
            (view / name).symlink_to((source / name).resolve())
    for split, wanted in (("fit", False), ("hold", True)):
        chosen = [id for id, out in zip(ids, held, strict=True) if out is wanted]
        (view / "splits" / f"{split}.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")
        print(f"{split}: {len(chosen)} images")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
