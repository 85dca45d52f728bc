#include "cuda/models.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/check.h"

namespace foveal::cuda {
namespace {

/// From the models' published configurations. A window or a "mixed" one says that some layers have
/// it and others see everything.
struct Model {
  std::string_view name;
  int num_heads, num_kv_heads, head_size;
  std::int64_t window = 0;
  bool window_in_all_layers = false;
  float soft_cap = 0;
  bool sinks = false;
  bool alibi = false;
};

constexpr std::array kModels{
    Model{.name = "gemma-2-9b",
          .num_heads = 16,
          .num_kv_heads = 8,
          .head_size = 256,
          .window = 4096,
          .soft_cap = 50},
    Model{.name = "gemma-3-27b",
          .num_heads = 32,
          .num_kv_heads = 16,
          .head_size = 128,
          .window = 1024},
    Model{.name = "gpt-oss-20b",
          .num_heads = 64,
          .num_kv_heads = 8,
          .head_size = 64,
          .window = 128,
          .sinks = true},
    Model{.name = "llama-2-7b", .num_heads = 32, .num_kv_heads = 32, .head_size = 128},
    Model{.name = "llama-3-70b", .num_heads = 64, .num_kv_heads = 8, .head_size = 128},
    Model{.name = "llama-3-8b", .num_heads = 32, .num_kv_heads = 8, .head_size = 128},
    Model{.name = "llama-3.2-1b", .num_heads = 32, .num_kv_heads = 8, .head_size = 64},
    Model{.name = "mistral-7b-v0.1",
          .num_heads = 32,
          .num_kv_heads = 8,
          .head_size = 128,
          .window = 4096,
          .window_in_all_layers = true},
    Model{.name = "mpt-7b", .num_heads = 32, .num_kv_heads = 32, .head_size = 128, .alibi = true},
    Model{.name = "phi-3-mini", .num_heads = 32, .num_kv_heads = 32, .head_size = 96},
    Model{.name = "qwen2.5-7b", .num_heads = 28, .num_kv_heads = 4, .head_size = 128},
    Model{.name = "qwen3-30b-a3b", .num_heads = 32, .num_kv_heads = 4, .head_size = 128},
    Model{.name = "qwen3-8b", .num_heads = 32, .num_kv_heads = 8, .head_size = 128},
    Model{.name = "smollm2-135m", .num_heads = 9, .num_kv_heads = 3, .head_size = 64},
    Model{.name = "stories260k", .num_heads = 8, .num_kv_heads = 4, .head_size = 8},
};

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const Model& model : kModels) {
    names.emplace_back(model.name);
  }
  return names;
}

std::vector<AttentionSpec> layers_of_model(std::string_view name) {
  const auto model = std::find_if(kModels.begin(), kModels.end(),
                                  [&](const Model& known) { return known.name == name; });
  check(model != kModels.end(), "model is '{}', known are {}", name,
        fmt::join(model_names(), ", "));
  AttentionSpec layer{.num_heads = model->num_heads,
                      .num_kv_heads = model->num_kv_heads,
                      .head_size = model->head_size,
                      .logits_soft_cap = model->soft_cap,
                      .alibi_slopes = {},
                      .sinks = {}};
  const auto heads = static_cast<std::size_t>(model->num_heads);
  if (model->sinks) {
    layer.sinks.assign(heads, 0.0F);  // The values are data, not code.
  }
  if (model->alibi) {
    layer.alibi_slopes.assign(heads, 0.5F);
  }
  std::vector<AttentionSpec> layers;
  if (!model->window_in_all_layers) {
    layers.push_back(layer);
  }
  if (model->window != 0) {
    layer.window = Window::of_tokens(model->window);
    layers.push_back(layer);
  }
  return layers;
}

}  // namespace foveal::cuda
