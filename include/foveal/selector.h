#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "foveal/backend.h"
#include "foveal/export.h"
#include "foveal/spec.h"

namespace foveal {

class BackendRegistry;

/// Everything the choice of a backend depends on.
struct SelectorConfig {
  DeviceType device = DeviceType::cpu;
  int compute_capability = 0;  ///< CUDA: 10·major + minor.
  std::int64_t head_size = 0;
  std::int64_t head_size_v = 0;  ///< 0 means head_size.
  DType dtype = DType::bf16;
  std::optional<DType> kv_cache_dtype{};     ///< By default dtype.
  std::optional<std::int64_t> block_size{};  ///< Set it only when the user chose one.
  AttnType attn_type = AttnType::decoder;
  bool use_mla = false;
  bool has_sinks = false;
  bool has_sliding_window = false;
  bool has_soft_cap = false;
  bool has_alibi = false;
  bool has_custom_score = false;  ///< score_mod or mask_mod.
  bool use_non_causal = false;    ///< A decoder whose attention over the cache is bidirectional.
  bool needs_lse = false;
  GraphSupport needs_graphs = GraphSupport::never;  ///< The least support that is acceptable.
  std::int64_t decode_context_parallel_size = 1;
  std::int64_t prefill_context_parallel_size = 1;
  bool batch_invariant = false;
  /// Choose this backend or fail. Any case; "auto" or empty leaves the choice free.
  std::string backend{};

  /// What a layer of this spec asks for.
  FOVEAL_API static SelectorConfig from(const AttentionSpec& spec,
                                        DeviceType device = DeviceType::cpu,
                                        int compute_capability = 0);
  /// "device=cpu, head_size=64, …": every member, for messages.
  FOVEAL_API std::string describe() const;
};

/// One backend as the selector saw it.
struct Candidate {
  std::string id{};
  std::string display_name{};
  std::int64_t priority = 0;  ///< 0 is tried first.
  bool chosen = false;
  std::vector<std::string>
      reasons;  ///< Why it was refused, every reason; empty when it can serve the config.
};

/// How a selection came out.
struct SelectionReport {
  SelectorConfig config{};
  /// In order of preference. An explicit choice is the only one.
  std::vector<Candidate> candidates{};
  std::string chosen{};  ///< Id, or empty when none can serve.
  /// Backends of the same device that stood before the chosen one and were refused: what a fallback
  /// fell back from.
  std::vector<std::string> passed_over{};

  /// For people, one line: what was chosen, and why those before it were not.
  FOVEAL_API std::string summary() const;
  /// For people, everything, several lines.
  FOVEAL_API std::string text() const;
  /// {"config": {…}, "chosen": …, "passed_over": […], "candidates": [{"id", "display_name",
  /// "priority", "chosen", "reasons"}…]}
  FOVEAL_API std::string json() const;
};

/// The first backend in order of preference that can serve the config, or the one asked for. Cached
/// per config; overriding or adding backends drops what depended on it. A fallback (passed_over is
/// not empty) is logged once. Throws unsupported with every reason when none can, or the one asked
/// for cannot; invalid_argument for an unknown id or impossible config.
FOVEAL_API AttentionBackendPtr select_backend(const SelectorConfig& config,
                                              BackendRegistry& registry);
FOVEAL_API AttentionBackendPtr select_backend(const SelectorConfig& config);

/// The same decision with all its reasons; never throws for want of a backend.
FOVEAL_API SelectionReport explain_selection(const SelectorConfig& config,
                                             BackendRegistry& registry);
FOVEAL_API SelectionReport explain_selection(const SelectorConfig& config);

/// The kernel block size for a cache-manager block shared by layers of these backends: the
/// manager's own where all accept it, else the largest size that divides it and that all accept.
/// Throws unsupported when there is none.
FOVEAL_API std::int64_t select_kernel_block_size(std::int64_t manager_block_size,
                                                 std::span<const AttentionBackendPtr> backends);
/// The cache-manager block size to use when the user gave none: `wanted` where the backend accepts
/// it, else its smallest.
FOVEAL_API std::int64_t preferred_block_size(const AttentionBackend& backend,
                                             std::int64_t wanted = 16);

}  // namespace foveal
