from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from malleable.data import StepSampler, SyntheticScenes, step_loader, train_transform

seeds = st.integers(0, 2**40)


@given(st.integers(1, 30), st.integers(1, 5), seeds)
def test_every_epoch_draws_every_sample_once(length, batch, seed):
    sampler = StepSampler(length, batch, steps=3 * length, seed=seed)
    stream = [draw.item for draws in sampler for draw in draws]
    for epoch in range(3):
        assert sorted(stream[epoch * length : (epoch + 1) * length]) == list(range(length))


@given(st.integers(1, 30), st.integers(0, 10), seeds)
def test_a_resumed_run_draws_what_the_first_would_have(length, start, seed):
    whole = list(StepSampler(length, 4, steps=10, seed=seed))
    assert list(StepSampler(length, 4, steps=10, seed=seed, start_step=start)) == whole[start:]


@given(st.integers(1, 30), st.sampled_from([1, 2, 3, 6]), seeds)
def test_processes_share_the_same_batch_whatever_their_number(length, world, seed):
    alone = StepSampler(length, 6, steps=5, seed=seed)
    ranks = [StepSampler(length, 6, steps=5, seed=seed, rank=rank, world_size=world) for rank in range(world)]
    for step in range(5):
        assert [draw for sampler in ranks for draw in sampler.draws(step)] == alone.draws(step)


def test_epochs_seeds_and_augmentations_differ():
    first, other = StepSampler(50, 50, steps=2, seed=0), StepSampler(50, 50, steps=2, seed=1)
    items = [[draw.item for draw in draws] for draws in (first.draws(0), first.draws(1), other.draws(0))]
    assert items[0] != items[1] != items[2] != items[0]
    assert len({draw.seed for sampler in (first, other) for draws in sampler for draw in draws}) == 200


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"length": 0}, "length"),
        ({"batch_size": 5, "world_size": 2}, "batch_size"),
        ({"rank": 1}, "rank"),
        ({"start_step": 8}, "start_step"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_arguments_are_named(options, name):
    with pytest.raises(ValueError, match=name):
        StepSampler(**{"length": 4, "batch_size": 2, "steps": 7, **options})


def loader(**options):
    scenes = SyntheticScenes("rooms", size=(24, 32), length=7)
    return step_loader(scenes, train_transform(crop=(20, 20)), batch_size=4, steps=5, seed=3, **options)


@pytest.fixture(scope="module")
def batches():
    return list(loader())


def test_batches_are_ready_for_a_network(batches):
    assert len(batches) == 5
    batch = batches[0]
    assert [tuple(t.shape) for t in batch[:4]] == [(4, 3, 20, 20), (4, 1, 20, 20), (4, 20, 20), (4,)]
    assert len(set(batch.focal.tolist())) > 1  # scales are drawn per sample


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(batches, workers):
    for expected, batch in zip(batches, loader(workers=workers), strict=True):
        assert batch.ids == expected.ids
        assert all(torch.equal(a, b) for a, b in zip(batch[:4], expected[:4], strict=True))


def test_starting_later_or_with_another_state_of_torch_changes_nothing(batches):
    torch.manual_seed(99)
    (resumed, last) = loader(start_step=3)
    assert torch.equal(resumed.image, batches[3].image)
    assert torch.equal(last.depth, batches[4].depth)


def test_torchs_own_randomness_is_left_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    list(loader(start_step=4))
    assert torch.equal(torch.get_rng_state(), state)


def test_half_of_the_batch_on_each_of_two_processes(batches):
    for rank in (0, 1):
        for batch, whole in zip(loader(rank=rank, world_size=2), batches, strict=True):
            assert torch.equal(batch.image, whole.image[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_signal_to_all_processes_does_not_end_those_that_load(method: str, tmp_path: Path) -> None:
    """A terminal's Ctrl-C and a scheduler's SIGTERM reach them too; the one that trains finishes its step."""
    if method not in torch.multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    script = tmp_path / "script.py"
    script.write_text(f"""
import multiprocessing, signal
from malleable.data import SyntheticScenes, step_loader, train_transform

class Signalled(SyntheticScenes):
    def __getitem__(self, index):
        if multiprocessing.parent_process() is not None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
        return super().__getitem__(index)

if __name__ == "__main__":
    multiprocessing.set_start_method("{method}")
    scenes = Signalled("rooms", size=(24, 32), length=2)
    print(len(list(step_loader(scenes, train_transform(crop=(20, 20)), batch_size=2, steps=2, workers=1))))
""")
    finished = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (finished.stdout, finished.stderr) == ("2\n", "")
