#pragma once

#include <memory>
#include <string>
#include <vector>

#include "foveal/backend.h"
#include "foveal/execution.h"
#include "foveal/foveal_c.h"
#include "foveal/selector.h"

// What the opaque handles hold. Each keeps alive what it was made from, so that handles may be
// destroyed in any order; members are destroyed from the last to the first.

// NOLINTBEGIN(readability-identifier-naming): names are C's.
struct foveal_backend {
  foveal::AttentionBackendPtr backend;
  std::string name;
  std::string runtime;
};

struct foveal_selection {
  foveal::SelectionReport report;
  std::string summary;
  std::string text;
  std::string json;
  std::vector<std::vector<const char*>> reasons;  ///< Of each candidate.
};

struct foveal_thread_pool {
  std::shared_ptr<foveal::ThreadPool> pool;
};

struct foveal_builder {
  foveal::AttentionBackendPtr backend;
  std::shared_ptr<foveal::AttentionMetadataBuilder> builder;
};

struct foveal_metadata {
  foveal::AttentionBackendPtr backend;
  std::shared_ptr<foveal::AttentionMetadataBuilder> builder;  ///< Its scratch serves forward.
  foveal::AttentionMetadataPtr metadata;
};

/// One of the two is set.
struct foveal_layer {
  foveal::AttentionBackendPtr backend;
  std::unique_ptr<foveal::AttentionImpl> impl;
  std::unique_ptr<foveal::MlaAttentionImpl> mla;
};
// NOLINTEND(readability-identifier-naming)
