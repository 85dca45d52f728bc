#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "foveal/backend.h"
#include "foveal/export.h"
#include "foveal/selector.h"

namespace foveal {

using BackendFactory = std::function<AttentionBackendPtr()>;

/// Id → backend. A backend is made, or its shared library opened, when it is first used. The order
/// of the listing is the order of preference. Thread-safe; a
/// factory runs under the registry's lock, so it may call the registry, but must not wait for
/// another thread that does.
class FOVEAL_API BackendRegistry {
 public:
  /// The registry with the built-in backends that select_backend uses by default.
  static BackendRegistry& global();

  /// An empty registry.
  BackendRegistry();
  ~BackendRegistry();
  BackendRegistry(const BackendRegistry&) = delete;
  BackendRegistry& operator=(const BackendRegistry&) = delete;

  struct Impl;
  /// For the selector, which lives beside it.
  Impl& impl() { return *impl_; }

  struct Entry {
    std::string id;            ///< Upper case, e.g. "CPU_ATTN".
    std::string display_name;  ///< For people, e.g. "CPU flash attention".
    std::string source;        ///< "built-in", "added" or the path of the shared library.
    bool overridden = false;
    bool loaded = false;
  };
  /// In order of preference.
  std::vector<Entry> entries() const;
  bool contains(std::string_view id) const;

  /// Adds a backend behind all others, or before the one named. Ids are upper-cased. Throws
  /// invalid_argument for an id that exists (override it instead), an empty id, or an unknown
  /// `before`.
  void add(std::string_view id, std::string_view display_name, BackendFactory factory,
           std::string_view before = {});
  /// Adds a backend out of a shared library (plugin.h), opened on first use.
  void add_library(std::string_view id, std::string_view display_name, std::string_view path,
                   std::string_view before = {});
  /// Replaces what an id stands for until clear_override; selections that depended on it are made
  /// anew. Throws invalid_argument for an unknown id.
  void override_backend(std::string_view id, BackendFactory factory);
  void override_with_library(std::string_view id, std::string_view path);
  void clear_override(std::string_view id);

  /// The backend of an id, loaded now if it was not. Throws invalid_argument, listing the ids there
  /// are, when unknown; unsupported, with the reason, when it cannot be loaded.
  AttentionBackendPtr get(std::string_view id);

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace foveal
