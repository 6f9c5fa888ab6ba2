"""Wheels for Linux carry the C++ kernels; elsewhere the package's source is built on first use, and kept."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

from malleable.files import cache_folder, locked, whole_path
from malleable.ops.engines.native.compile import FLAGS, SOURCES, TARGETS, compile_native

logger = logging.getLogger("malleable")

PREBUILT = Path(__file__).parent / "prebuilt"


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL | str:
    """Return the wheel's library, else one built here, or a sentence that says why there is none, logged once.

    $CXX asks for one built here.
    """
    found = (None if os.environ.get("CXX") else _prebuilt()) or _built()
    if isinstance(found, str):
        logger.warning("%s; convolutions on the CPU will be slower", found)
    else:
        _declare(found)
    return found


def origin() -> str:
    """Say which library is in use, or why there is none."""
    found = library()
    if isinstance(found, str):
        return found
    path = Path(found._name)
    return f"prebuilt for {path.stem}" if path.parent == PREBUILT else f"built on this machine, {path}"


def _declare(built: ctypes.CDLL) -> None:
    """Say what the functions of ``csrc/`` take: ctypes would cut addresses short, and is slow where it has to guess."""
    long, integer, real, address = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
    sizes = [long, long, integer]
    arguments = {
        "depth_difference": [*[address] * 3, integer, *[real] * 3, *[address] * 2],
        "malleable_assign": [*sizes, *[address] * 2, real, *[address] * 2, integer],
        "malleable_assign_backward": [*sizes, *[address] * 3, real, *[address] * 3, integer],
    }
    arguments["malleable_conv2d"] = [address, integer, *[address] * 8, *[real] * 2, *[address] * 2]
    for path in ("dense", "depthwise", "grouped"):
        for dtype in ("float32", "bfloat16", "float16"):
            if hasattr(built, f"{path}_forward_{dtype}"):  # not every compiler knows float16
                arguments |= {f"{path}_forward_{dtype}": [address] * 5, f"{path}_backward_{dtype}": [address] * 8}
    for name, types in arguments.items():
        getattr(built, name).argtypes = types


def _prebuilt() -> ctypes.CDLL | None:
    """Load the best library of the wheel that this processor can run."""
    features, best = set(_processor().split()), None
    for target, needed in TARGETS.get(platform.machine(), {}).items():
        if not features.issuperset(needed.split()):
            break
        best = PREBUILT / f"{target}.so"
    if best is None or not best.exists():
        return None
    try:
        _share_threads()
        return ctypes.CDLL(str(best))
    except OSError as error:
        logger.warning("the CPU engine of this wheel could not be loaded: %s", error)
        return None


def _share_threads() -> None:
    """Let the wheel's library find the OpenMP of PyTorch, which is called and kept differently in every version."""
    home = Path(torch.__file__).parent
    found = [*home.glob("lib/libgomp*"), *home.parent.glob("torch.libs/libgomp*")]
    ctypes.CDLL(str(found[0]) if found else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def _built() -> ctypes.CDLL | str:
    """Load what was built on this machine, now if need be, or say why that is not possible."""
    wish = os.environ.get("CXX", "").strip()
    compiler = shlex.split(wish or next(filter(shutil.which, ("g++", "c++", "clang++")), "g++"))
    if shutil.which(compiler[0]) is None:
        return f"no C++ compiler ({compiler[0]}) was found"
    try:
        path = cache_folder() / f"cpu-{_fingerprint(compiler)}.so"
        mode = _mode(compiler)
        with suppress(OSError):  # not there yet, or a power cut left a part of it
            return ctypes.CDLL(str(path), mode=mode)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):  # processes that start together wait for one build
            try:
                return ctypes.CDLL(str(path), mode=mode)
            except OSError as error:
                if path.exists():
                    logger.warning("%s cannot be loaded (%s) and is built again", path, error)
            logger.info("building the CPU engine with %s into %s: some seconds, once", compiler[0], path)
            with whole_path(path) as fresh:
                compile_native(compiler, fresh)
        return ctypes.CDLL(str(path), mode=mode)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr
        return f"{compiler[0]} could not build the CPU engine: {said.strip()[:500] or error}"
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home folder
        return f"the CPU engine could not be built or loaded: {error}; MALLEABLE_CACHE names another place for it"


def _mode(compiler: list[str]) -> int:
    """How to load it. Clang brings an OpenMP of its own, whose functions must not be taken from PyTorch's."""
    own = b"clang" in _version(compiler)
    return ctypes.DEFAULT_MODE | (getattr(os, "RTLD_DEEPBIND", 0) if own else 0)


def _version(compiler: list[str]) -> bytes:
    return subprocess.run([*compiler, "--version"], check=True, capture_output=True).stdout


def _fingerprint(compiler: list[str]) -> str:
    """Return a name that changes with the source, the flags, the compiler and the processor it builds for."""
    digest = hashlib.sha256(" ".join([*compiler, *FLAGS]).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    digest.update(_version(compiler))
    digest.update(_processor().encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
