"""What the Triton kernels take on GPUs that are not here, and an estimate on paper of how near the limit they can come.

    python benchmarks/triton_aot.py

Prints Markdown. Nothing in it is a timing.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels import SHARED_MEMORY, Layer, compile_for, constants_of, shipped
from malleable.ops.engines.triton.tuning import CONFIGS

KERNELS = 3
TAPS = 9
BATCH = 4
BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Gpu:
    """Published peaks: 10¹² dense bfloat16 and float32 operations a second, 10¹² bytes a second."""

    name: str
    tensor: float
    vector: float
    memory: float


GPUS = (Gpu("A100", 312, 19.5, 2.039), Gpu("H100", 989.4, 66.9, 3.35), Gpu("B200", 2250, 80, 8.0))


@dataclass(frozen=True)
class Shape:
    """One of the paper's layers for a 768×768 image."""

    name: str
    channels: int
    size: int
    stride: int

    @property
    def products(self) -> float:
        """Multiply-adds of one pass."""
        return BATCH * (self.size // self.stride) ** 2 * KERNELS * TAPS * self.channels**2

    def entries(self, *tensors: str) -> float:
        """Numbers that a pass must read or write at least once."""
        inputs, outputs = BATCH * self.size**2, BATCH * (self.size // self.stride) ** 2
        count = {
            "x": inputs * self.channels,
            "y": outputs * self.channels,
            "weight": KERNELS * TAPS * self.channels**2,
            "assign": outputs * KERNELS * TAPS,
        }
        return sum(count[tensor] for tensor in tensors)


SHAPES = (Shape("res2", 64, 192, 1), Shape("res3", 128, 192, 2), Shape("res4", 256, 96, 2), Shape("res5", 512, 48, 1))

# Tensors moved, and operations of the vector units for each multiply-add of the tensor cores.
PASSES = {
    "forward": (("x", "weight", "assign", "y"), lambda shape: 1 / min(shape.channels, 128)),
    "gradients of x and assign": (("y", "weight", "assign", "x", "x", "assign"), lambda shape: 3 / shape.channels),
    "gradient of weight": (("x", "y", "assign", "weight"), lambda shape: 1 / min(shape.channels, 64)),
}


# What the binaries of the table are compiled for: the first layer that the tuner would try a configuration on.
LAYERS = {
    "narrow": {"groups of 4": Layer(128, 32), "groups of 24": Layer(336, 14)},
    "depthwise": {"depthwise 7×7": Layer(96, 96, kernel_size=7), "depthwise 3×3": Layer(672, 672)},
    "": {"dense": Layer(256)},
}


def binaries() -> None:
    print("| kernel | arithmetic | layer | pixels × in × out | warps, stages | sm_80 | sm_90 | sm_100 |")
    print("|---|---|---|---|---|---|---|---|")
    for (kernel, arithmetic), configs in CONFIGS.items():
        layers = next(layers for kind, layers in LAYERS.items() if kernel.startswith(kind))
        for config in configs:
            label, layer = next(
                (label, layer) for label, layer in layers.items() if config in shipped(kernel, arithmetic, layer)
            )
            blocks = constants_of(kernel, arithmetic, layer) | config.kwargs
            named = [f"BLOCK_{side}" for side in ("P", "IN", "OUT")]
            sizes = " × ".join(str(blocks[name]) for name in named if name in blocks)
            cells = []
            for capability in SHARED_MEMORY:
                usage = compile_for(capability, kernel, arithmetic, config, layer)
                cells.append(f"{usage.registers} / {usage.stack} / {usage.shared / 1024:.0f}")
            tile = f"{config.num_warps}, {config.num_stages}"
            print(f"| {kernel} | {arithmetic} | {label} | {sizes} | {tile} | {' | '.join(cells)} |", flush=True)


def estimate() -> None:
    names = " | ".join(gpu.name for gpu in GPUS)
    print(f"| layer | pass | 10⁹ multiply-adds | MB | operations a byte | {names} |\n|---|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        for name, (tensors, vector) in PASSES.items():
            operations, moved = 2 * shape.products, BYTES * shape.entries(*tensors)
            cells = []
            for gpu in GPUS:
                tensor = operations / gpu.tensor
                memory = moved / gpu.memory
                others = shape.products * vector(shape) / (gpu.vector / 2)
                low, high = tensor / max(tensor + others, memory), tensor / max(tensor, others, memory)
                cells.append(f"{100 * low:.0f}–{100 * high:.0f} %")
            numbers = f"{shape.products / 1e9:.1f} | {moved / 1e6:.1f} | {operations / moved:.0f}"
            print(f"| {shape.name} | {name} | {numbers} | {' | '.join(cells)} |")


@dataclass(frozen=True)
class Grouped:
    """A layer of groups: ``width`` channels each, which take tiles of ``tile`` channels, 0 for depthwise kernels."""

    name: str
    channels: int
    width: int
    tile: int
    taps: int
    size: int

    def passes(self) -> dict[str, tuple[float, float, float]]:
        """Multiply-adds of the tensor cores and of the vector units, and bytes moved, of each pass."""
        pixels, taken = BATCH * self.size**2, KERNELS * self.taps
        channels = self.channels * self.tile / (self.width * max(1, self.tile // self.width)) if self.tile else 0
        each, assign = pixels * self.channels, pixels * taken
        units = self.channels / 64 if not self.tile else channels / self.tile
        shares = 2 * 4 * assign * -(-units // 1)  # partial sums in float32, written and read
        tensor = assign * channels * self.tile
        vector = assign * channels if self.tile else (KERNELS + 1) * each * self.taps
        once = BYTES * (2 * each + assign)
        return {
            "forward": (tensor, vector, once),
            "gradients of x and assign": (
                tensor,
                vector * (3 if self.tile else 2),
                once + BYTES * (each + assign) + shares,
            ),
            "gradient of weight": (tensor, vector, once),
        }


GROUPED = (
    Grouped("depthwise 7×7, 96 channels, 56²", 96, 1, 0, 49, 56),
    Grouped("depthwise 3×3, 672 channels, 7²", 672, 1, 0, 9, 7),
    Grouped("32 groups of 4, 3×3, 56²", 128, 4, 16, 9, 56),
    Grouped("14 groups of 24, 3×3, 14²", 336, 24, 32, 9, 14),
)


def grouped_estimate() -> None:
    names = " | ".join(gpu.name for gpu in GPUS)
    print(f"| layer | pass | 10⁶ tensor | 10⁶ vector | MB | {names} |\n|---|---|---|---|---|---|---|---|")
    for layer in GROUPED:
        for name, (tensor, vector, moved) in layer.passes().items():
            cells = []
            for gpu in GPUS:
                times = {
                    "tensor": 2 * tensor / gpu.tensor,
                    "vector": 2 * vector / gpu.vector,
                    "memory": moved / gpu.memory,
                }
                slowest = max(times, key=lambda unit: times[unit])
                cells.append(f"{times[slowest] / 1e6:.1f} ({slowest})")
            numbers = f"{tensor / 1e6:.0f} | {vector / 1e6:.0f} | {moved / 1e6:.1f}"
            print(f"| {layer.name} | {name} | {numbers} | {' | '.join(cells)} |")


if __name__ == "__main__":
    binaries()
    print()
    estimate()
    print()
    grouped_estimate()
