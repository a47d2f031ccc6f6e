"""Files of torch.save: read and written without PyTorch, and nothing of them run."""

import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from types import FunctionType
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest

from jspec.io.torch_file import TorchTensors, save_torch

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(5).astype(ml_dtypes.bfloat16),
    "half": np.ones((2, 1, 3), np.float16),
    "ids": np.array([[1, -2], [3, 2**40]]),
    "flags": np.array([True, False]),
    "scalar": np.array(2.5, np.float64),
    "none": np.zeros((0, 3), np.float32),
}


def test_written_and_read(tmp_path):
    save_torch(tmp_path / "x.pt", TENSORS | {"number": -300, "zero": 0})
    file = TorchTensors(tmp_path / "x.pt")
    assert file.numbers == {"number": -300, "zero": 0}
    assert file.shapes == {name: tensor.shape for name, tensor in TENSORS.items()}
    for name, tensor in TENSORS.items():
        assert file.read(name).dtype == tensor.dtype
        np.testing.assert_array_equal(file.read(name), tensor)


@pytest.mark.torch
def test_torch_reads_and_writes_the_same(tmp_path):
    import torch

    save_torch(tmp_path / "ours.pt", TENSORS | {"number": 7})
    theirs = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert theirs.pop("number") == 7
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(tensor.to(torch.float64).numpy(), TENSORS[name].astype(np.float64))
    torch.save(OrderedDict(theirs), tmp_path / "theirs.pt")
    file = TorchTensors(tmp_path / "theirs.pt")
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(file.read(name), tensor)


class Storage:
    """What the pickle of a tensor refers to."""

    def __init__(self, key, size):
        self.id = ("storage", sys.modules["torch"].FloatStorage, key, "cpu", size)


class Pickler(pickle._Pickler):
    # Another package (dill) adds to the table of the class it stands on: here are Python's own entries alone.
    dispatch: ClassVar = {
        kind: save for kind, save in pickle._Pickler.dispatch.items() if save.__module__ == "pickle"
    } | {
        dict: pickle._Pickler.save_dict,
        type: pickle._Pickler.save_type,
        FunctionType: pickle._Pickler.save_global,
    }

    def persistent_id(self, obj):
        return obj.id if isinstance(obj, Storage) else None


class Tensor:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return sys.modules["torch._utils"]._rebuild_tensor_v2, (*self.arguments, False, OrderedDict())


def put(path, value, data):
    with zipfile.ZipFile(path, "w") as file:
        with file.open("name/data.pkl", "w") as pickled:
            Pickler(pickled, 2).dump(value)
        for key, numbers in data.items():
            file.writestr(f"name/data/{key}", np.asarray(numbers, np.float32).tobytes())


@pytest.fixture
def torch(monkeypatch):
    """Names that a pickle may mention."""
    for name in ("torch", "torch._utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    def rebuild():
        raise AssertionError

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    sys.modules["torch._utils"]._rebuild_tensor_v2 = rebuild
    storage = type("FloatStorage", (), {"__module__": "torch"})
    sys.modules["torch"].FloatStorage = storage


def test_views_of_a_shared_storage(torch, tmp_path):
    """Transposed, and with an offset, as tied weights and slices are stored."""
    shared = Storage("0", 6)
    value = OrderedDict(a=Tensor(shared, 0, (3, 2), (1, 3)), b=Tensor(shared, 2, (2,), (2,)))
    put(tmp_path / "x.bin", value, {"0": range(6)})
    file = TorchTensors(tmp_path / "x.bin")
    np.testing.assert_array_equal(file.read("a"), [[0, 3], [1, 4], [2, 5]])
    np.testing.assert_array_equal(file.read("b"), [2, 4])


def test_a_single_tensor_and_numbers_that_are_not_there(torch, tmp_path):
    put(tmp_path / "x.pt", Tensor(Storage("0", 2), 0, (2,), (1,)), {"0": [1, 2]})
    np.testing.assert_array_equal(TorchTensors(tmp_path / "x.pt").read(""), [1, 2])
    put(tmp_path / "x.pt", {"a": Tensor(Storage("0", 2), 1, (2,), (1,))}, {"0": [1, 2]})
    with pytest.raises(ValueError, match="its numbers are not all there"):
        TorchTensors(tmp_path / "x.pt").read("a")
    put(tmp_path / "x.pt", {"a": Tensor(Storage("7", 2), 0, (2,), (1,))}, {"0": [1, 2]})
    with pytest.raises(ValueError, match="cannot read a"):
        TorchTensors(tmp_path / "x.pt").read("a")


class Call:
    def __reduce__(self):
        return print, ("run",)


def test_what_is_not_tensors_is_refused_and_not_run(torch, tmp_path, capsys):
    put(tmp_path / "x.pt", {"a": Call()}, {})
    with pytest.raises(ValueError, match=r"print, not only tensors"):
        TorchTensors(tmp_path / "x.pt")
    assert capsys.readouterr().out == ""
    put(tmp_path / "x.pt", {"a": "text"}, {})
    with pytest.raises(ValueError, match="expected a dict of tensors"):
        TorchTensors(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(pickle.dumps({}))
    with pytest.raises(ValueError, match=r"torch\.save of PyTorch 1\.6 or later"):
        TorchTensors(tmp_path / "x.pt")
