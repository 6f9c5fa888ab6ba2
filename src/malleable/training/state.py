"""All that changes while a network is trained, and how it goes into a checkpoint and comes back."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from malleable import __version__
from malleable.data import SampleDataset
from malleable.layers import MalleableConv2d
from malleable.models import DeepLabV3Plus
from malleable.models.foreign import Foreign
from malleable.models.parameters import parameter_groups
from malleable.runs.checkpoint import Checkpoint
from malleable.runs.config import Config, TrainConfig, build_network
from malleable.runs.folder import fingerprint
from malleable.training.distributed import seed_step

_PACKAGES = ("torch", "torchvision", "timm", "lightning-fabric", "numpy")  # a run's numbers depend on them


class State:
    """Holds network, moving average, optimiser and step.

    net: the network itself; ``model`` is what a training step calls, with devices and precision around it.
    ema: the moving average of the weights, or None.
    optimizer: SGD or AdamW; ``stepper`` is the same under fabric.
    step: updates made so far.

    Args:
        dataset: what is learned from.
        pretrained: False if :meth:`restore` follows, so that the weights to start from are not looked for.
    """

    def __init__(self, fabric: Fabric, config: Config, dataset: SampleDataset, pretrained: bool) -> None:
        recipe = config.train
        self.fabric, self.config, self.dataset, self.step = fabric, config, dataset, 0
        seed_step(recipe.seed, 0, 0)  # the same weights in all processes
        net = build_network(config.model, len(dataset.classes), pretrained=pretrained, trust=True)  # one's own config
        if isinstance(net, Foreign):
            net.require_logits(*config.data.crop)
        if isinstance(net, DeepLabV3Plus) and net.auxiliary is not None and not recipe.auxiliary:
            net.auxiliary.requires_grad_(False)  # it gets no gradient, which DDP would wait for
        self.net = suit_norms(net, fabric, recipe)
        if recipe.channels_last:
            self.net.to(memory_format=torch.channels_last)
        self.ema = copy.deepcopy(self.net).eval().requires_grad_(False).to(fabric.device) if recipe.ema else None
        groups = parameter_groups(
            self.net,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            receptive_field_lr=recipe.receptive_field_lr,
            head_lr=recipe.head_lr,
        )
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(groups, momentum=recipe.momentum)
            if recipe.optimizer == "sgd"
            else torch.optim.AdamW(groups, fused=not self.scale)  # a scaler needs to clip before
        )
        self._initial_lr = [group["lr"] for group in groups]
        compiled: Any = torch.compile(self.net) if recipe.compile else self.net
        self.model, self.stepper = fabric.setup(compiled, self.optimizer)
        self.set_mode()

    @property
    def scale(self) -> float:
        """Give the factor of losses in half precision, halved at each step whose gradient is not finite; 0 if none."""
        scaler = getattr(self.fabric.strategy.precision, "scaler", None)
        return 0.0 if scaler is None else float(scaler.get_scale())

    def set_lr(self) -> None:
        """Follow the schedule, by default poly (paper, 4.2). torch's own drift from it: they multiply rate by rate."""
        recipe = self.config.train
        done = self.step / recipe.steps
        factor = (1 - done) ** recipe.power if recipe.schedule == "poly" else (1 + math.cos(math.pi * done)) / 2
        if self.step < recipe.warmup:
            factor *= (self.step + 1) / recipe.warmup
        for group, initial in zip(self.optimizer.param_groups, self._initial_lr, strict=True):
            group["lr"] = initial * factor

    def set_mode(self) -> None:
        """Put the network into training mode, but for batch norms that are frozen."""
        self.model.train()
        if self.config.train.freeze_norm:
            for module in self.net.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()

    @torch.no_grad()
    def advance(self) -> None:
        """Apply the gradient, and move the average towards the new weights."""
        self.stepper.step()
        self.stepper.zero_grad()
        self.step += 1
        if self.config.train.hold_middle:
            for module in self.net.modules():
                if isinstance(module, MalleableConv2d) and module.kernels % 2:
                    module.centers[module.kernels // 2 + 1] = 0
        decay = self.config.train.ema
        if self.ema is not None and decay is not None:  # AveragedModel's first update would be a copy
            own, current = ((*net.parameters(), *net.buffers()) for net in (self.ema, self.net))  # shared ones once
            for average, now in zip(own, current, strict=True):
                if average.is_floating_point():
                    average.lerp_(now, 1 - decay)
                else:
                    average.copy_(now)

    def checkpoint(self) -> Checkpoint:
        """Give all of this state; random numbers and learning rate follow from the settings and the step."""
        return Checkpoint(
            config=self.config,
            step=self.step,
            model=self.net.state_dict(),
            ema=None if self.ema is None else self.ema.state_dict(),
            classes=self.dataset.classes,
            palette=self.dataset.palette,
            dataset=self.dataset.name,
            training={
                "optimizer": self.optimizer.state_dict(),
                "precision": self.fabric.strategy.precision.state_dict(),
                "samples": fingerprint(self.dataset),
            },
            versions={"malleable": __version__, **{name: version(name) for name in _PACKAGES}},
            places=self._places(),
        )

    def _places(self) -> tuple[str, ...]:
        return self.net.places if isinstance(self.net, Foreign) else ()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from ``checkpoint``; raises if it does not fit, and another one may be restored then."""
        if checkpoint.places and checkpoint.places != self._places():
            raise RuntimeError(
                f"the run began with malleable {checkpoint.versions.get('malleable')}, which placed its layers at "
                f"{', '.join(checkpoint.places)}; this version places them at {', '.join(self._places())}. Go on with "
                "the one that it began with; to use what it has learned any version will do"
            )
        for net, weights in ((self.net, checkpoint.model), (self.ema, checkpoint.ema or checkpoint.model)):
            if net is not None:
                if _shapes(weights) != _shapes(net.state_dict()):  # load_state_dict's error could also be the machine's
                    raise ValueError("its weights are not those of this network")
                net.load_state_dict(weights)
        load_moments(self.optimizer, checkpoint.training["optimizer"])
        for parameter, state in self.optimizer.state.items():
            moments = [value for key, value in state.items() if key != "step" and value is not None]
            if any(moment.shape != parameter.shape or not moment.isfinite().all() for moment in moments):
                raise ValueError("the optimiser's state does not fit the weights or is not finite")
        if scaling := checkpoint.training["precision"]:  # empty if the run had another precision then
            self.fabric.strategy.precision.load_state_dict(scaling)
        self.step = checkpoint.step


def load_moments(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Give ``optimizer`` the moments that were ``saved``; its settings stay its own: the recipe may be another one now.

    They are in place before: whether AdamW is fused decides on which device it counts steps.
    """
    groups = zip(saved["param_groups"], optimizer.param_groups, strict=True)
    own = [{**now, "params": before["params"]} for before, now in groups]
    optimizer.load_state_dict({**saved, "param_groups": own})


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights.items()}


def suit_norms(net: nn.Module, fabric: Fabric, recipe: TrainConfig) -> nn.Module:
    """Set the momentum of batch norms; have them share statistics where devices can, or say why they will not do."""
    if recipe.norm_momentum is not None:
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = recipe.norm_momentum
    images, rest = divmod(recipe.batch_size, fabric.world_size * recipe.accumulate)
    if rest:
        raise ValueError(
            f"train.batch_size={recipe.batch_size} must be a multiple of {fabric.world_size} processes × "
            f"train.accumulate={recipe.accumulate}"
        )
    shared = fabric.world_size > 1 and fabric.device.type == "cuda" and not recipe.freeze_norm
    if shared:
        from timm.layers.norm_act import convert_sync_batchnorm  # torch's loses the activation of timm's fused norms

        converted: nn.Module = convert_sync_batchnorm(net)  # type: ignore[no-untyped-call]
        return converted
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())
    if normed and images < 2 and not recipe.freeze_norm:
        raise ValueError(
            "batch norm needs at least 2 images at a time, but a process gets 1; raise train.batch_size, lower "
            "train.accumulate, use fewer processes, or set train.freeze_norm to true"
        )
    if fabric.world_size > 1 and not recipe.freeze_norm and fabric.is_global_zero:
        print("on CPU the statistics of batch norm are those of each process alone", file=sys.stderr)
    return net
