"""DeepLabv3+ as in the paper: any timm backbone whose convolutions may see depth, ASPP, and a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from typing_extensions import Self

from malleable.geometry import check_smooth_depth
from malleable.models.backbone import STAGES, build, build_depth_encoder, load
from malleable.models.convert import check_kernels
from malleable.models.depth_input import Kind
from malleable.models.merge import ConvNormAct, Merge, ReleasedMerge, Upsample, resize

_MERGED = 128
_MULTI_GRID = (2, 4, 8)  # dilations of res5's units in the released network
_RATES = {8: (12, 24, 36), 16: (6, 12, 18), 32: (6, 12, 18)}  # of the ASPP, by output stride


class DeepLabV3Plus(nn.Module, PyTorchModelHubMixin, library_name="malleable"):
    """See :func:`deeplabv3plus`, which also loads pretrained weights.

    ``save_pretrained(folder)`` writes ``model.safetensors`` and ``config.json``; ``from_pretrained(folder)``, or the
    name of a repository on the Hugging Face hub, reads them. ``settings`` are the arguments that the network was built
    with.
    """

    def __init__(
        self,
        backbone: str = "resnet50s",
        num_classes: int = 40,
        conv: str | None = "malleable",
        kernels: int = 3,
        stages: Sequence[int] = STAGES,
        output_stride: int = 16,
        merge: bool | Literal["released"] = False,
        depth_input: Kind | None = None,
        *,
        width: int = 256,
        skip: int = 48,
        channels: Sequence[int] | None = None,
        depth_encoder: Kind | None = None,
        fill_depth: bool = False,
        smooth_depth: int = 0,
        **options: Any,
    ) -> None:
        # Importing torchvision takes longer than importing this whole package.
        from torchvision.models.segmentation.deeplabv3 import ASPP

        super().__init__()
        for name, number in {"num_classes": num_classes, "width": width, "skip": skip}.items():
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        check_smooth_depth(smooth_depth)
        released = merge == "released"
        if isinstance(merge, str) and not released:
            raise ValueError(f"merge must be False, True or 'released', got {merge!r}")
        if released and output_stride != 16:
            raise ValueError(f"merge='released' needs output_stride=16, got {output_stride}")
        self.settings: dict[str, Any] = {
            "backbone": backbone,
            "num_classes": num_classes,
            "conv": conv,
            "kernels": kernels,
            "stages": stages,
            "output_stride": output_stride,
            "merge": merge,
            "depth_input": depth_input,
            "width": width,
            "skip": skip,
            "channels": channels,
            "depth_encoder": depth_encoder,
            "fill_depth": fill_depth,
            "smooth_depth": smooth_depth,
            **options,
        }
        self.backbone, found = build(
            backbone,
            output_stride,
            conv,
            kernels,
            stages,
            depth_input,
            channels,
            options,
            _MULTI_GRID if released else (),
        )
        self.backbone.fill_depth, self.backbone.smooth_depth = fill_depth, smooth_depth
        self.depth_encoder = (
            None
            if depth_encoder is None
            else build_depth_encoder(depth_encoder, backbone, output_stride, channels, fill_depth, smooth_depth)
        )
        self.auxiliary: nn.Module | None = None
        if released:
            self.merge: nn.Module | None = ReleasedMerge(found, 2 * width)
            self.auxiliary = nn.Conv2d(2 * width, num_classes, 1)
            self.aspp = ASPP(2 * width, list(_RATES[output_stride]), 2 * width)
            half = max(1, width // 2)
            self.skip = None
            self.decoder = nn.Sequential(Upsample(2 * width, width), Upsample(width, half))
            self.classifier = nn.Conv2d(half, num_classes, 1)
            return
        self.aspp = ASPP(found[-1], list(_RATES[output_stride]), width)
        self.merge = Merge(found, _MERGED) if merge else None
        self.skip = None if merge else ConvNormAct(found[0], skip, 1)
        self.decoder = nn.Sequential(
            ConvNormAct(width + (_MERGED if merge else skip), width, 3), ConvNormAct(width, width, 3)
        )
        self.classifier = nn.Conv2d(width, num_classes, 1)

    def forward(
        self,
        rgb: Tensor,
        depth: Tensor | None = None,
        focal: float | Tensor | None = None,
        auxiliary: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits (N, num_classes, H, W).

        Args:
            rgb: (N, 3, H, W), any size.
            depth: (N, 1, H, W) metres; without effect if nothing of the network sees depth.
            focal: pixels of the image; a number or (N,); without effect if ``conv=None``.
            auxiliary: return the logits of the released network's auxiliary classifier too, in a pair.
        """
        stages = self.backbone(rgb, depth=depth, focal=focal)[-4:]  # res2 … res5
        if self.depth_encoder is not None:
            if depth is None:
                raise ValueError("depth is missing: call net(image, depth=depth, focal=focal)")
            image, given = ((t.shape[0], *t.shape[-2:]) for t in (rgb, depth))
            if image != given:  # sums of the maps would be broadcast
                raise ValueError(f"depth must have the batch, height and width of the image, {image}, got {given}")
            stages = [seen + known for seen, known in zip(stages, self.depth_encoder(depth)[-4:], strict=True)]
        if self.auxiliary is not None and self.merge is not None:
            merged = self.merge(stages)
            logits = resize(self.classifier(self.decoder(self.aspp(merged))), rgb)
            return (logits, resize(self.auxiliary(merged), rgb)) if auxiliary else logits
        if auxiliary:
            raise ValueError("auxiliary=True: only merge='released' has an auxiliary classifier")
        fine = self.merge(stages) if self.merge is not None else self.skip(stages[0])  # type: ignore[misc]
        context = resize(self.aspp(stages[-1]), fine)
        return resize(self.classifier(self.decoder(torch.cat([context, fine], dim=1))), rgb)

    @classmethod
    def _from_pretrained(cls, *, strict: bool = True, **arguments: Any) -> Self:
        """Do as the mixin does, but weights that do not fit are an error, and nothing is printed."""
        with redirect_stdout(None):
            network: Self = super()._from_pretrained(strict=strict, **arguments)
        return network.eval()  # older hubs leave it in training mode


def deeplabv3plus(
    backbone: str = "resnet50s",
    num_classes: int = 40,
    conv: str | None = "malleable",
    kernels: int = 3,
    stages: Sequence[int] = STAGES,
    output_stride: int = 16,
    merge: bool | Literal["released"] = False,
    depth_input: Kind | None = None,
    pretrained: bool | str | Path = True,
    *,
    width: int = 256,
    skip: int = 48,
    channels: Sequence[int] | None = None,
    depth_encoder: Kind | None = None,
    fill_depth: bool = False,
    smooth_depth: int = 0,
    **options: Any,
) -> DeepLabV3Plus:
    """Build DeepLabv3+ (paper, 4.2): ASPP 6/12/18 (twice that at output stride 8), 48-channel skip, two 3×3 of 256.

    Args:
        backbone: any timm model; ``"resnet50s"`` and ``"resnet101s"`` have the paper's 64-64-128 stem.
        num_classes: of the logits.
        conv: ``"malleable"``, ``"conv25d"``, ``"depth_aware"``, or None for the RGB baseline, which takes depth too and
            ignores it.
        kernels: K.
        stages: in which of res2 … res5 the first k × k convolution of the first residual unit sees depth.
        output_stride: 8, 16 or 32.
        merge: feed the decoder with all four stages through the multi-stage merging block (the NYUDv2 network) instead
            of the skip from res2. ``"released"`` is the network of the authors' code instead, see docs/models.md.
        depth_input: also show depth to the backbone's first convolution, ``"metric"`` or ``"relative"``, see
            :func:`malleable.convert`.
        pretrained: ImageNet weights of the backbone: True downloads timm's, a path reads a safetensors or torch file
            with timm's names (torchvision's ResNets have the same), False starts at random.
        width: channels of ASPP and decoder; the released network has twice as many in its ASPP.
        skip: channels of the skip from res2.
        channels: of res2 … res5, for a narrower backbone where timm's takes ``channels`` (its ResNets do).
        depth_encoder: a second backbone for depth, ``"metric"`` or ``"relative"``, whose maps are added to those of the
            first: the usual way, at twice the cost, to compare with. It starts at random.
        fill_depth, smooth_depth: interpolate unknown depth, and take medians of depth, see :func:`malleable.convert`.
        options: for the layers, for example ``temperature=2.0``.

    Example:
        >>> import torch, malleable as mb
        >>> net = mb.deeplabv3plus("resnet18", num_classes=40, pretrained=False).eval()
        >>> net(torch.rand(1, 3, 64, 96), depth=1 + torch.rand(1, 1, 64, 96), focal=100.0).shape
        torch.Size([1, 40, 64, 96])
    """
    if not isinstance(stages, Sequence):
        raise TypeError(f"stages must be some of {STAGES}, for example [2, 3], got {stages}")
    network = DeepLabV3Plus(
        backbone=backbone,
        num_classes=num_classes,
        conv=conv,
        kernels=check_kernels(conv, kernels),
        stages=tuple(stages),
        output_stride=output_stride,
        merge=merge,
        depth_input=depth_input,
        width=width,
        skip=skip,
        channels=None if channels is None else tuple(channels),
        depth_encoder=depth_encoder,
        fill_depth=fill_depth,
        smooth_depth=check_smooth_depth(smooth_depth),
        **options,
    )
    load(network.backbone, backbone, pretrained, channels)
    return network
