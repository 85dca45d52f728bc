"""Graphs of uniform batches as vLLM captures and replays them: on another stream than the steps', from buffers that stay."""

import pytest
import torch
from harness import Batch, Layer, Model, check, make_builder, make_cache
from vllm.config import VllmConfig
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    monkeypatch.setattr(current_platform, "device_name", "cuda")


class Runner:
    """The persistent buffers of a model runner, over one cache."""

    def __init__(self, model, max_reqs, query_len, max_seq_len):
        self.model, self.query_len, self.max_seq_len = model, query_len, max_seq_len
        config = VllmConfig()
        self.layers = [Layer(config, model, name) for name in "ab"]
        blocks = max_reqs * -(-max_seq_len // 16) + 3
        for layer in self.layers:
            layer.kv_cache = make_cache(model, blocks)
        self.builder = make_builder(config, "ab")
        on = {"device": "cuda"}
        self.starts = torch.zeros(max_reqs + 1, dtype=torch.int32, **on)
        self.lens = torch.zeros(max_reqs, dtype=torch.int32, **on)
        self.table = torch.zeros(max_reqs, max_seq_len // 16 + 3, dtype=torch.int32, **on)
        self.slots = torch.full((max_reqs * query_len,), -1, **on)
        rows = lambda heads: torch.zeros(max_reqs * query_len, heads, model.head_size, dtype=model.dtype, **on)
        self.query, self.output = rows(model.num_heads), [rows(model.num_heads) for _ in "ab"]
        self.key, self.value = rows(model.num_kv_heads), rows(model.num_kv_heads)

    def common(self, batch, reqs):
        """The batch, padded to `reqs` requests, in the buffers."""
        common = batch.metadata(extra_requests=reqs - len(batch.seq_lens), extra_tokens=reqs * self.query_len - batch.tokens)
        tokens = common.num_actual_tokens
        persistent = {"query_start_loc": (self.starts, reqs + 1), "seq_lens": (self.lens, reqs), "slot_mapping": (self.slots, tokens)}
        for name, (buffer, size) in persistent.items():
            buffer[:size] = getattr(common, name)
            setattr(common, name, buffer[:size])
        self.table[:reqs, : common.block_table_tensor.shape[1]] = common.block_table_tensor
        common.block_table_tensor = self.table[:reqs]
        for buffer, x in ((self.query, batch.query), (self.key, batch.key), (self.value, batch.value)):
            buffer[: batch.tokens] = x[: batch.tokens]
        common.max_seq_len = self.max_seq_len
        return common

    def forward(self, metadata, tokens):
        query, key, value = self.query[:tokens], self.key[:tokens], self.value[:tokens]
        for layer, output in zip(self.layers, self.output):
            layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, self.slots[:tokens])
            layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output[:tokens])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("warm", [True, False])
def test_graphs(query_len, window, kv_cache_dtype, warm):
    model = Model("cuda", torch.bfloat16, head_size=128, sliding_window=window, kv_cache_dtype=kv_cache_dtype)
    runner = Runner(model, 16, query_len, 2048)
    side, graphs = torch.cuda.Stream(), {}
    if warm:
        common = runner.common(Batch(model, [64] * 16, [query_len] * 16), 16)
        runner.forward(runner.builder.build(0, common), 16 * query_len)
    for reqs in (16, 8, 4):
        common = runner.common(Batch(model, [query_len] * reqs, [query_len] * reqs), reqs)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            metadata = runner.builder.build_for_cudagraph_capture(common)
            graphs[reqs] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[reqs], stream=side):
                runner.forward(metadata, reqs * query_len)
        torch.cuda.current_stream().wait_stream(side)
        del metadata
    others = []
    for seed in range(12):
        # Between the graphs' steps, others of all sizes, which must not take the memory of their plans.
        generator = torch.Generator().manual_seed(seed)
        runner.builder.build(0, Batch(model, [300, 40 + seed, 90], [70, 1, 30], seed=seed).metadata())
        others.append(runner.builder.build(0, Batch(model, [40 + seed], [1]).metadata()))
        present = int(torch.randint(1, 17, (1,), generator=generator))
        reqs = min(r for r in graphs if r >= present)
        seq_lens = torch.randint(query_len, 2048, (present,), generator=generator).tolist()
        # Some may have fewer queries than the graph was captured for, all of them even.
        query_lens = [max(1, query_len - 1)] * present
        if seed % 2:
            query_lens = torch.randint(1, query_len + 1, (present,), generator=generator).tolist()
        batch = Batch(model, seq_lens, query_lens, seed=seed)
        for layer in runner.layers:
            layer.kv_cache.view(torch.uint8).fill_(0x7F)
            batch.fill(layer.kv_cache)
        runner.builder.build(0, runner.common(batch, reqs))
        graphs[reqs].replay()
        for output in runner.output:
            check(output[: batch.tokens], batch.expected())
            assert (output[batch.tokens : reqs * query_len] == 0).all()


def test_no_step_waits_for_the_device():
    model = Model("cuda", torch.bfloat16, kv_cache_dtype="fp8", sinks=torch.zeros(8, dtype=torch.bfloat16, device="cuda"))
    batch = Batch(model, [300, 40], [70, 1])
    config = VllmConfig()
    layer = Layer(config, model)
    layer.kv_cache = make_cache(model, batch.num_blocks)
    batch.fill(layer.kv_cache)
    common, builder, output = batch.metadata(), make_builder(config), torch.empty_like(batch.query)

    def once():
        metadata = builder.build(0, common)
        layer.impl.do_kv_cache_update(layer, batch.key, batch.value, layer.kv_cache, common.slot_mapping)
        layer.impl.forward(layer, batch.query, batch.key, batch.value, layer.kv_cache, metadata, output)

    once()  # Makes the layer, which reads its sinks.
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(output[: batch.tokens], batch.expected())
