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
# # Learn a receptive field
#
# A teacher, a malleable layer with known centers and temperature, answers to random features over a staircase of
# depth. A student with the same weights but the usual centers and temperature sees only its answers, and has to find
# out how far the teacher looks.

# %%
import matplotlib.pyplot as plt
import torch

import malleable as mb

torch.manual_seed(0)
teacher = mb.MalleableConv2d(4, 4, 3, padding=1, centers=[-4.0, -2.0, 0.0, 2.0, 4.0], temperature=2.0)
student = mb.MalleableConv2d(4, 4, 3, padding=1)
for name in ("weight", "bias"):
    getattr(student, name).requires_grad_(False).copy_(getattr(teacher, name).detach())
receptive_field = [student.centers, student.raw_temperature, student.rebalance]


def scene(batch: int = 8, size: int = 24) -> tuple[torch.Tensor, mb.Geometry]:
    """Random features over steps of depth: neighbours lie in front, at the same depth and behind."""
    stairs = torch.randint(-6, 7, (batch, 1, size // 3, size // 3)).repeat_interleave(3, -1).repeat_interleave(3, -2)
    depth = 2 + 0.02 * stairs + 0.02 * torch.randn(batch, 1, size, size)
    return torch.randn(batch, 4, size, size), mb.Geometry(depth, focal=60.0)


# %% [markdown]
# ## Train the student

# %%
steps = 400
optimizer = torch.optim.Adam(receptive_field, lr=0.05)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
losses, paths = [], [student.centers.detach().clone()]
for _ in range(steps):
    x, geometry = scene()
    with torch.no_grad():
        target = teacher(x, geometry)
    loss = (student(x, geometry) - target).square().mean() / target.var()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    paths.append(student.centers.detach().clone())
print(f"squared error {losses[0]:.3f} → {losses[-1]:.4f}, where 1 is nothing learned")

# %% [markdown]
# ## Where it looks now
#
# Centers and borders start at −2 … 2 and end at the teacher's −4 … 4, the temperature goes from 1 to 2. If the
# weights are learned too, they can make up for a part of that: the error gets as small with other borders and another
# temperature.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
left.plot(torch.stack(paths))
left.hlines(teacher.centers.tolist(), 0, steps, "0.6", "dashed")
left.set(title="centers (dashed: the teacher's)", xlabel="step")
d = torch.linspace(-6, 6, 200)
right.plot(d, student.receptive_field(d).detach().T)
right.plot(d, teacher.receptive_field(d).detach().T, "--", color="0.6")
right.set(title="receptive fields (dashed: the teacher's)", xlabel="relative depth d")
plt.show()

# %%
print("centers of the teacher", [round(a, 2) for a in teacher.centers.tolist()], "student", student.centers.tolist())
assert (student.centers - teacher.centers).abs().max() < 0.2
print("temperature of the teacher", teacher.temperature.item(), "student", round(student.temperature.item(), 2))
