from enum import Enum

from vllm.utils.import_utils import resolve_obj_by_qualname

_overrides = {}


class AttentionBackendEnum(Enum):
    CPU_ATTN = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"
    CUSTOM = None

    def get_path(self):
        path = _overrides.get(self, self.value)
        if path is None:
            raise ValueError(f"{self.name} must be registered before it is used")
        return path

    def get_class(self):
        return resolve_obj_by_qualname(self.get_path())


def register_backend(backend, class_path):
    _overrides[backend] = class_path
