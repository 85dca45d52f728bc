"""Everything that Foveal does not do is refused by name, at selection or at construction; and what the plug-in registers."""

import pathlib

import pytest
import torch
from harness import BATCHES, Batch, Layer, Model, make_builder, make_cache, run
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import DeviceCapability, current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import foveal
import foveal_vllm
from foveal_vllm import choice
from foveal_vllm.backend import FovealBackend
from foveal_vllm.builder import FovealMetadataBuilder


@pytest.fixture
def on_cuda(monkeypatch):
    monkeypatch.setattr(current_platform, "device_name", "cuda")


def reasons(head_size=64, dtype=torch.bfloat16, **more):
    return FovealBackend.validate_configuration(head_size, dtype, **more)


@pytest.mark.parametrize("kv_cache_dtype", [None, "auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("attn_type", list(AttentionType))
def test_what_is_served(kv_cache_dtype, attn_type):
    given = {"kv_cache_dtype": kv_cache_dtype, "attn_type": attn_type, "block_size": 48}
    assert reasons(has_sink=True, use_non_causal=True, use_batch_invariant=True, use_kv_connector=True, **given) == []


@pytest.mark.parametrize(
    "given, named",
    [
        ({"head_size": 12}, "head_size is 12"),
        ({"head_size": 520}, "head_size is 520"),
        ({"dtype": torch.float64}, "dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype is f16"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype not supported"),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"use_per_head_quant_scales": True}, "per-head quant scales not supported"),
        ({"attn_type": "other"}, "attention type other not supported"),
    ],
)
def test_refused_at_selection(given, named):
    assert any(named in reason for reason in reasons(**given))


@pytest.mark.parametrize(
    "given, named",
    [
        ({"dtype": torch.float32}, "dtype is f32"),
        ({"head_size": 264}, "head_size is 264"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute_capability is 75"),
    ],
)
def test_refused_at_selection_on_cuda(on_cuda, given, named):
    assert any(named in reason for reason in reasons(**{"device_capability": DeviceCapability(9, 0), **given}))


def test_other_platforms_are_refused(monkeypatch):
    monkeypatch.setattr(current_platform, "device_name", "rocm")
    assert reasons() == ["Foveal serves vLLM on CUDA and on the CPU, not on rocm"]
    with pytest.raises(NotImplementedError, match="not on rocm"):
        Layer(VllmConfig(), Model())


@pytest.mark.parametrize(
    "given, error, named",
    [
        ({"kv_cache_dtype": "nvfp4"}, NotImplementedError, "kv_cache_dtype is nvfp4"),
        ({"kv_cache_dtype": "turboquant_4bit_nc"}, NotImplementedError, "kv_cache_dtype is turboquant_4bit_nc"),
        ({"kv_cache_dtype": "bfloat16"}, foveal.UnsupportedError, "kv_cache_dtype is bf16"),
        ({"head_size": 12}, foveal.UnsupportedError, "head_size is 12"),
        ({"alibi_slopes": [1.0]}, ValueError, "alibi_slopes"),
        ({"sinks": torch.zeros(3)}, None, None),
    ],
)
def test_refused_at_construction(given, error, named):
    if error is None:
        layer = Layer(VllmConfig(), Model(**given))
        with pytest.raises(ValueError, match="sinks"):
            layer.impl.spec((-1, -1))
        return
    model = Model(**given)
    impl_cls = FovealBackend.get_impl_cls()
    with pytest.raises(error, match=named):
        Layer(VllmConfig(), model, impl_cls=impl_cls)


def test_unknown_arguments_of_a_layer_are_refused():
    with pytest.raises(TypeError, match="use_alibi_sqrt"):
        FovealBackend.get_impl_cls()(8, 64, 0.1, use_alibi_sqrt=True)


@pytest.mark.parametrize("member, value", [("head_size_v", 32), ("rswa_window", 128)])
def test_refused_where_a_builder_is_made(member, value):
    config = VllmConfig()
    Layer(config, Model())
    with pytest.raises(NotImplementedError, match=member):
        make_builder(config, **{member: value})


@pytest.mark.parametrize("member, value", [("causal", torch.tensor([True, False])), ("mm_req_doc_ranges", {0: [(1, 3)]})])
def test_refused_in_a_step(member, value):
    config = VllmConfig()
    layer = Layer(config, Model())
    batch = Batch(layer.model, *BATCHES["small_decode"])
    layer.kv_cache = make_cache(layer.model, batch.num_blocks)
    common = batch.metadata()
    setattr(common, member, value)
    with pytest.raises(NotImplementedError, match=member):
        make_builder(config).build(0, common)


def test_steps_that_cannot_be_are_refused():
    """Foveal reads what the host can see, before anything is written."""
    config = VllmConfig()
    layer = Layer(config, Model())
    batch = Batch(layer.model, *BATCHES["small_decode"])
    layer.kv_cache = make_cache(layer.model, batch.num_blocks)
    common = batch.metadata()
    common.block_table_tensor[1, 0] = batch.num_blocks
    with pytest.raises(ValueError, match=r"block_table\[1\]\[0\] names block"):
        make_builder(config).build(0, common)


def test_a_builder_without_layers_is_refused():
    with pytest.raises(ValueError, match="none of the layers"):
        config = VllmConfig()
        layer = Layer(config, Model())
        builder = make_builder(config)
        del config.compilation_config.static_forward_context["layer"]
        builder.build(0, Batch(layer.model, [4], [1]).metadata())


def test_refused_in_forward():
    config = VllmConfig()
    layer = Layer(config, Model())
    batch = Batch(layer.model, *BATCHES["small_decode"])
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.impl.forward(layer, batch.query, batch.key, batch.value, layer.kv_cache, None, batch.query, torch.ones(1))
    layer._k_scale = torch.ones(2)
    layer.kv_cache = make_cache(layer.model, batch.num_blocks)
    common = batch.metadata()
    with pytest.raises(NotImplementedError, match="k_scale and v_scale are one a head"):
        run(layer, batch, make_builder(config).build(0, common), common)


def test_caches_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"kv_cache is \[4, 2, 16, 128\]"):
        choice.split(torch.zeros(4, 2, 16, 128))


def test_graph_support(monkeypatch):
    assert FovealMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    monkeypatch.setattr(current_platform, "device_name", "cuda")
    assert FovealMetadataBuilder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert FovealMetadataBuilder.reorder_batch_threshold is None


def test_layout():
    shape = FovealBackend.get_kv_cache_shape(1234567, 32, 8, 128)
    assert shape == (1234567, 2, 32, 8, 128)
    assert FovealBackend.indexes_kv_by_block_stride()
    try:
        utils.set_kv_cache_layout("HND")
        assert [shape[i] for i in FovealBackend.get_kv_cache_stride_order()] == [1234567, 2, 8, 32, 128]
        assert [(5, *shape)[i] for i in FovealBackend.get_kv_cache_stride_order(True)] == [1234567, 8, 5, 2, 32, 128]
    finally:
        utils.set_kv_cache_layout("NHD")
    assert not FovealBackend.forward_includes_kv_cache_update


def test_registration(monkeypatch):
    project = (pathlib.Path(foveal_vllm.__file__).parent.parent / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nfoveal = "foveal_vllm:register"' in project
    foveal_vllm.register()
    assert AttentionBackendEnum.CUSTOM.get_class() is FovealBackend
    assert AttentionBackendEnum[FovealBackend.get_name()] is AttentionBackendEnum.CUSTOM
    with set_current_vllm_config(VllmConfig(backend=AttentionBackendEnum.CUSTOM)):
        assert AttentionBackendEnum.CPU_ATTN.get_class() is FovealBackend
    for config in (None, VllmConfig()):
        with set_current_vllm_config(config):
            assert AttentionBackendEnum.CPU_ATTN.get_class().get_name() == "CPU_ATTN"
