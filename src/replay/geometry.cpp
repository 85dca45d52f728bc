#include "replay/geometry.h"

#include <fmt/format.h>

#include <cmath>

#include "core/check.h"

namespace foveal::replay {
namespace {

AttentionSpec gqa(std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_size) {
  AttentionSpec spec;
  spec.num_heads = num_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.head_size = head_size;
  return spec;
}

AttentionSpec windowed(AttentionSpec spec, std::int64_t tokens) {
  spec.window = Window::of_tokens(tokens);
  return spec;
}

Geometry llama() {
  return {.name = "llama-3-8b", .about = "32/8 heads of 128", .layers = {gqa(32, 8, 128)}};
}

/// The published model has no window in use; 4096 is the default of its configuration class.
Geometry qwen() {
  return {.name = "qwen3-32b",
          .about = "64/8 heads of 128, a window of 4096",
          .layers = {windowed(gqa(64, 8, 128), 4096)}};
}

/// Sinks are learned; those here are as large as scores are, and differ by head.
Geometry gpt_oss() {
  AttentionSpec spec = gqa(64, 8, 64);
  for (int head = 0; head < 64; ++head) {
    spec.sinks.push_back(0.25F * static_cast<float>(head % 16) - 1.0F);
  }
  return {.name = "gpt-oss",
          .about = "64/8 heads of 64, sinks, every other layer a window of 128",
          .layers = {windowed(spec, 128), spec}};
}

/// The scale is that of the heads before absorption, with YaRN's factor for 40 times the context:
/// m²/√192, m = 0.1·ln 40 + 1.
Geometry deepseek() {
  const MlaDims dims;
  AttentionSpec spec = gqa(128, 1, dims.cache_entry());
  spec.head_size_v = dims.kv_lora_rank;
  const double m = 0.1 * std::log(40.0) + 1.0;
  spec.scale = static_cast<float>(m * m / std::sqrt(static_cast<double>(dims.qk_head_dim())));
  spec.mla = dims;
  return {.name = "deepseek-v3",
          .about = "MLA: 128 heads of 576/512 on the latent of 512 + 64",
          .layers = {spec}};
}

Geometry gemma() {
  AttentionSpec spec = gqa(16, 8, 256);
  spec.logits_soft_cap = 50.0F;
  return {.name = "gemma-2-9b",
          .about = "16/8 heads of 256, soft cap 50, every other layer a window of 4096",
          .layers = {windowed(spec, 4096), spec}};
}

}  // namespace

const std::vector<Geometry>& geometries() {
  static const std::vector<Geometry> all = {llama(), qwen(), gpt_oss(), deepseek(), gemma()};
  return all;
}

const Geometry& find_geometry(std::string_view name) {
  std::string names;
  for (const Geometry& geometry : geometries()) {
    if (geometry.name == name) {
      return geometry;
    }
    names += (names.empty() ? "" : ", ") + geometry.name;
  }
  fail(ErrorCode::invalid_argument, "geometry is '{}', accepted are {}", name, names);
}

}  // namespace foveal::replay
