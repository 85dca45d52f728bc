#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "foveal/registry.h"

namespace foveal {

/// What the registry and the selector share: the slots in order of preference, and the selections
/// made from them.
struct BackendRegistry::Impl {
  /// Where a backend comes from: a factory, or a shared library.
  struct Source {
    BackendFactory factory;
    std::string library;  ///< Path; used when there is no factory.
    std::string label;    ///< Entry::source.
  };
  struct Slot {
    std::string id;
    std::string display_name;
    Source original;
    Source replacement;
    bool overridden = false;
    AttentionBackendPtr backend;  ///< Null until first use.
    std::string load_error;       ///< Why loading failed; it is not tried again.
    bool loading = false;         ///< Its factory is running.
    std::uint64_t version = 0;    ///< Raised by each override.
  };
  /// A finished selection with the versions of the slots it looked at.
  struct Selection {
    AttentionBackendPtr backend;
    std::vector<std::pair<std::string, std::uint64_t>> depends_on;
    std::uint64_t structure = 0;
  };

  mutable std::recursive_mutex mutex;  ///< A factory may ask the registry for another backend.
  std::vector<Slot> slots;
  std::uint64_t structure = 0;                  ///< Raised when a backend is added.
  std::map<std::string, Selection> selections;  ///< By SelectorConfig::describe().
  std::map<std::string, bool> logged_fallbacks;

  Slot* find(std::string_view id);
  /// The slot of an id, or invalid_argument with the ids there are.
  Slot& require(std::string_view id);
  /// The backend of an id that exists, loaded if needed; null, with the reason in `error`, when it
  /// cannot be. The factory may add or override backends: no slot is held across its call.
  AttentionBackendPtr load(const std::string& id, std::string& error);
  void add(std::string_view id, std::string_view display_name, Source source,
           std::string_view before);
  void replace(std::string_view id, Source source);
};

/// Ids are upper case.
std::string upper_id(std::string_view id);

/// Opens a plug-in and makes the backend of that id; throws with the reason.
AttentionBackendPtr load_plugin_backend(const std::string& path, const std::string& id);

}  // namespace foveal
