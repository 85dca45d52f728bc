#!/usr/bin/env python3
"""Writes the tables of docs/support.md from what the backends say of themselves.

    scripts/support_matrix.py            writes them
    scripts/support_matrix.py --check    fails, with a diff, where the page has others

It asks the command line (`foveal info` and `foveal select`), so build that first, with CUDA; no GPU is needed.
"""

import argparse
import difflib
import json
import pathlib
import subprocess
import sys
import textwrap

CHECKOUT = pathlib.Path(__file__).resolve().parents[1]
PAGE = CHECKOUT / "docs" / "support.md"
BEGIN = "<!-- Begin of what scripts/support_matrix.py writes. -->\n"
END = "<!-- End of what scripts/support_matrix.py writes. -->\n"

# Columns of the second table: devices, as `foveal select` takes them.
DEVICES = {"CPU": ["--device", "cpu"]} | {
    f"CUDA {number // 10}.{number % 10}": ["--device", "cuda", "--compute-capability", str(number)] for number in (80, 90, 100, 120)
}

# Its rows: layers, as `foveal select` takes them. What is not named is a causal bf16 decoder with heads of 128.
MLA = ["--mla", "--head-size", "576", "--head-size-v", "512"]
LAYERS = {
    "bf16, or f16": [],
    "f32": ["--dtype", "f32"],
    "fp8 (e4m3) cache": ["--kv-cache-dtype", "f8e4m3"],
    "fp8 (e5m2) cache": ["--kv-cache-dtype", "f8e5m2"],
    "fp8 (e4m3) queries and cache": ["--dtype", "f8e4m3"],
    "fp8 (e4m3) queries, heads of 80": ["--dtype", "f8e4m3", "--head-size", "80"],
    "heads of 80": ["--head-size", "80"],
    "heads of 192, values of 128": ["--head-size", "192", "--head-size-v", "128"],
    "heads of 256": ["--head-size", "256"],
    "heads of 512": ["--head-size", "512"],
    "window, soft cap and sinks, fp8 cache": ["--sliding-window", "--soft-cap", "--sinks", "--kv-cache-dtype", "f8e4m3"],
    "ALiBi": ["--alibi"],
    "custom score or mask": ["--custom-score"],
    "bidirectional decoder": ["--non-causal"],
    "encoder without a cache": ["--attn-type", "encoder_only"],
    "cross attention": ["--attn-type", "encoder_decoder"],
    "captured in graphs": ["--graphs", "always"],
    "batch invariant": ["--batch-invariant"],
    "decode context parallelism": ["--dcp", "2"],
    "MLA": MLA,
    "MLA, fp8 (e4m3) cache": [*MLA, "--kv-cache-dtype", "f8e4m3"],
}

FEATURES = {
    "sliding_window": "sliding window",
    "soft_cap": "soft cap",
    "alibi": "ALiBi",
    "sinks": "sinks",
    "custom_score": "custom scores and masks",
    "non_causal": "bidirectional decoders",
    "lse": "log-sum-exp",
    "cascade": "cascade (shared prefix)",
    "batch_invariant": "batch invariance",
    "mla": "MLA layers, and no others",
    "decode_context_parallel": "decode context parallelism",
    "prefill_context_parallel": "prefill context parallelism",
}


def ask(foveal, *arguments):
    """What a command prints as JSON. `select` exits with 1 where no backend serves; that is an answer."""
    try:
        done = subprocess.run([foveal, *arguments, "--json"], stdout=subprocess.PIPE, text=True)
    except OSError as error:
        sys.exit(f"support_matrix.py: {error}: build the command line first, or say where it is by --foveal")
    if not done.stdout:
        sys.exit(f"support_matrix.py: {foveal} {' '.join(arguments)} failed")
    return json.loads(done.stdout)


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def yes(value):
    return "yes" if value else "–"


def capability(number):
    return f"{number // 10}.{number % 10}"


def device(backend):
    if "compute_capability" not in backend:
        return backend["device"]
    lowest, highest = (backend["compute_capability"][end] for end in ("min", "max"))
    return f"{backend['device']}, {capability(lowest)} " + (f"to {capability(highest)}" if highest else "and later")


def head_sizes(backend):
    sizes = backend["head_sizes"]
    if sizes["only"]:
        return ", ".join(map(str, sizes["only"]))
    multiples = f"multiples of {sizes['multiple_of']}" if sizes["multiple_of"] > 1 else "any"
    return multiples + (f" up to {sizes['max']}" if sizes["max"] else "")


def block_sizes(backend):
    sizes = [(f"multiples of {block['size']}" if block["multiples"] else str(block["size"])) for block in backend["block_sizes"]]
    return "any" if not sizes or "multiples of 1" in sizes else ", ".join(sizes)


def capabilities(backends):
    layers = dict.fromkeys(layer for backend in backends for layer in backend["attn_types"])
    rows = {
        "device": device,
        "chosen automatically": lambda backend: yes(backend["chosen_automatically"]),
        "dtypes": lambda backend: ", ".join(backend["dtypes"]),
        "caches, besides the dtype's own": lambda backend: ", ".join(backend["kv_cache_dtypes"]) or "–",
        "head sizes": head_sizes,
        "values of another size": lambda backend: yes(backend["head_sizes"]["different_for_values"]),
        "block sizes": block_sizes,
        "graphs": lambda backend: backend["graph_support"],
    }
    rows |= {f"`{layer}` layers": lambda backend, layer=layer: yes(layer in backend["attn_types"]) for layer in layers}
    rows |= {title: lambda backend, name=name: yes(backend["features"][name]) for name, title in FEATURES.items()}
    return table(["", *(f"`{backend['id']}`" for backend in backends)], [[title, *map(cell, backends)] for title, cell in rows.items()])


def reasons(candidate, backend):
    """Why it does not serve, but for what this machine lacks, which is also what it runs on here."""
    return [reason for reason in candidate["reasons"] if reason != backend["runtime"]]


def refusal(report, backends):
    """Why no backend of the device serves: those for such layers, MLA or not, or where there is none of these, all."""
    there = [
        (backends[candidate["id"]]["features"]["mla"], candidate["id"], reasons(candidate, backends[candidate["id"]]))
        for candidate in report["candidates"]
        if backends[candidate["id"]]["device"] == report["config"]["device"] and backends[candidate["id"]]["chosen_automatically"]
    ]
    alike = [each for each in there if each[0] == report["config"]["use_mla"]]
    return "; ".join(f"`{id}`: {', and '.join(why)}" for _, id, why in alike or there)


def served(foveal, backends):
    """The table of who serves what, and the reasons where nobody does."""
    rows, refusals = [], {}
    for layer, wanted in LAYERS.items():
        row = [layer]
        for title, where in DEVICES.items():
            report = ask(foveal, "select", *where, *wanted)
            able = [candidate["id"] for candidate in report["candidates"] if not reasons(candidate, backends[candidate["id"]])]
            row.append(able[0] if able else "–")
            if not able:
                refusals.setdefault((layer, refusal(report, backends)), []).append(title)
        rows.append(row)
    cuda = [title for title in DEVICES if title.startswith("CUDA")]
    alike = {}
    for (layer, why), titles in refusals.items():
        alike.setdefault(("CUDA" if titles == cuda else ", ".join(titles), why), []).append(layer)
    lines = ""
    for (where, why), layers in alike.items():
        lines += textwrap.fill(f"- **{'; '.join(layers)}** on {where}: {why}.", 140, subsequent_indent="  ", break_on_hyphens=False) + "\n"
    return table(["", *DEVICES], rows), lines


def generated(foveal):
    listed = ask(foveal, "info")["backends"]
    backends = {backend["id"]: backend for backend in listed}
    if not any(backend["device"] == "cuda" for backend in listed):
        sys.exit("support_matrix.py: this foveal was built without CUDA")
    who, why = served(foveal, backends)
    return f"""
## What each backend can do

{capabilities(listed)}
## Who serves a layer

{who}
Why nobody does, in the selector's words:

{why}
"""


def main():
    parser = argparse.ArgumentParser(description="Writes the tables of docs/support.md from what the backends say of themselves.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail, with a diff, where the page has other tables")
    parser.add_argument("--foveal", default=CHECKOUT / "build" / "release" / "bin" / "foveal", help="the command line to ask")
    arguments = parser.parse_args()

    page = PAGE.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"support_matrix.py: the two lines of {PAGE} between which the tables stand are gone:\n{BEGIN}{END}")
    fresh = before + begin + generated(arguments.foveal) + end + after
    if arguments.check and fresh != page:
        names = "docs/support.md", "what the backends say"
        sys.stdout.writelines(difflib.unified_diff(page.splitlines(True), fresh.splitlines(True), *names))
        sys.exit("docs/support.md is stale: run scripts/support_matrix.py")
    if not arguments.check:
        PAGE.write_text(fresh)


main()
