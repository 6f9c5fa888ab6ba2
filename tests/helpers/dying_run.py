"""``malleable train`` that kills itself: ``python dying_run.py step|write|validate N train ...``.

At step N, while checkpoint N is written, or with SIGTERM to process N of several while it validates.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

import malleable.inference.evaluate
import malleable.training.loop
from malleable import cli


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(where: str, number: int, arguments: list[str]) -> int:
    update, save = malleable.training.loop.update, torch.save

    def update_or_die(state: Any, *rest: Any) -> Any:
        result = update(state, *rest)
        if state.step == number:
            die()
        return result

    def save_or_die(content: Any, file: Any) -> None:
        save(content, file)
        if content["step"] == number:
            file.truncate(file.tell() // 2)
            file.flush()
            die()

    probabilities = malleable.inference.evaluate.probabilities

    def end(*arguments: Any) -> Any:
        if torch.distributed.get_rank() == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return probabilities(*arguments)

    if where == "step":
        malleable.training.loop.update = update_or_die
    elif where == "validate":
        malleable.inference.evaluate.probabilities = end
    else:
        torch.save = save_or_die
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
