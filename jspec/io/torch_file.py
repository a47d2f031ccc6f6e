"""Files that ``torch.save`` wrote (``.bin``, ``.pt``), read without PyTorch and without running what they say.

Such a file is a zip archive: ``NAME/data.pkl`` pickles a dict of tensors, each a storage (a file
``NAME/data/KEY`` of raw little-endian numbers), an offset, a shape and strides. The unpickler here knows
these and nothing else, so a file can neither call nor import anything. The format of PyTorch before 1.6 (no
zip archive) is refused.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

STORAGES: dict[str, Any] = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


class _Storage(NamedTuple):
    key: str
    dtype: np.dtype


class _Lazy(NamedTuple):
    """A tensor that has not been read yet; offset and strides count numbers."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> _Lazy:
    return _Lazy(storage, offset, tuple(shape), tuple(strides))


def _parameter(data: _Lazy, *rest: Any) -> _Lazy:
    return data


class _Unpickler(pickle.Unpickler):
    """Tensors, parameters and ordered dicts."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return np.dtype(STORAGES[name])
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("collections", "OrderedDict"): OrderedDict,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}, not only tensors")
        return known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, *_ = pid
        return _Storage(key, dtype)


class TorchTensors:
    """The tensors of such a file, by name; read when asked for.

    Raises:
      ValueError: not such a file, or one that holds more than a dict of tensors.
    """

    def __init__(self, path: Path):
        self.path = path
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path}: expected a file that torch.save of PyTorch 1.6 or later wrote")
        self._zip = zipfile.ZipFile(path)
        index = next((name for name in self._zip.namelist() if name.endswith("/data.pkl")), None)
        if index is None:
            raise ValueError(f"{path}: expected a file that torch.save wrote, but it has no data.pkl")
        self._root = index.removesuffix("data.pkl")
        try:
            with self._zip.open(index) as file:
                found = _Unpickler(file).load()
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: expected a dict of tensors, but {error}") from None
        if not isinstance(found, dict) or not all(isinstance(value, _Lazy) for value in found.values()):
            raise ValueError(f"{path}: expected a dict of tensors")
        self.files: dict[str, _Lazy] = {str(name): value for name, value in found.items()}
        self.shapes = {name: value.shape for name, value in self.files.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its own dtype."""
        storage, offset, shape, strides = self.files[name]
        try:
            data = np.frombuffer(self._zip.read(f"{self._root}data/{storage.key}"), storage.dtype)
        except (KeyError, ValueError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.path}: cannot read {name} ({error})") from None
        if 0 in shape:
            return np.zeros(shape, storage.dtype)
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        if min(offset, *strides, *shape, 0) < 0 or last >= data.size:
            raise ValueError(f"{self.path}: cannot read {name}: its numbers are not all there")
        steps = tuple(step * data.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(data[offset:], shape, steps, writeable=False)
