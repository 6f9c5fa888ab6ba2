"""MATLAB files as data sets come in them: HDF5 since version 7.3, a format of their own before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from malleable.data.image_files import Array

_KINDS = {"u1": "uint8", "u": "whole numbers without a sign", "f": "floating-point metres", "O": "references"}


def open_hdf5(path: Path) -> Any:
    """Open a file of version 7.3 to read."""
    import h5py

    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise ValueError(f"{path} cannot be read as HDF5 ({error}); download it again") from error


def hdf5_array(group: Any, name: str, kind: str) -> Any:
    """Give the array ``name`` if its data is of ``kind``, as in NumPy's ``dtype.str``, and in this very file."""
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise ValueError(f"{name} is a link to another place, which is not followed")
    array = group[name]
    if not isinstance(array, h5py.Dataset):
        raise ValueError(f"{name} is a group, not an array")
    if array.is_virtual or array.external:
        raise ValueError(f"{name} lies in another file, which is not read")
    if kind not in array.dtype.str:
        raise ValueError(f"{name} holds {array.dtype}, expected {_KINDS[kind]}")
    if array.size and not array.id.get_storage_size():
        raise ValueError(f"{name} has no data")
    return array


def read_variables(path: Path, *names: str) -> list[Array]:
    """Read variables of a file before version 7.3, each as a one-dimensional array."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise RuntimeError(f"{path} needs SciPy to be read: pip install scipy") from error
    try:
        found = loadmat(path, squeeze_me=True, struct_as_record=False, variable_names=list(names))
        return [np.atleast_1d(found[name]) for name in names]
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing") from None
    except KeyError as error:
        raise ValueError(f"{path} has no {error}") from None
    except Exception as error:  # of a damaged file SciPy makes errors of any kind
        raise ValueError(f"{path} cannot be read as a MATLAB file ({error}); download it again") from error
