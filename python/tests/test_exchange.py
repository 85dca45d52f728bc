"""DLPack's exchange table of a type, as PyTorch has it, made here of ctypes: the way that needs no reference and no allocation."""

import ctypes

import naive
import numpy as np
import pytest

import foveal


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]


class Versioned(ctypes.Structure):
    pass


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(Versioned))
Versioned._fields_ = [
    ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", Deleter), ("flags", ctypes.c_uint64),
    ("tensor", DLTensor),
]
FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
ManagedFromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.POINTER(Versioned)))
Stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Table(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.c_void_p), ("allocator", ctypes.c_void_p),
        ("managed_from_object", ManagedFromObject), ("to_object", ctypes.c_void_p), ("from_object", FromObject), ("current_stream", Stream),
    ]


CALLS = {"unowned": 0, "managed": 0, "deleted": 0}
ALIVE = {}


def fill(array, out):
    value = array.value
    out.data = value.ctypes.data
    out.device_type, out.device_id, out.ndim, out.byte_offset = 1, 0, value.ndim, 0
    out.code, out.bits, out.lanes = (2 if value.dtype.kind == "f" else 0), value.itemsize * 8, 1
    array.shape_c = (ctypes.c_int64 * value.ndim)(*value.shape)
    array.strides_c = (ctypes.c_int64 * value.ndim)(*(s // value.itemsize for s in value.strides))
    out.shape, out.strides = array.shape_c, array.strides_c


@FromObject
def from_object(array, out):
    CALLS["unowned"] += 1
    fill(array, out[0])
    return 0


@Deleter
def delete(tensor):
    CALLS["deleted"] += 1
    ALIVE.pop(ctypes.addressof(tensor[0]))


@ManagedFromObject
def managed_from_object(array, out):
    CALLS["managed"] += 1
    tensor = Versioned(major=1, minor=3, deleter=delete)
    fill(array, tensor.tensor)
    ALIVE[ctypes.addressof(tensor)] = (tensor, array)
    out[0] = ctypes.pointer(tensor)
    return 0


@Stream
def current_stream(device_type, device, out):
    out[0] = None
    return 0


NEW = Table(1, 3, None, None, managed_from_object, None, from_object, current_stream)
LATER = Table(2, 0, ctypes.addressof(NEW), None, ManagedFromObject(), None, FromObject(), Stream())
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3
NAME = ctypes.create_string_buffer(b"dlpack_exchange_api")  # A capsule borrows its name.


class Exchanged:
    """An array whose type has a table of DLPack 1.3."""

    __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(NEW), ctypes.addressof(NAME), None)

    def __init__(self, value):
        self.value = value


class ExchangedLater(Exchanged):
    """A table of a later major version, which points at the older one."""

    __dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(LATER), ctypes.addressof(NAME), None)


@pytest.mark.parametrize("kind", [Exchanged, ExchangedLater])
def test_the_table_is_used(kind):
    spec = foveal.Spec(num_heads=4, num_kv_heads=2, head_size=8, dtype="f32")
    backend = foveal.select(spec)
    layer, builder = backend.make_layer(spec), backend.make_builder(spec, 16, 2)
    memory = np.zeros((2, 2, 16, 2, 8), np.float32)
    before = dict(CALLS)
    cache = backend.kv_cache(spec, kind(memory))
    assert CALLS["managed"] == before["managed"] + 1 and ALIVE
    key, value, query = naive.random(1, 3, 2, 8), naive.random(2, 3, 2, 8), naive.random(3, 3, 4, 8)
    slots = np.array([16, 17, 18])
    plan = builder.build(kind(np.array([0, 3], np.int32)), kind(np.array([3], np.int32)), block_table=kind(np.array([[1]], np.int32)))
    unowned = CALLS["unowned"]
    layer.update_kv_cache(kind(key), kind(value), cache, kind(slots))
    output, strided = np.empty((3, 4, 8), np.float32), np.zeros((4, 3, 8), np.float32).transpose(1, 0, 2)
    layer.forward(kind(query), cache, plan, kind(output))
    layer.forward(kind(query), cache, plan, kind(strided))
    assert CALLS["unowned"] == unowned + 7
    np.testing.assert_allclose(output, naive.attend(query, key, value, causal=True)[0], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(output, strided)
    del cache, plan
    assert CALLS["managed"] - before["managed"] == CALLS["deleted"] - before["deleted"] and not ALIVE
