"""The plan of a step, made once for all layers of an attention group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import foveal
import torch
import vllm.envs as envs
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

from . import choice

if TYPE_CHECKING:
    from .impl import FovealImpl


@dataclass
class FovealMetadata(AttentionMetadata):
    num_actual_tokens: int
    slot_mapping: torch.Tensor  # Cross attention puts its own here.
    causal: bool
    plans: dict[tuple[int, int], foveal.Metadata]  # One a window: a group may hold windowed layers and others.


class FovealMetadataBuilder(AttentionMetadataBuilder[FovealMetadata]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        head_size_v = getattr(kv_cache_spec, "head_size_v", None)
        if head_size_v not in (None, kv_cache_spec.head_size):
            raise NotImplementedError(
                f"head_size_v is {head_size_v} beside a head_size of {kv_cache_spec.head_size}, Foveal's vLLM backend needs them equal"
            )
        if getattr(kv_cache_spec, "rswa_window", None) is not None:
            raise NotImplementedError("rswa_window is set, Foveal has no window beside an unlimited prefix")
        self._impls: dict[int | None, FovealImpl] = {}  # One for each window of the group.
        self._num_blocks = 0
        self._builders: dict[tuple[int, int], foveal.Builder] = {}
        self._stream: torch.cuda.Stream | None = None
        self._captured: dict[tuple[int, int, bool], tuple[int, FovealMetadata]] = {}

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec) -> AttentionCGSupport:
        # A plan belongs to a longest query length, which vLLM fixes for a graph of a uniform batch only.
        return AttentionCGSupport.UNIFORM_BATCH if current_platform.is_cuda() else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> FovealMetadata:
        step = common_attn_metadata
        if isinstance(step.causal, torch.Tensor):
            raise NotImplementedError("causal is a tensor, Foveal needs the same for all requests of a step")
        if step.mm_req_doc_ranges:
            raise NotImplementedError("mm_req_doc_ranges is given, Foveal has no bidirectional spans of multimodal tokens")
        if not self._impls:
            self._find_layers()
        impl = next(iter(self._impls.values()))
        causal = step.causal and impl.attn_type == AttentionType.DECODER
        captured_query_len, _ = self._captured.get(_graph_of(step), (0, None))
        plans = {}
        with self._planning():
            for sliding_window in self._impls:
                window = choice.window_of(sliding_window, causal)
                # No host copies: on a GPU the same sizes must give the same plan, whatever the lengths, for a graph that reads it.
                plans[window] = self._builder(sliding_window, window).build(
                    step.query_start_loc,
                    step.seq_lens,
                    block_table=None if impl.plain else step.block_table_tensor,
                    num_actual_tokens=step.num_actual_tokens,
                    max_query_len=max(step.max_query_len, captured_query_len),
                    max_seq_len=step.max_seq_len,
                    causal=causal,
                    common_prefix_len=common_prefix_len,
                    fast_build=fast_build,
                )
        return FovealMetadata(step.num_actual_tokens, step.slot_mapping, causal, plans)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FovealMetadata:
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        # Held, as the graph reads the plan's memory and later steps of its sizes are planned there.
        self._captured[_graph_of(common_attn_metadata)] = (common_attn_metadata.max_query_len, metadata)
        return metadata

    def use_cascade_attention(
        self,
        common_prefix_len,
        query_lens,
        num_query_heads,
        num_kv_heads,
        use_alibi,
        use_sliding_window,
        use_local_attention,
        num_sms,
        dcp_world_size,
    ) -> bool:
        if common_prefix_len < 256 or len(query_lens) < 8 or use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1:
            return False
        # In a decode step the heads of a group read the prefix together already.
        return num_query_heads == num_kv_heads or max(query_lens) > 1

    def _find_layers(self) -> None:
        """They have their caches only after the builder was made."""
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase, self.layer_names)
        for layer in layers.values():
            self._impls.setdefault(layer.impl.sliding_window, layer.impl)
            if not layer.impl.plain:
                self._num_blocks = choice.split(layer.kv_cache)[0].shape[0]
        if not self._impls:
            raise ValueError(f"vLLM's configuration has none of the layers {self.layer_names}")

    def _builder(self, sliding_window: int | None, window: tuple[int, int]) -> foveal.Builder:
        found = self._builders.get(window)
        if found is None:
            impl = self._impls[sliding_window]
            found = self._builders[window] = impl.backend.make_builder(
                impl.spec(window),
                self.kv_cache_spec.block_size,
                self._num_blocks,
                device=self.device,
                stream=self._stream,
                max_num_tokens=self.vllm_config.scheduler_config.max_num_batched_tokens,
                batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            )
        return found

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """Foveal's builders plan on the stream of the first step. vLLM captures graphs on another."""
        current = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        if self._stream is None:
            self._stream = current
        if current == self._stream:
            yield
            return
        self._stream.wait_stream(current)
        yield
        current.wait_stream(self._stream)


def _graph_of(step: CommonAttentionMetadata) -> tuple[int, int, bool]:
    """What vLLM pads a step of a graph to."""
    return step.num_reqs, step.num_actual_tokens, step.causal
