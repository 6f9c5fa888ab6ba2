"""Does a student find its teacher's receptive field? One malleable layer, five seeds a condition.

    python studies/receptive_fields/study.py

Trains the students that results.json does not have yet, a line each, then prints the tables and draws the figures of
README.md. Stop it whenever you like: a finished run is not made again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import malleable as mb
from malleable.assign import Invalid
from malleable.files import read_json, write_whole

RESULTS = Path(__file__).with_name("results.json")
SEEDS = range(5)
SIZE, MAP = (96, 128), (24, 32)  # of images, and of features at rate 4
TRAINING, TEST, BATCH = 32, 8, 2  # scenes
SMOOTH, OUT = 3, 4  # channels: random smooth ones beside the image's three, and those that come out
STEPS = {"known": 200, "learned": 500}
LR = {"adam": 0.03, "sgd": 0.05}
MULTIPLES = (0.3, 1.0, 3.0, 10.0, 30.0)
POINTS = 25  # of a student's path that are kept, besides the start
SETTINGS = {"size": [*SIZE], "training": TRAINING, "test": TEST, "batch": BATCH, "channels": [3 + SMOOTH, OUT]}
SETTINGS |= {"steps": STEPS, "lr": LR}


@dataclass(frozen=True)
class Condition:
    """Says how a student starts, learns and sees depth.

    Args:
        weights: ``"known"`` are the teacher's and stay so; ``"learned"`` start at random.
        gap: cells between neighbouring centers at the start.
        temperature: at the start.
        equal: all kernels start with the same weights, as in a converted network.
        multiple: ``receptive_field_lr``.
        sensor: what the student sees of the depth that the teacher knows.
        kernels: K; with 0 the student is a plain convolution.
        fixed: the receptive field stays where it starts.
        ordered: the centers are an ascending sequence whatever the optimiser does.
    """

    weights: Literal["known", "learned"] = "learned"
    gap: float = 1.0
    temperature: float = 1.0
    equal: bool = False
    multiple: float = 1.0
    optimizer: Literal["adam", "sgd"] = "adam"
    sensor: Literal["perfect", "noise", "noise and holes"] = "perfect"
    invalid: Invalid = "same"
    kernels: int = 3
    fixed: bool = False
    ordered: bool = False


BOTH = (Condition("known"), Condition("learned"))
STARTS = {
    "default": {},
    "narrow": {"gap": 0.5},
    "wide": {"gap": 2.0},
    "softer": {"temperature": 4.0},
    "wide and softer": {"gap": 2.0, "temperature": 4.0},
    "default, equal kernels": {"equal": True},
}
SEEN = [("perfect", "same"), ("noise", "same")]
SEEN += [("noise and holes", invalid) for invalid in ("same", "uniform", "ignore")]
FAST = (1.0, 10.0, 30.0)  # multiples at which order and SGD are looked at


def conditions() -> list[Condition]:
    """All conditions of the five questions, each once."""
    learned = BOTH[1]
    found = [replace(base, **start) for base in BOTH for start in STARTS.values()]
    found.remove(replace(BOTH[0], equal=True))  # what is known is not equal
    found += [replace(base, multiple=m) for base in BOTH for m in MULTIPLES]
    found += [replace(learned, multiple=m, optimizer="sgd") for m in FAST]
    found += [replace(base, sensor=sensor, invalid=invalid) for base in BOTH for sensor, invalid in SEEN]
    found += [replace(learned, kernels=k) for k in range(6)]
    found += [replace(learned, kernels=k, fixed=True) for k in (1, 3, 5)]
    found += [replace(base, multiple=m, ordered=True) for base in BOTH for m in FAST]
    found += [replace(learned, equal=True, ordered=True)]
    return list(dict.fromkeys(found))


Lesson = tuple[Tensor, mb.Geometry, Tensor]
"""Features, what is seen of depth, and the teacher's answer."""


class Scenes(NamedTuple):
    """Holds features (N, C, h, w), true and measured depth (N, 1, H, W), and focal lengths (N,)."""

    features: Tensor
    depth: Tensor
    measured: Tensor
    focal: Tensor


def render(count: int, first: int = 0) -> Scenes:
    """Rooms ``first`` … ``first + count - 1``: what a Kinect measures, what is true, the image and smooth noise."""
    kinds = [mb.data.SyntheticScenes("rooms", SIZE, length=first + count, sensor=s) for s in ("perfect", "kinect")]
    perfect, kinect = ([kind[place] for place in range(first, first + count)] for kind in kinds)
    image = torch.stack([sample.image.as_subclass(Tensor).float() for sample in perfect])
    image = F.avg_pool2d(image, 5, 4, 2, count_include_pad=False)  # about pixels (4i, 4j)
    random = torch.Generator().manual_seed(first)
    smooth = torch.randn(count, SMOOTH, MAP[0] // 2, MAP[1] // 2, generator=random)
    features = torch.cat([image, F.interpolate(smooth, MAP, mode="bicubic")], 1)
    mean, spread = features.mean((2, 3), keepdim=True), features.std((2, 3), keepdim=True)
    depth, measured = (torch.stack([s.depth.as_subclass(Tensor) for s in kind]) for kind in (perfect, kinect))
    focal = torch.tensor([sample.camera.focal for sample in perfect])
    return Scenes((features - mean) / spread.clamp(min=1e-3), depth, measured, focal)


def seen(scenes: Scenes, sensor: str) -> Tensor:
    """The depth (N, 1, H, W) that a student sees: the true one, with a Kinect's noise, or its holes too."""
    lost = scenes.measured == 0
    kinds = {
        "perfect": scenes.depth,
        "noise": torch.where(lost, scenes.depth, scenes.measured),
        "noise and holes": scenes.measured,
    }
    return kinds[sensor]


def batches(scenes: Scenes, depth: Tensor) -> list[tuple[Tensor, mb.Geometry]]:
    """Features with their geometry, ``BATCH`` scenes at a time."""
    parts = zip(scenes.features.split(BATCH), depth.split(BATCH), scenes.focal.split(BATCH), strict=True)
    return [(features, mb.Geometry(depth, focal)) for features, depth, focal in parts]


def new_teacher() -> mb.MalleableConv2d:
    """A layer of three kernels with centers 0.8 to 2 cells apart, a temperature of 0.5 to 2, and unequal scales."""
    steps = 0.8 + 1.2 * torch.rand(4)
    centers = torch.cat([torch.zeros(1), steps.cumsum(0)])
    centers += torch.rand(()) - 0.5 - centers[2]
    layer = mb.MalleableConv2d(3 + SMOOTH, OUT, 3, padding=1, centers=centers.tolist(),
        temperature=0.5 * 4 ** torch.rand(()).item())  # fmt: skip
    with torch.no_grad():
        layer.rebalance.copy_(0.5 * torch.randn(3))
    return layer


@torch.no_grad()
def standardise(teacher: mb.MalleableConv2d, examples: Iterable[tuple[Tensor, mb.Geometry]]) -> None:
    """Bring every channel of the teacher's answers to a mean of 0 and a variance of 1."""
    answers = torch.cat([teacher(x, geometry) for x, geometry in examples])
    spread = answers.std((0, 2, 3))
    teacher.weight.div_(spread.repeat(teacher.kernels).view(-1, 1, 1, 1))
    teacher.bias.sub_(answers.mean((0, 2, 3))).div_(spread)


@torch.no_grad()
def lessons(teacher: mb.MalleableConv2d, scenes: Scenes, depth: Tensor) -> list[Lesson]:
    """What the student is shown, with ``depth`` (N, 1, H, W), and what the teacher says with the true one."""
    known, shown = batches(scenes, scenes.depth), batches(scenes, depth)
    return [(x, geometry, teacher(x, truth)) for (x, geometry), (_, truth) in zip(shown, known, strict=True)]


class Plain(nn.Conv2d):
    """A convolution that is shown depth and does not look."""

    def forward(self, x: Tensor, geometry: mb.Geometry) -> Tensor:
        return super().forward(x)


def new_student(condition: Condition, teacher: mb.MalleableConv2d) -> nn.Module:
    """The student of ``condition``, before its first step."""
    if condition.kernels == 0:
        return Plain(3 + SMOOTH, OUT, 3, padding=1)
    middle = (condition.kernels + 1) / 2
    options: dict[str, Any] = {
        "kernels": condition.kernels,
        "centers": [condition.gap * (k - middle) for k in range(condition.kernels + 2)],
        "temperature": condition.temperature,
        "invalid": condition.invalid,
        "learnable": () if condition.fixed else ("centers", "temperature", "rebalance"),
    }
    if condition.equal:
        return mb.MalleableConv2d.from_conv2d(nn.Conv2d(3 + SMOOTH, OUT, 3, padding=1), **options)
    student = mb.MalleableConv2d(3 + SMOOTH, OUT, 3, padding=1, **options)
    if condition.weights == "known":
        for own, known in ((student.weight, teacher.weight), (student.bias, teacher.bias)):
            own.requires_grad_(False).copy_(known.detach())
    return student


class Ordered(nn.Module):
    """Centers (K + 2,) as the middle one and positive gaps: no step can make two of them change places."""

    def forward(self, raw: Tensor) -> Tensor:
        middle = len(raw) // 2
        gaps = F.softplus(torch.cat([raw[:middle], raw[middle + 1 :]]))
        places = torch.cat([gaps.new_zeros(1), gaps.cumsum(0)])
        return places - places[middle] + raw[middle]

    def right_inverse(self, centers: Tensor) -> Tensor:
        middle, gaps = len(centers) // 2, centers.diff()
        raw = gaps + torch.log(-torch.expm1(-gaps))  # softplus backwards
        return torch.cat([raw[:middle], centers[middle : middle + 1], raw[middle:]])


def in_order(centers: Sequence[float]) -> bool:
    """Whether the centers (K + 2) still ascend, as they did at the start."""
    return list(centers) == sorted(centers)


def center_errors(found: Sequence[float], wanted: Sequence[float]) -> tuple[float, float]:
    """How far the worst kernel and the worst border of K + 2 centers are from the teacher's, in cells.

    Kernels may have changed places: the nearest matching of numbers on a line is that of the sorted ones.
    """
    kernels = (abs(a - b) for a, b in zip(sorted(found[1:-1]), sorted(wanted[1:-1]), strict=True))
    return max(kernels), max(abs(found[0] - wanted[0]), abs(found[-1] - wanted[-1]))


def learn(student: nn.Module, given: Sequence[Lesson], condition: Condition, steps: int) -> list[dict[str, Any]]:
    """Train ``student`` to answer as its teacher does; returns where its receptive field was on the way."""
    groups = mb.parameter_groups(
        student, lr=LR[condition.optimizer], weight_decay=0.0, receptive_field_lr=condition.multiple
    )
    if condition.ordered:  # after the groups were made: the parameter in them stays, and now means gaps
        parametrize.register_parametrization(student, "centers", Ordered())
    if condition.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, fused=True)
    else:
        optimizer = torch.optim.SGD(groups, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    path: list[dict[str, Any]] = []
    for step in range(steps + 1):
        if isinstance(student, mb.MalleableConv2d) and step % max(steps // POINTS, 1) == 0:
            path.append({"step": step, "centers": student.centers.tolist(),
                         "temperature": student.temperature.item(), "scales": student.scales.tolist()})  # fmt: skip
        if step < steps:
            x, geometry, target = given[step % len(given)]
            loss = (student(x, geometry) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return path


@torch.no_grad()
def error(layer: nn.Module, given: Iterable[Lesson]) -> float:
    """The mean squared error; 1 is nothing learned, because the answers have a variance of 1."""
    return torch.cat([(layer(x, geometry) - y).square().flatten() for x, geometry, y in given]).mean().item()


def run(condition: Condition, seed: int, scenes: tuple[Scenes, Scenes], steps: int | None = None) -> dict[str, Any]:
    """Let one student learn from its teacher; both are drawn by ``seed``, from scenes to train and to test on."""
    torch.manual_seed(seed)
    teacher = new_teacher()
    standardise(teacher, batches(scenes[0], scenes[0].depth))
    student = new_student(condition, teacher)
    training, test = (lessons(teacher, part, seen(part, condition.sensor)) for part in scenes)
    path = learn(student, training, condition, STEPS[condition.weights] if steps is None else steps)
    teacher.invalid = condition.invalid
    return {
        "condition": asdict(condition),
        "seed": seed,
        "error": error(student, test),
        "error_of_teacher": error(teacher, test),  # it errs too where depth is spoiled
        "teacher": {"centers": teacher.centers.tolist(), "temperature": teacher.temperature.item(),
                    "scales": teacher.scales.tolist()},
        "path": path,
    }  # fmt: skip


def rounded(thing: Any) -> Any:
    """``thing`` with its numbers at four significant digits."""
    if isinstance(thing, dict):
        return {key: rounded(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [rounded(value) for value in thing]
    return float(f"{thing:.4g}") if isinstance(thing, float) else thing


def recorded() -> list[dict[str, Any]]:
    """The runs of results.json, none if it is not there; fails if they were made with other settings."""
    if not RESULTS.exists():
        return []
    results = read_json(RESULTS)
    if results["settings"] != SETTINGS:
        raise ValueError(f"{RESULTS} was made with settings {results['settings']}, not {SETTINGS}; move it away")
    return list(results["runs"])


def record(runs: Sequence[dict[str, Any]]) -> None:
    """Write results.json, a line a run."""
    lines = ",\n".join(json.dumps(run) for run in runs)
    write_whole(RESULTS, f'{{"settings": {json.dumps(SETTINGS)}, "runs": [\n{lines}\n]}}\n'.encode())


def main() -> None:
    torch.set_num_threads(1)
    runs = recorded()
    done = {(Condition(**run["condition"]), run["seed"]) for run in runs}
    wanted = [(condition, seed) for seed in SEEDS for condition in conditions()]
    missing = [pair for pair in wanted if pair not in done]
    if missing:
        scenes = render(TRAINING), render(TEST, TRAINING)
    for place, (condition, seed) in enumerate(missing, 1):
        began = time.process_time()
        runs.append(rounded(run(condition, seed, scenes)))
        record(runs)
        changed = {name: value for name, value in asdict(condition).items() if value != getattr(Condition(), name)}
        print(f"{place}/{len(missing)}  seed {seed}  {changed}  error {runs[-1]['error']:.2e}  "
              f"{time.process_time() - began:.1f} s", flush=True)  # fmt: skip
    from figures import draw_all

    draw_all(runs)


if __name__ == "__main__":
    main()
