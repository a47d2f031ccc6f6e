"""Files of ``torch.save`` (``.bin``, ``.pt``), read and written without PyTorch, and without running what
they say.

Such a file is a zip archive: ``NAME/data.pkl`` pickles a dict of tensors, each a storage (a file
``NAME/data/KEY`` of raw little-endian numbers), an offset, a shape and strides. The unpickler here knows
these and nothing else, so a file can neither call nor import anything. The format of PyTorch before 1.6 (no
zip archive) is refused.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
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
    """The tensors of such a file, by name, read when asked for; "" is that of a file that is one tensor.
    ``numbers`` are the integers beside them.

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
        if isinstance(found, _Lazy):
            found = {"": found}
        if not isinstance(found, dict) or not all(isinstance(x, (_Lazy, int)) for x in found.values()):
            raise ValueError(f"{path}: expected a dict of tensors")
        self.files = {str(name): value for name, value in found.items() if isinstance(value, _Lazy)}
        self.numbers = {str(name): value for name, value in found.items() if isinstance(value, int)}
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


# --- writing ----------------------------------------------------------------------------------------


def save_torch(path: Path, entries: Mapping[str, np.ndarray | int]) -> None:
    """Write a dict of tensors (and integers) as ``torch.save`` would, for ``torch.load`` to read.

    Raises:
      ValueError: a tensor of a type that PyTorch has not.
      OSError: it cannot be written.
    """
    names = {np.dtype(dtype): name for name, dtype in STORAGES.items()}
    pickled, storages = [b"\x80\x02}"], []  # protocol 2, an empty dict
    for name, value in entries.items():
        pickled.append(_text(name))
        if isinstance(value, int):
            pickled.append(_number(value))
        elif value.dtype not in names:
            raise ValueError(f"{name}: expected a type that PyTorch has, got {value.dtype}")
        else:
            pickled.append(_rebuild(value, names[value.dtype], str(len(storages))))
            storages.append(value)
        pickled.append(b"s")  # into the dict
    pickled.append(b".")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", b"".join(pickled))
        for i, value in enumerate(storages):
            file.writestr(f"archive/data/{i}", np.ascontiguousarray(value).tobytes())
        file.writestr("archive/version", b"3\n")


def _text(text: str) -> bytes:
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _number(value: int) -> bytes:
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def _rebuild(value: np.ndarray, storage: str, key: str) -> bytes:
    """``_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())``."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(_number, values)) + b"t"

    strides = tuple(int(np.prod(value.shape[i + 1 :])) for i in range(value.ndim))
    where = b"(" + _text("storage") + f"ctorch\n{storage}\n".encode() + _text(key) + _text("cpu")
    where += _number(value.size) + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    arguments = where + _number(0) + numbers(value.shape) + numbers(strides) + b"\x89" + hooks
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"
