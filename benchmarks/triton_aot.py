"""What the Triton kernels take on GPUs that are not here, and an estimate on paper of how near the limit they can come.

    python benchmarks/triton_aot.py

Prints Markdown. Nothing in it is a timing.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels import SHARED_MEMORY, Layer, compile_for, constants_of
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


def binaries() -> None:
    print("| kernel | arithmetic | pixels × in × out | warps, stages | sm_80 | sm_90 | sm_100 |")
    print("|---|---|---|---|---|---|---|")
    layer = Layer(channels=256)
    for (kernel, arithmetic), configs in CONFIGS.items():
        fixed = constants_of(kernel, arithmetic, layer)
        for config in configs:
            sizes = " × ".join(str((fixed | config.kwargs)[f"BLOCK_{side}"]) for side in ("P", "IN", "OUT"))
            cells = []
            for capability in SHARED_MEMORY:
                usage = compile_for(capability, kernel, arithmetic, config, layer)
                cells.append(f"{usage.registers} / {usage.stack} / {usage.shared / 1024:.0f}")
            tile = f"{config.num_warps}, {config.num_stages}"
            print(f"| {kernel} | {arithmetic} | {sizes} | {tile} | {' | '.join(cells)} |", flush=True)


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


if __name__ == "__main__":
    binaries()
    print()
    estimate()
