_layout = "NHD"


def set_kv_cache_layout(layout):
    global _layout
    _layout = layout


def get_kv_cache_layout():
    return _layout
