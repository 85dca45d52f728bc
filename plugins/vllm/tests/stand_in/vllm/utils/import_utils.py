import importlib


def resolve_obj_by_qualname(qualname):
    module, _, name = qualname.rpartition(".")
    return getattr(importlib.import_module(module), name)
