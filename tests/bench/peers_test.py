#!/usr/bin/env python3
"""bench/peers/peers.py with peers made of NumPy, one of them wrong. Exits with 77 where NumPy is not installed."""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest

try:
    import numpy as np
except ImportError:
    print("skipped: NumPy is not installed")
    sys.exit(77)

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "bench" / "peers"))
import peers  # noqa: E402


def row(kind, queries, causal):
    return {"kind": kind, "batch": 2, "q_len": queries, "kv_len": 7, "num_heads": 4, "num_kv_heads": 2, "head_size": 8,
            "causal": causal, "block_size": 0, "dtype": "f32", "median_us": 100.0, "tflops": 1.0, "gb_per_s": 2.0}


def attend(shape, query, key, value):
    group = shape["num_heads"] // shape["num_kv_heads"]
    key, value = (np.repeat(part, group, axis=2) for part in (key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(shape["head_size"])
    if shape["causal"]:
        seen = np.arange(shape["kv_len"]) <= shape["kv_len"] - shape["q_len"] + np.arange(shape["q_len"])[:, None]
        scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(axis=-1, keepdims=True), value)


def time_us(shape, wrong=0.0):
    query, key, value = peers.tensors(shape)
    peers.require_right(shape, query, key, value, attend(shape, query, key, value) + wrong)
    return 250.0


class Peers(unittest.TestCase):
    def test_times_are_added_and_wrong_numbers_are_not_timed(self):
        rows = [row("prefill", 7, True), row("prefill", 7, False), row("decode", 1, True), row("cache-write", 7, True),
                row("prefill", 7, True) | {"failure": "out of memory"}]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "rows.json"
            path.write_text(json.dumps({"version": "1", "machine": "m", "device": "cpu", "rows": rows,
                                        "peers": {"earlier": "2"}}))
            sys.argv = ["peers", str(path), "--threads", "2", "--out", str(path)]
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                peers.main("", lambda report, threads: (
                    {"right": f"{report['device']}, {threads} threads"}, ("prefill", "decode"),
                    {"right": time_us, "wrong": lambda shape: time_us(shape, 0.1)}))
            report = json.loads(path.read_text())
        self.assertEqual(report["peers"], {"earlier": "2", "right": "cpu, 2 threads"})
        for timed in report["rows"][:3]:
            self.assertEqual(timed["peers"]["right"], {"median_us": 250.0})
            self.assertIn("computed wrongly", timed["peers"]["wrong"]["failure"])
        for left_out in report["rows"][3:]:
            self.assertNotIn("peers", left_out)
        self.assertIn("  2.50 ", printed.getvalue())

    def test_medians(self):
        calls = []
        self.assertGreater(peers.median_us_on_cpu(lambda: calls.append(0), least=3, most=5), 0)
        self.assertEqual(len(calls), 6)


if __name__ == "__main__":
    unittest.main()
