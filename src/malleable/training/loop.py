"""``malleable train``: one explicit loop, the same on one core, several GPUs or several machines."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning_fabric import Fabric
from torch import Tensor

from malleable.data import Batch, Sample, SampleDataset, open_dataset, step_loader, train_transform
from malleable.data.faults import DepthFaults
from malleable.inference.evaluate import evaluate_network
from malleable.inference.probabilities import probabilities
from malleable.progress import Progress
from malleable.runs.config import Config, DataConfig, TrainConfig, parse_config
from malleable.runs.folder import RunFolder
from malleable.runs.log import Row, receptive_fields
from malleable.training.distributed import (
    Interruption,
    Stopped,
    agreed_signal,
    gathered,
    launch,
    seed_step,
    share_buffers,
    total,
)
from malleable.training.loss import Loss, build_loss
from malleable.training.state import State

_SHOWN = 4  # validation images in TensorBoard


def fit(
    config: Config | Mapping[str, Any],
    out: str | Path,
    callback: Callable[[Mapping[str, float]], None] | None = None,
    *,
    resume: bool = False,
    accelerator: str = "auto",
    devices: int | Literal["auto"] = "auto",
    nodes: int = 1,
) -> None:
    """Train a network as ``malleable train`` does.

    SIGINT or SIGTERM finishes the step, saves it and raises ``malleable.training.distributed.Stopped``.

    Args:
        config: the settings, or sections of them by name: ``{"model": {...}, "data": {...}, "train": {...}}``; what is
            left out has its default. A network of one's own that they name is imported.
        out: the run's folder. One that holds a run is never overwritten, only continued.
        callback: called with each row of metrics.jsonl once it is written, in the first process only: its ``step``, and
            ``loss``, ``lr``, ``val/miou``, … by name.
        resume: go on from the newest good checkpoint in ``out``, or start if there is none.
        accelerator, devices, nodes: see ``malleable train --help``.

    Example:
        >>> settings = {"data": {"root": "data/mine"}, "train": {"steps": 1000}}
        >>> mb.fit(settings, "runs/mine", callback=print)  # doctest: +SKIP
    """
    if not isinstance(config, Config | Mapping):
        raise TypeError(
            f"config must be settings by section, got {type(config).__name__}; a file of settings is for the command, "
            "malleable train --config FILE --out FOLDER"
        )
    if not isinstance(config, Config):
        config = parse_config(config)
    fabric = launch(accelerator, devices, nodes, config.train.precision)
    with RunFolder(Path(out), fabric, callback) as folder:
        run_steps(fabric, config, folder, resume)


def run_steps(fabric: Fabric, config: Config, folder: RunFolder, resume: bool) -> None:
    """Train from the start, or from the newest checkpoint in ``folder``, to the last step. A signal raises Stopped."""
    data, recipe = config.data, config.train
    train_set, val_set = open_dataset(data.root, data.train), open_dataset(data.root, data.val)
    for name, dataset in (("train", train_set), ("val", val_set)):
        if not dataset.labelled:
            raise ValueError(
                f"data.{name}={getattr(data, name)} of {data.root} has no labels, so nothing can be learned or scored "
                "there; put them into labels/, or gtFine/ in Cityscapes' tree, or choose another split"
            )
    loss = build_loss(recipe)
    started = folder.started(resume)
    state = State(fabric, config, train_set, pretrained=not started)
    if started:
        folder.restore(config, train_set, state.restore)
    start = state.step
    unvalidated = start > 0 and validates(start, recipe) and not folder.validated(start)
    if start > recipe.steps or (start == recipe.steps and not unvalidated):
        print(f"{folder.path} has made its {recipe.steps} steps already", file=sys.stderr)
        return
    loader = step_loader(
        train_set,
        train_transform(
            data.crop, data.scales, data.flip, DepthFaults(data.depth_dropout, data.depth_holes, data.depth_noise)
        ),
        recipe.batch_size,
        recipe.steps,
        seed=recipe.seed,
        start_step=start,
        workers=data.workers,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        pin_memory=fabric.device.type == "cuda",
    )
    first = train_set[0]  # in all processes: none waits for one that cannot read it
    if fabric.is_global_zero:
        warn_of_border(data, first)
    folder.begin(config, start)
    progress = Progress(recipe.steps, start, recipe.batch_size, shown=fabric.is_global_zero)
    with Interruption() as interruption, progress:
        batches = iter(loader)  # starts the loading processes
        if start:
            progress.say(f"{folder.path} goes on after step {start}")
        if unvalidated:  # it was stopped in between
            folder.save(state.checkpoint())  # it may have come from best.pt alone, beside damaged ones
            validate(state, val_set, folder, progress, interruption)
        progress.restart()
        for batch in batches:  # image (n, 3, H, W), depth (n, 1, H, W), label (n, H, W), focal (n,) for this process
            value, norm = update(state, fabric.to_device(batch), loss, folder)
            stop = agreed_signal(fabric, interruption.received)
            step, last = state.step, state.step == recipe.steps
            progress.advance(step, value)
            if due(step, recipe.log_every) or last:
                scalars = progress.report(step, state.optimizer.param_groups[0]["lr"]) | {"gradient_norm": norm}
                folder.write(Row(step, scalars, receptive_fields=receptive_fields(state.net)))
            with progress.paused():
                if stop or last or validates(step, recipe) or due(step, recipe.checkpoint_every):
                    folder.save(state.checkpoint())
                if stop and not last:
                    raise Stopped(stop, f"stopped after step {step}; the same command with --resume auto goes on")
                if validates(step, recipe):
                    validate(state, val_set, folder, progress, interruption)


def warn_of_border(data: DataConfig, sample: Sample) -> None:
    """Warn if crops are higher and wider than ``sample`` even at the largest scale: much of each is ignored border."""
    height, width = sample.camera.size
    scale = max(data.scales)
    if data.crop[0] > round(height * scale) and data.crop[1] > round(width * scale):
        share = 1 - height * width * scale**2 / (data.crop[0] * data.crop[1])
        warnings.warn(
            f"data.crop={list(data.crop)} is larger than the images: {sample.id} is {height} × {width}, and even at "
            f"{scale} times its size, the largest of data.scales, {share:.0%} of the crop is border, which is ignored; "
            f"take --data.crop {height} {width} or less",
            stacklevel=2,
        )


def update(state: State, batch: Batch, loss: Loss, folder: RunFolder) -> tuple[float, float]:
    """Make one step. Returns the loss before it and the norm of its gradient."""
    fabric, recipe = state.fabric, state.config.train
    seed_step(recipe.seed, state.step, fabric.global_rank)
    state.set_lr()
    weight = max(total(fabric, loss.weight(batch.label).sum()), 1.0)  # of the whole batch, over all devices
    images, size = len(batch.ids), len(batch.ids) // recipe.accumulate
    losses: list[Tensor] = []
    for end in range(size, images + 1, size):
        part = Batch._make(field[end - size : end] for field in batch)
        with fabric.no_backward_sync(state.model, enabled=end < images):
            image = part.image.contiguous(memory_format=torch.channels_last) if recipe.channels_last else part.image
            each = image_losses(state, image, part, loss)  # (size,)
            fabric.backward(each.sum() * (fabric.world_size / weight))  # devices average their gradients
        losses.append(each.detach())
    per_image = torch.cat(losses)  # (images,)
    value = total(fabric, per_image.sum()) / weight
    clipped = fabric.clip_gradients(
        state.model, state.stepper, max_norm=recipe.clip or math.inf, error_if_nonfinite=False
    )
    norm = float(clipped) if isinstance(clipped, Tensor) else math.nan
    if not math.isfinite(value) or (not math.isfinite(norm) and state.scale < 1):  # from 1 the factor may be to blame
        raise not_finite(state, value, per_image, batch.ids, folder)
    state.advance()
    return value, norm


def image_losses(state: State, image: Tensor, part: Batch, loss: Loss) -> Tensor:
    """Compute the loss of each image, that of an auxiliary classifier included."""
    weight = state.config.train.auxiliary
    if not weight:
        return loss(state.model(image, depth=part.depth, focal=part.focal), part.label)
    logits, early = state.model(image, depth=part.depth, focal=part.focal, auxiliary=True)  # (size, C, H, W) each
    return loss(logits, part.label) + weight * loss(early, part.label)


def not_finite(state: State, value: float, per_image: Tensor, ids: list[str], folder: RunFolder) -> RuntimeError:
    """Say why a step would spoil the weights, and what to do."""
    bad = [id for id, number in zip(ids, per_image.tolist(), strict=True) if not math.isfinite(number)]
    bad = gathered(state.fabric, bad)
    what = f"the loss is {value}" if bad else "the gradient is not finite"
    samples = bad or gathered(state.fabric, ids)
    kept = folder.last_good(state.step) or "none yet"
    return RuntimeError(
        f"step {state.step}: {what}; samples {', '.join(samples)}. The weights were not changed by this step; the last "
        f"good checkpoint is {kept}. Look at these samples, lower train.lr or set train.clip"
    )


def validate(
    state: State, dataset: SampleDataset, folder: RunFolder, progress: Progress, interruption: Interruption
) -> None:
    """Score the moving average, or the network if there is none. A signal in any process raises Stopped in all."""
    net, data, step = state.net if state.ema is None else state.ema, state.config.data, state.step
    share_buffers(state.fabric, net)

    def leave_on_signal() -> None:
        if stop := agreed_signal(state.fabric, interruption.received):
            where = f"stopped in the validation after step {step}"
            raise Stopped(stop, f"{where}; the same command with --resume auto makes it first")

    def images() -> Iterator[tuple[str, Tensor]]:
        for index in range(min(_SHOWN, len(dataset))):
            if interruption.received:
                return
            sample = dataset[index]
            predicted = probabilities(net, sample).argmax(0)  # (H, W)
            yield f"val/{sample.id}", side_by_side(sample, predicted, dataset.palette)

    net.eval()
    with state.fabric.autocast():
        scores = evaluate_network(
            net, dataset, split=data.val, workers=max(1, data.workers), progress=True, after_each=leave_on_signal
        )
        folder.write_validation(step, scores, images())
    progress.say(
        f"step {step}: mIoU {scores.miou:.2f}, pixel accuracy {scores.pixel_accuracy:.2f} "
        f"({dataset.name}/{data.val}, {scores.protocol})"
    )
    state.set_mode()


def validates(step: int, recipe: TrainConfig) -> bool:
    """Tell whether a validation follows ``step``."""
    return recipe.validate_last if step == recipe.steps else due(step, recipe.validate_every)


def due(step: int, every: int) -> bool:
    """Tell whether ``step`` is a multiple of ``every``; none is of 0."""
    return every > 0 and step % every == 0


def side_by_side(sample: Sample, predicted: Tensor, palette: Sequence[Sequence[int]]) -> Tensor:
    """Put image, label and prediction (H, W) beside each other, in the palette's colours: (3, H, 3·W) uint8."""
    colours = torch.zeros(256, 3, dtype=torch.uint8)  # unlabelled pixels are black
    colours[: len(palette)] = torch.tensor(palette, dtype=torch.uint8)
    maps = [colours[labels].permute(2, 0, 1) for labels in (sample.label.as_subclass(Tensor), predicted.cpu())]
    return torch.cat([sample.image.as_subclass(Tensor), *maps], dim=2)
