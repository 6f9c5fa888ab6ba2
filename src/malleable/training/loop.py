"""``malleable train``: one explicit loop, the same on one core, several GPUs or several machines."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import Tensor

from malleable.data import Batch, Sample, SampleDataset, open_dataset, step_loader, train_transform
from malleable.inference.evaluate import evaluate_network
from malleable.inference.probabilities import probabilities
from malleable.progress import Progress
from malleable.runs.checkpoint import (
    FOLDER,
    check_finite,
    mark_best,
    newest_good,
    numbered,
    prune,
    read_checkpoint,
    write_checkpoint,
)
from malleable.runs.config import Config, TrainConfig
from malleable.runs.folder import find_start, write_settings
from malleable.runs.log import Log, Row, read_log, receptive_fields, validations
from malleable.runs.scores import SCORES
from malleable.training.distributed import (
    Interruption,
    Stopped,
    as_numbers,
    from_numbers,
    gathered,
    on_first,
    seed_step,
    total,
)
from malleable.training.loss import Loss, build_loss
from malleable.training.state import State

_SHOWN = 4  # validation images in TensorBoard


def fit(fabric: Fabric, config: Config, folder: Path, resume: bool) -> int:
    """Train from the start, or from the newest checkpoint in ``folder``, to the last step. Returns the exit code."""
    data, recipe = config.data, config.train
    train_set, val_set = open_dataset(data.root, data.train), open_dataset(data.root, data.val)
    loss = build_loss(recipe)
    found = on_first(fabric, lambda: find_start(folder, config, resume))
    state = State(fabric, config, train_set, None if found is None else read_checkpoint(found))
    start = state.step
    made = start == recipe.steps and (
        not recipe.validate_last or on_first(fabric, lambda: start in validations(read_log(folder)))
    )
    if start > recipe.steps or made:
        print(f"{folder} has made its {recipe.steps} steps already", file=sys.stderr)
        return 0
    loader = step_loader(
        train_set,
        train_transform(data.crop, data.scales, data.flip),
        recipe.batch_size,
        recipe.steps,
        seed=recipe.seed,
        start_step=start,
        workers=data.workers,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        pin_memory=fabric.device.type == "cuda",
    )
    on_first(fabric, lambda: write_settings(folder, config))
    progress = Progress(recipe.steps, start, recipe.batch_size, shown=fabric.is_global_zero)
    with ExitStack() as stack, Interruption() as interruption, progress:
        journal = stack.enter_context(closing(Log(folder, start))) if fabric.is_global_zero else None
        with interruption.kept_from_children():
            batches = iter(loader)  # starts the loading processes
        if start:
            progress.say(f"{folder} goes on after step {start}")
            if validates(start, recipe) and on_first(fabric, lambda: start not in as_first(journal).validated):
                stop = validate(state, val_set, folder, journal, progress, interruption)  # it was stopped before it
                if stop:
                    return 128 + stop
        state.set_mode()
        progress.restart()
        for batch in batches:
            value, norm, stop = update(state, fabric.to_device(batch), loss, interruption.received, folder)
            done = state.step
            progress.advance(done, value)
            if due(done, recipe.log_every) or done == recipe.steps:
                scalars = progress.report(done, state.optimizer.param_groups[0]["lr"])
                if journal is not None:
                    training = scalars | {"gradient_norm": norm}
                    journal.write(Row(done, training, receptive_fields=receptive_fields(state.net)))
            validating = validates(done, recipe)
            if validating or stop or due(done, recipe.checkpoint_every) or done == recipe.steps:
                with progress.paused():
                    save(state, folder)
            if stop and done < recipe.steps:
                progress.say(f"stopped after step {done}; the same command with --resume auto goes on")
                return 128 + stop
            if validating:
                with progress.paused():
                    stop = validate(state, val_set, folder, journal, progress, interruption)
                if stop:
                    return 128 + stop
                state.set_mode()
    return 0


def update(state: State, batch: Batch, loss: Loss, received: int, folder: Path) -> tuple[float, float, int]:
    """One step. Returns the loss before it, the norm of its gradient, and a signal that any process has received."""
    fabric, recipe = state.fabric, state.config.train
    seed_step(recipe.seed, state.step, fabric.global_rank)
    state.set_lr()
    mine = [float(loss.weight(batch.label).sum()), *as_numbers(received)]
    weight, *signals = total(fabric, torch.tensor(mine, device=fabric.device)).tolist()
    weight = max(weight, 1.0)  # of the whole batch, over all devices
    losses: list[Tensor] = []
    for part, last in parts(batch, recipe.accumulate):
        with fabric.no_backward_sync(state.model, enabled=not last):
            image = part.image.contiguous(memory_format=torch.channels_last) if recipe.channels_last else part.image
            each = loss(state.model(image, depth=part.depth, focal=part.focal), part.label)  # (images,)
            fabric.backward(each.sum() * (fabric.world_size / weight))  # devices average their gradients
        losses.append(each.detach())
    per_image = torch.cat(losses)
    value = float(total(fabric, per_image.sum())) / weight
    clipped = fabric.clip_gradients(
        state.model, state.stepper, max_norm=recipe.clip or math.inf, error_if_nonfinite=False
    )
    norm = float(clipped) if isinstance(clipped, Tensor) else math.nan
    if not math.isfinite(value) or (not math.isfinite(norm) and recipe.precision != "16-mixed"):  # its scaler skips
        raise not_finite(state, value, per_image, batch.ids, folder)
    state.advance()
    return value, norm, from_numbers(signals)


def parts(batch: Batch, number: int) -> Iterator[tuple[Batch, bool]]:
    """A batch in equal parts, each with whether it is the last."""
    size = len(batch.ids) // number
    for first in range(0, len(batch.ids), size):
        end = first + size
        yield Batch._make(field[first:end] for field in batch), end == len(batch.ids)


def not_finite(state: State, value: float, per_image: Tensor, ids: list[str], folder: Path) -> RuntimeError:
    """What to say when a step would spoil the weights."""
    bad = [id for id, number in zip(ids, per_image.tolist(), strict=True) if not math.isfinite(number)]
    bad = gathered(state.fabric, bad)
    what = f"the loss is {value}" if bad else "the gradient is not finite"
    samples = bad or gathered(state.fabric, ids)
    found = newest_good(folder / FOLDER, step=state.step)
    kept = "none yet" if found is None else found[0]
    return RuntimeError(
        f"step {state.step}: {what}; samples {', '.join(samples)}. The weights were not changed by this step; the last "
        f"good checkpoint is {kept}. Look at these samples, lower train.lr or set train.clip"
    )


def save(state: State, folder: Path) -> None:
    def write() -> None:
        for weights in filter(None, (state.net, state.ema)):
            check_finite(weights.state_dict(), f"the network after step {state.step}")
        write_checkpoint(folder / FOLDER, state.checkpoint())
        prune(folder / FOLDER, state.config.train.keep, state.step)

    on_first(state.fabric, write)


def validate(
    state: State,
    dataset: SampleDataset,
    folder: Path,
    journal: Log | None,
    progress: Progress,
    interruption: Interruption,
) -> int:
    """Score the moving average, or the network if there is none; the best checkpoint so far is kept.

    Returns a signal that any process has received meanwhile, for which it was left, or 0.
    """
    net, data, step = state.net if state.ema is None else state.ema, state.config.data, state.step

    def leave_on_signal() -> None:
        mine = torch.tensor(as_numbers(interruption.received), device=state.fabric.device)
        stop = from_numbers(total(state.fabric, mine).tolist())
        if stop:
            raise Stopped(stop)

    try:
        with state.fabric.autocast():
            scores = evaluate_network(
                net,
                dataset,
                split=data.val,
                step=step,
                workers=max(1, data.workers),
                progress=True,
                after_each=leave_on_signal,
            )
    except Stopped as stopped:
        progress.say(f"stopped in the validation after step {step}; the same command with --resume auto makes it first")
        return stopped.number
    if journal is not None:
        net.eval()
        for index in range(min(_SHOWN, len(dataset))):
            if interruption.received:
                break
            sample = dataset[index]
            with state.fabric.autocast():
                predicted = probabilities(net, sample).argmax(0)
            journal.image(step, f"val/{sample.id}", side_by_side(sample, predicted, dataset.palette))
    progress.say(
        f"step {step}: mIoU {scores.miou:.2f}, pixel accuracy {scores.pixel_accuracy:.2f} "
        f"({dataset.name}/{data.val}, {scores.protocol})"
    )

    def note() -> None:
        iou = {name: value for name, value in scores.iou.items() if value is not None}
        as_first(journal).write(Row(step, scores={name: getattr(scores, name) for name in SCORES}, iou=iou))
        if as_first(journal).is_best(step):
            mark_best(numbered(folder / FOLDER, step)[0])

    on_first(state.fabric, note)
    return 0


def as_first(journal: Log | None) -> Log:
    """The journal, in the process that keeps it."""
    assert journal is not None
    return journal


def validates(step: int, recipe: TrainConfig) -> bool:
    """Whether a validation follows ``step``."""
    return recipe.validate_last if step == recipe.steps else due(step, recipe.validate_every)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def side_by_side(sample: Sample, predicted: Tensor, palette: Sequence[Sequence[int]]) -> Tensor:
    """Image, label and prediction (H, W) in the palette's colours, beside each other: (3, H, 3·W) uint8."""
    colours = torch.zeros(256, 3, dtype=torch.uint8)  # unlabelled pixels are black
    colours[: len(palette)] = torch.tensor(palette, dtype=torch.uint8)
    maps = [colours[labels].permute(2, 0, 1) for labels in (sample.label.as_subclass(Tensor), predicted.cpu())]
    return torch.cat([sample.image.as_subclass(Tensor), *maps], dim=2)
