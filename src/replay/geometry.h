#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "foveal/spec.h"

namespace foveal::replay {

/// The attention of a known model.
struct Geometry {
  std::string name;
  std::string about;  ///< For people: heads, and what is special.
  /// Layers are of these kinds in turn: one, or a windowed and a full one. dtype is left at its
  /// default.
  std::vector<AttentionSpec> layers;
};

/// Of llama-3-8b, qwen3-32b, gpt-oss, deepseek-v3 and gemma-2-9b; docs/replay.md has the numbers.
const std::vector<Geometry>& geometries();

/// Throws invalid_argument, naming those there are.
const Geometry& find_geometry(std::string_view name);

}  // namespace foveal::replay
