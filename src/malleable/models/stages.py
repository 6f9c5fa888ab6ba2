"""What a network does with an image: which convolution runs at which rate, and where its stages begin."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

from malleable.geometry import integer_rate

SMALLEST = 4  # maps of fewer pixels do not tell their rate
OCTAVE = 1.45  # sizes that differ by less are one resolution: unpadded convolutions shave a few pixels off
_MANY = 5  # widths at one resolution; more of them are no stages but a network that widens with every unit

Size = tuple[int, int]


@dataclass(frozen=True)
class Ran:
    """How a k × k, k > 1, convolution first ran."""

    name: str
    reads: Size  # of its input, (height, width), without what was padded to it
    writes: Size
    pads: tuple[int, int, int, int]  # what was put around its input: left, right, top, bottom
    mode: str  # in which it was, as F.pad calls them, or "zeros"
    counts: bool  # overlaps its neighbours' windows and sees a map of the image's shape, but not the image itself
    grown: bool  # a map had been enlarged before
    first: bool  # no maps had been added before

    @property
    def shrinks(self) -> bool:
        return self.writes[0] * OCTAVE < self.reads[0]


@dataclass(frozen=True)
class Map:
    """A square map (N, C, H, W), (N, H, W, C) or its tokens (N, H·W, C)."""

    height: int
    width: int  # channels


@dataclass
class Watched:
    """Tells what a network did in one pass. Names are those of ``named_modules``; dicts are in order of execution."""

    image: Size
    convolutions: dict[str, Ran] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)  # channels of the map that a module is given
    outputs: dict[str, Map] = field(default_factory=dict)  # of modules
    adders: set[str] = field(default_factory=set)  # modules that add two equal maps themselves
    sums: set[int] = field(default_factory=set)  # heights of the maps they add, before any was enlarged

    def rate(self, name: str) -> float | None:
        """Tell the down-sampling rate of the map that convolution ``name`` reads; None if it did not run."""
        return self._rate(self.convolutions[name].reads) if name in self.convolutions else None

    def padded_at(self, name: str) -> int | None:
        """Tell the rate of the map that is padded before convolution ``name`` reads it; None if there is none."""
        ran = self.convolutions.get(name)
        return integer_rate(self.image, ran.reads) if ran and any(ran.pads) else None

    def padded_before(self, name: str) -> tuple[int, int] | None:
        """Tell how many columns and rows go before that map; None where it is half of them, one more at the end."""
        left, right, top, bottom = self.convolutions[name].pads if name in self.convolutions else (0, 0, 0, 0)
        return None if 0 <= right - left <= 1 and 0 <= bottom - top <= 1 else (left, top)

    def first_of_stages(self) -> list[str]:
        """Find one k × k convolution for every stage of the part of the network that goes down, in its order.

        Convolutions in the same place of other blocks (the same path, numbers aside) are of one kind. For every
        resolution the first convolution is chosen of the kind that is found at most resolutions, of kinds in residual
        units if there are any; a resolution belongs to the unit that writes it. At one resolution a stage also begins
        where a residual unit changes the number of channels: a dilated stage keeps the size.
        """
        down = list(self._going_down())
        levels = _levels([self._height(ran) for ran in down])
        kinds: dict[str, dict[int, list[Ran]]] = {}
        for ran in down:
            kinds.setdefault(_kind(ran.name), {}).setdefault(_nearest(levels, self._height(ran)), []).append(ran)
        common = sorted(kinds.values(), key=lambda at: (-len(at), -sum(map(len, at.values()))))
        chosen: list[list[str]] = []
        for level in levels:
            here = [at[level] for at in common if level in at]
            here.sort(key=lambda convolutions: self._unit(convolutions[0].name) is None)
            first = here[0][0]
            plain = self._unit(first.name) is None
            is_stem = level > max(common[0]) and (plain or 3 * level > self.image[0])
            elsewhere = _part(first.name) != _part(next(iter(common[0].values()))[0].name)
            is_behind = level < min(common[0]) and plain and elsewhere and not first.shrinks
            if not is_stem and not is_behind:
                chosen.append(self._begin_stages(here[0]))
        if any(self._widens_steadily(names) for names in chosen):
            chosen = [names[:1] for names in chosen]
        found = [name for name in self.convolutions if any(name in names for names in chosen)]
        only_stem = self.sums and all(self.convolutions[name].first and not self._unit(name) for name in found)
        return [] if only_stem else found

    def missed(self, names: list[str]) -> list[float]:
        """List the rates at which the network adds maps on its way down but none of ``names`` reads or writes any."""
        ran = [self.convolutions[name] for name in names if name in self.convolutions]
        covered = [height for r in ran for height in (r.reads[0], r.writes[0], self._height(r))]
        finest = max((r.reads[0] for r in ran), default=self.image[0])
        telling = _levels([height for height in self.sums if SMALLEST <= height < finest])
        missed = [level for level in telling if not _near(covered, level)]
        return [self._rate((level, level * self.image[1] // self.image[0] or 1)) for level in missed]

    def coarsest(self) -> int:
        """Tell the least height that a convolution of the part that goes down writes."""
        return min((ran.writes[0] for ran in self._going_down()), default=self.image[0])

    def _going_down(self) -> Iterator[Ran]:
        """Go through the convolutions that count until maps grow, and the coarsest of the same kinds after that."""
        kinds: set[str] = set()
        coarsest = self.image[0]
        counting = [ran for ran in self.convolutions.values() if ran.counts]
        for i, ran in enumerate(counting):
            height, kind = self._height(ran), _kind(ran.name)
            later = [other.reads[0] for other in counting[i:] if not other.grown and _kind(other.name) == kind]
            is_aside = max(later, default=0) > ran.reads[0] * OCTAVE  # the network goes on with a finer map
            if is_aside or (height * OCTAVE > self.image[0] and self._unit(ran.name) is None):
                continue
            if ran.grown and (kind not in kinds or height > coarsest * OCTAVE):
                continue
            kinds.add(kind)
            coarsest = min(coarsest, height)
            yield ran

    def _begin_stages(self, convolutions: list[Ran]) -> list[str]:
        """Choose the first convolution, and those with which residual units of another width begin."""
        names = [convolutions[0].name]
        units = [(ran.name, unit) for ran in convolutions if (unit := self._unit(ran.name))]
        for (_, before), (name, unit) in pairwise(units):
            changes = self.inputs.get(unit) != self.outputs[unit].width or _parent(unit) != _parent(before)
            if changes and self.outputs[unit].width != self.outputs[before].width:
                names.append(name)
        return names

    def _widens_steadily(self, names: list[str]) -> bool:
        """Tell whether the widths at one resolution are too many for stages, or come and go."""
        widths = [self.outputs[unit].width for name in names if (unit := self._unit(name))]
        return len(names) > _MANY or len(set(widths)) < len(widths)

    def _height(self, ran: Ran) -> int:
        unit = self._unit(ran.name)
        return ran.writes[0] if unit is None else self.outputs[unit].height

    def _unit(self, name: str) -> str | None:
        """Find the innermost module around convolution ``name`` that adds maps, or stands where others do so."""
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
        return next((m for m in around if m in self.outputs and _place(m) in self._places_of_units), None)

    @cached_property
    def _places_of_units(self) -> set[str]:  # once the pass is over
        return {_place(adder) for adder in self.adders if adder in self.outputs}

    def _rate(self, size: Size) -> float:
        return integer_rate(self.image, size) or self.image[0] / size[0]


def _levels(heights: list[int]) -> list[int]:
    """List the resolutions among ``heights``, from fine to coarse: one where they halve, not where they lose a few."""
    levels: list[int] = []
    for height in sorted(set(heights), reverse=True):
        if not levels or height * OCTAVE < levels[-1]:
            levels.append(height)
    return levels


def _nearest(levels: list[int], height: int) -> int:
    return min(levels, key=lambda level: abs(math.log(level / height)))


def _near(heights: list[int], height: int) -> bool:
    return any(1 / OCTAVE < other / height < OCTAVE for other in heights)


@lru_cache(maxsize=4096)
def _kind(convolution: str) -> str:
    """Tell in which place of a block a convolution is: its path up to the last number, numbers aside."""
    return _place(re.sub(r"(.*(?:^|\.)\d+)\..*", r"\1", convolution))


def _part(name: str) -> str:
    """Tell in which part of the network a module is, such as its encoder."""
    return _place(name.partition(".")[0])


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


@lru_cache(maxsize=4096)
def _place(name: str) -> str:
    return re.sub(r"\d+", "*", name)
