"""What the scripts that time other libraries share: rows of `foveal bench --json`, numbers, times, a check, a report."""

import argparse
import json
import time

import numpy as np

# Relative errors that an output row may have, as foveal's own rows.
TOLERANCES = {"f32": 0.001, "f16": 0.005, "bf16": 0.03}


class Unsupported(Exception):
    """The library does not serve a row."""


def median_us_on_cpu(call, least=3, most=100, enough_us=300e3):
    """As CpuMachine::time() does it."""
    call()
    times = []
    while len(times) < least or (len(times) < most and sum(times) < enough_us):
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    return sorted(times)[len(times) // 2]


def tensors(row):
    """Query, key and value as float32 [batch, tokens, heads, size]: normally distributed, repeating like foveal's."""
    def tensor(heads, length, seed):
        numbers = np.random.default_rng(seed).standard_normal(1048583, dtype=np.float32)
        return np.resize(numbers, (row["batch"], length, heads, row["head_size"]))

    return (tensor(row["num_heads"], row["q_len"], 1), tensor(row["num_kv_heads"], row["kv_len"], 2),
            tensor(row["num_kv_heads"], row["kv_len"], 3))


def require_right(row, query, key, value, output):
    """Compares two rows of `output` [batch, tokens, heads, size] with the same in float64."""
    for request, token, head in ((0, 0, 0), (-1, -1, -1)):
        token %= row["q_len"]
        head %= row["num_heads"]
        seen = row["kv_len"] - row["q_len"] + token + 1 if row["causal"] else row["kv_len"]
        kv_head = head // (row["num_heads"] // row["num_kv_heads"])
        scores = key[request, :seen, kv_head].astype(np.float64) @ query[request, token, head].astype(np.float64)
        weights = np.exp((scores - scores.max()) / np.sqrt(row["head_size"]))
        expected = weights @ value[request, :seen, kv_head].astype(np.float64) / weights.sum()
        error = np.linalg.norm(output[request, token, head] - expected) / np.linalg.norm(expected)
        if not error <= TOLERANCES[row["dtype"]]:
            raise Unsupported(f"computed wrongly: a row is off by {error:.3g} of its length")


def shape_text(row):
    return (f"{row['kind']} {row['batch']} x {row['kv_len']} {row['num_heads']}/{row['num_kv_heads']} heads of "
            f"{row['head_size']} {'causal' if row['causal'] else 'full'} {row['dtype']}")


def main(description, make_peers):
    """`make_peers(report, threads)` gives versions by library, the kinds of rows, and by name of each peer a function
    (row) → µs, which raises Unsupported."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="what foveal bench --json wrote, or another of these scripts --out")
    parser.add_argument("--threads", type=int, help="CPU threads, as foveal had them; by default all")
    parser.add_argument("--out", help="write the same with the peers' times added to each row")
    options = parser.parse_args()
    with open(options.rows, encoding="utf-8") as file:
        report = json.load(file)
    versions, kinds, peers = make_peers(report, options.threads)
    report.setdefault("peers", {}).update(versions)
    print(f"foveal {report['version']} on {report['machine']}; {versions}")
    print("TFLOP/s (prefill) or GB/s (decode), and how many times as fast foveal is\n")
    print(f"{'shape':60} {'foveal':>8}" + "".join(f" {name:>8} {'ratio':>6}" for name in peers))
    done = {}  # Plain and paged rows of a shape have the same peers.
    for row in report["rows"]:
        if row["kind"] not in kinds or "failure" in row:
            continue
        rate = "gb_per_s" if row["kind"] == "decode" else "tflops"
        shape = shape_text(row)
        line = f"{shape + (' paged' if row['block_size'] else ''):60} {row[rate]:8.3g}"
        for name, time_us in peers.items():
            if (shape, name) not in done:
                try:
                    done[shape, name] = {"median_us": time_us(row)}
                except Unsupported as error:
                    done[shape, name] = {"failure": str(error)}
            peer = row.setdefault("peers", {})[name] = done[shape, name]
            if "failure" in peer:
                line += f" {'-':>8} {'-':>6}"
            else:
                ratio = peer["median_us"] / row["median_us"]
                line += f" {row[rate] / ratio:8.3g} {ratio:6.2f}"
        print(line, flush=True)
    for (shape, name), peer in done.items():
        if "failure" in peer:
            print(f"{name} on {shape}: {peer['failure']}")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")
