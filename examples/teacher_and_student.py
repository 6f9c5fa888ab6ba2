# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Teacher and student
#
# A teacher, a malleable layer with known centers and temperature, answers to random features over a staircase of
# depth. Students see only its answers, and have to find out how far it looks. It takes less than a minute on one core.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import malleable as mb

torch.manual_seed(0)
teacher = mb.MalleableConv2d(4, 4, 3, padding=1, centers=[-4.0, -2.0, 0.0, 2.0, 4.0], temperature=2.0)


def scene(batch: int = 8, size: int = 24) -> tuple[torch.Tensor, mb.Geometry]:
    """Random features over steps of depth: neighbours lie in front, at the same depth and behind."""
    stairs = torch.randint(-6, 7, (batch, 1, size // 3, size // 3)).repeat_interleave(3, -1).repeat_interleave(3, -2)
    depth = 2 + 0.02 * stairs + 0.02 * torch.randn(batch, 1, size, size)
    return torch.randn(batch, 4, size, size), mb.Geometry(depth, focal=60.0)


# %% [markdown]
# ## Three students
#
# One has the teacher's weights and has to find the receptive field alone. One starts from random weights. The third is
# a plain convolution, which does not see depth.


# %%
class Plain(nn.Conv2d):
    def forward(self, x: torch.Tensor, geometry: mb.Geometry) -> torch.Tensor:
        return super().forward(x)


knows_weights, learns_all = (mb.MalleableConv2d(4, 4, 3, padding=1) for _ in range(2))
plain = Plain(4, 4, 3, padding=1)
for name in ("weight", "bias"):
    getattr(knows_weights, name).requires_grad_(False).copy_(getattr(teacher, name).detach())
students = {"knows the weights": knows_weights, "learns all": learns_all, "plain convolution": plain}
malleable = {name: student for name, student in students.items() if student is not plain}

# %% [markdown]
# ## Train them
#
# `parameter_groups` is how networks are trained too; with `receptive_field_lr` the receptive field would move faster
# or slower than the weights.

# %%
steps = 150
groups = [group for student in students.values() for group in mb.parameter_groups(student, lr=0.05, weight_decay=0.0)]
optimizer = torch.optim.AdamW(groups)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
paths: dict[str, list[torch.Tensor]] = {name: [] for name in malleable}
print("squared error, where 1 is nothing learned, and centers: behind, same depth, in front")
for step in range(steps + 1):
    x, geometry = scene()
    with torch.no_grad():
        target = teacher(x, geometry)
    losses = {name: (s(x, geometry) - target).square().mean() / target.var() for name, s in students.items()}
    for name, student in malleable.items():
        paths[name].append(student.centers.detach().clone())
    if step % 50 == 0:
        for name, loss in losses.items():
            centers = [f"{a:5.2f}" for a in paths[name][-1][1:-1].tolist()] if name in paths else []
            print(f"step {step:3}  {name:17}  {loss.item():.4f} ", *centers)
    optimizer.zero_grad()
    sum(losses.values()).backward()
    optimizer.step()
    schedule.step()
print("the teacher's centers           ", *(f"{a:5.2f}" for a in teacher.centers[1:-1].tolist()))

# %% [markdown]
# ## Where they look now
#
# Centers and borders start at −2 … 2 and end at the teacher's −4 … 4, the temperature goes from 1 to 2. If the weights
# are learned too, they can make up for a part of that: the error gets small with other borders and another
# temperature. `studies/receptive_fields` asks from which starts and at which learning rates students arrive.

# %%
figure, (*panels, right) = plt.subplots(1, 3, figsize=(12, 3.2))
for panel, (name, path) in zip(panels, paths.items(), strict=True):
    panel.plot(torch.stack(path))
    panel.hlines(teacher.centers.tolist(), 0, steps, "0.6", "dashed")
    panel.set(title=f"{name}: centers (dashed: the teacher's)", xlabel="step")
d = torch.linspace(-6, 6, 200)
right.plot(d, knows_weights.receptive_field(d).detach().T)
right.plot(d, teacher.receptive_field(d).detach().T, "--", color="0.6")
right.set(title="receptive fields (dashed: the teacher's)", xlabel="← behind   relative depth d   in front →")
plt.show()

# %%
for name, layer in {"teacher": teacher, **malleable}.items():
    scales = [round(scale, 2) for scale in layer.scales.tolist()]
    print(f"{name:17}  temperature {layer.temperature.item():.2f}  scales {scales}")
assert (knows_weights.centers - teacher.centers).abs().max() < 0.2
assert losses["learns all"] < 0.02 < 0.1 < losses["plain convolution"]
