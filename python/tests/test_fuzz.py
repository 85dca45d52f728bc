"""Random argument sets: each call returns, or raises ValueError or TypeError; nothing ends the interpreter.

FOVEAL_FUZZ is the number of sets (by default 5000, seconds; 100000 was run for the release).
"""

import os
import random

import ml_dtypes
import numpy as np

import foveal

ROUNDS = int(os.environ.get("FOVEAL_FUZZ", "5000"))
INTEGERS = [0, 1, 2, 3, 4, 8, 16, -1, -(1 << 31), 1 << 31, (1 << 63) - 1, -(1 << 63), 1 << 64]
ODDITIES = [None, True, "x", "", 1.5, float("nan"), float("inf"), [], [1.0, 2.0], (1, 2), {}, b"abc", object(), int, 1 << 70, "\0", "\ud800", -0.0]
DTYPES = [np.float32] * 6 + [np.float16, np.float64, np.int32, np.int64, np.uint8, bool, complex, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
ALLOWED = (ValueError, TypeError, OverflowError, MemoryError)


class Fuzzer:
    def __init__(self, seed):
        self.random = random.Random(seed)
        # Of those made before, so that steps, caches and layers of different geometry meet.
        self.made = {kind: [] for kind in ("spec", "backend", "builder", "metadata", "cache", "layer")}

    def begin(self):
        """In every second round most arguments are good, the first of their choices, so that calls get far."""
        self.calm = self.random.random() < 0.5

    def some(self, *choices):
        return choices[0] if self.calm and self.random.random() < 0.93 else self.random.choice(choices)

    def rarely(self, odd, usual):
        return odd() if not self.calm and self.random.random() < 0.06 else usual()

    def one_of(self, *actions):
        return self.random.choice(actions)()

    def odd(self):
        return self.random.choice(ODDITIES)

    def integer(self):
        return self.rarely(self.odd, lambda: self.some(*INTEGERS))

    def array(self, *shape, dtype=None, fill=None):
        def usual():
            if self.calm and fill is None:
                return np.ones(shape, dtype)
            sizes = [s if self.random.random() > 0.04 else self.some(0, 1, 2, 5) for s in shape]
            if self.random.random() < 0.03:
                sizes = sizes[1:] if self.random.random() < 0.5 else [1, *sizes]
            value = np.ones(sizes, dtype if dtype is not None and self.random.random() > 0.05 else self.random.choice(DTYPES))
            if fill is not None and value.dtype.kind == "i":
                value[...] = np.array([fill() for _ in range(value.size)], object).reshape(value.shape).astype(np.int64)
            change = self.random.random()
            if change < 0.03 and value.ndim:
                value = value[..., ::-1]
            elif change < 0.06 and value.ndim > 1:
                value = value.swapaxes(0, 1)
            elif change < 0.08:
                value.flags.writeable = False
            elif change < 0.1 and value.ndim:
                value = np.broadcast_to(value[:1], (self.some(3, 1 << 40), *value.shape[1:]))
            return value

        return self.rarely(self.odd, usual)

    def number(self):
        return self.some(None, None, None, 0.5, -1.0, 0, 3, self.odd())

    def options(self):
        return {
            name: value
            for name, value in {
                "scale": self.number(), "window": self.some(None, 4, (2, 0), self.odd(), self.integer()), "logits_soft_cap": self.number(),
                "alibi_slopes": self.some(None, None, [0.5] * 4, self.odd()), "sinks": self.some(None, None, np.ones(4, np.float32), self.odd()),
                "stream": self.some(None, None, None, None, 0, self.odd()), "causal": self.some(True, False, False, self.odd()),
                "return_lse": self.some(True, False, False, self.odd()),
            }.items()
            if value is not None
        }

    def start(self):
        return self.some(0, 0, 2, 3, 4, -1, (1 << 31) - 1)

    def starts(self):
        return self.rarely(lambda: self.array(3, dtype=np.int32, fill=self.start), lambda: np.array(self.random.choice([[0, 2, 4], [0, 2, 3], [0, 3], [0, 0, 4], [0]]) if not self.calm else [0, 2, 4], np.int32))

    def lens(self):
        return self.array(self.some(2, 1), dtype=np.int32, fill=lambda: self.some(3, 0, 4, 17, 40, -1, 1 << 30))

    def table(self):
        return self.array(self.some(2, 1), 3, dtype=np.int32, fill=lambda: self.some(0, 1, 2, 3, 3, -1, 4, 1 << 30))

    def slots(self):
        return self.array(self.some(4, 3), dtype=np.int64, fill=lambda: self.some(16, -1, 0, 63, 64, -2, 1 << 62))

    def rows(self, heads, size=8):
        return self.array(self.some(4, 3), heads, size, dtype=np.float32)

    def object_of(self, kind):
        made = self.made[kind]
        return self.rarely(self.odd, lambda: self.random.choice(made) if made else self.odd())

    def keep(self, kind, value):
        self.made[kind] = [*self.made[kind][-7:], value]

    def spec(self):
        members = self.random.choice([
            {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "f32"},
            {"num_heads": 2, "num_kv_heads": 1, "head_size": 20, "head_size_v": 16, "scale": 0.5, "dtype": "f32", "mla": (16, 8, 4, 6)},
        ])
        changed = self.random.choice(list(members) + ["window", "sinks", "attn_type", "kv_cache_dtype", "k_scale", "kv_sharing_target", "what"])
        if self.random.random() < (0.1 if self.calm else 0.5):
            members[changed] = self.some(self.odd(), self.integer(), "bf16", "encoder", "fp8", 2.0)
        self.keep("spec", foveal.Spec(**members))

    def select(self):
        spec = self.object_of("spec")
        foveal.explain(spec, backend=self.some(None, "REFERENCE", "CPU_MLA", self.odd()))
        self.keep("backend", foveal.select(spec, device=self.some("cpu", "cpu", "cuda", self.odd()), backend=self.some(None, None, "REFERENCE", self.odd())))

    def builder(self):
        keywords = {"num_splits": self.some(0, 0, 2, self.integer()), "num_threads": self.some(0, 0, 1, self.odd(), 1 << 20), "device": self.some("cpu", "cpu", self.odd())}
        self.keep("builder", self.object_of("backend").make_builder(self.object_of("spec"), self.some(16, 16, self.integer()), self.some(4, 4, self.integer()), **keywords))

    def layout(self):
        self.object_of("backend").kv_cache_layout(self.object_of("spec"), self.some(16, self.integer()), self.some(4, self.integer()), self.some("nhd", "hnd", self.odd()))

    def build(self):
        keywords = {
            "block_table": self.some(self.table(), None), "slot_mapping": self.some(None, None, self.slots()), "causal": self.some(True, True, self.odd()),
            "key_start_loc": self.some(None, None, self.starts()), "common_prefix_len": self.some(0, 0, 0, 16, self.integer()),
            "max_query_len": self.some(None, None, self.integer()), "max_seq_len": self.some(None, None, self.integer()),
            "num_actual_tokens": self.some(None, None, self.integer()),
        }
        self.keep("metadata", self.object_of("builder").build(self.starts(), self.lens(), **keywords))

    def cache(self):
        if self.random.random() < 0.5:
            self.keep("cache", self.object_of("backend").kv_cache(self.object_of("spec"), self.array(4, 2, 16, 2, 8, dtype=np.float32)))
        else:
            views = [self.array(4, 16, 2, 8, dtype=np.float32) for _ in range(2)]
            self.keep("cache", foveal.KVCache(*self.some(views, [self.array(4, 16, 20, dtype=np.float32)])))

    def layer(self):
        self.keep("layer", self.object_of("backend").make_layer(self.object_of("spec")))

    def call_layer(self):
        layer = self.object_of("layer")
        if isinstance(layer, foveal.MlaLayer):
            self.one_of(
                lambda: layer.update_kv_cache(self.array(3, 16, dtype=np.float32), self.array(3, 4, dtype=np.float32), self.object_of("cache"), self.slots()),
                lambda: layer.forward_mha(self.rows(2, 12), self.rows(2, 12), self.rows(2, 6), self.object_of("metadata"), self.rows(2, 6)),
                lambda: layer.forward_mqa(self.rows(2, 20), self.object_of("cache"), self.object_of("metadata"), self.rows(2, 16)),
            )
        elif isinstance(layer, foveal.Layer):
            self.one_of(
                lambda: layer.update_kv_cache(self.rows(2), self.rows(2), self.object_of("cache"), self.slots()),
                lambda: layer.forward(self.rows(4), self.object_of("cache"), self.object_of("metadata"), self.rows(4), self.some(None, self.array(4, 4, dtype=np.float32))),
                lambda: layer.forward(self.rows(4), (self.rows(2), self.rows(2)), self.object_of("metadata"), self.rows(4)),
            )

    def functions(self):
        dense = lambda heads: self.array(2, 3, heads, 8, dtype=np.float32)
        self.one_of(
            lambda: foveal.attention(dense(4), dense(2), dense(2), out=self.some(None, None, dense(4)), **self.options()),
            lambda: foveal.varlen_attention(self.rows(4), self.rows(2), self.rows(2), self.starts(), self.some(None, self.starts()), **self.options()),
            lambda: foveal.paged_attention(self.rows(4), self.array(4, 2, 16, 2, 8, dtype=np.float32), self.starts(), self.lens(), self.table(), **self.options()),
            lambda: foveal.merge_states(self.rows(4), self.array(4, 3, dtype=np.float32), self.rows(4), self.array(4, 3, dtype=np.float32)),
        )


def test_random_arguments():
    fuzzer = Fuzzer(7)
    actions = [fuzzer.spec, fuzzer.select, fuzzer.builder, fuzzer.build, fuzzer.build, fuzzer.cache, fuzzer.layer, fuzzer.layout]
    actions += [fuzzer.call_layer] * 6 + [fuzzer.functions] * 6
    succeeded = {action.__name__: 0 for action in actions}
    for round_ in range(ROUNDS):
        action = fuzzer.random.choice(actions)
        fuzzer.begin()
        try:
            action()
            succeeded[action.__name__] += 1
        except AttributeError as error:  # Something else than an object of ours was asked for a method.
            assert "foveal" not in str(error), (round_, error)
        except ALLOWED as error:
            assert str(error), (round_, action)
            assert not isinstance(error, (OverflowError, MemoryError)) or "foveal" not in str(error), (round_, error)
    print(succeeded)
    assert min(succeeded.values()) > ROUNDS // 400, succeeded
