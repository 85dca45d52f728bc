#include "foveal/registry.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <exception>
#include <utility>

#include "core/builtin_backends.h"
#include "core/check.h"
#include "core/registry_impl.h"
#include "foveal/version.h"

namespace foveal {

#define FOVEAL_STRINGIFY_(x) #x
#define FOVEAL_STRINGIFY(x) FOVEAL_STRINGIFY_(x)
std::string_view version() {
  return FOVEAL_STRINGIFY(FOVEAL_VERSION_MAJOR) "." FOVEAL_STRINGIFY(
      FOVEAL_VERSION_MINOR) "." FOVEAL_STRINGIFY(FOVEAL_VERSION_PATCH);
}

std::string upper_id(std::string_view id) {
  std::string upper(id);
  std::transform(upper.begin(), upper.end(), upper.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return upper;
}

BackendRegistry::Impl::Slot* BackendRegistry::Impl::find(std::string_view id) {
  const auto found =
      std::find_if(slots.begin(), slots.end(), [&](const Slot& slot) { return slot.id == id; });
  return found == slots.end() ? nullptr : &*found;
}

BackendRegistry::Impl::Slot& BackendRegistry::Impl::require(std::string_view id) {
  const std::string upper = upper_id(id);
  Slot* slot = find(upper);
  if (slot == nullptr) {
    std::vector<std::string> ids;
    for (const Slot& known : slots) {
      ids.push_back(known.id);
    }
    fail(ErrorCode::invalid_argument, "backend is '{}', it must be one of: {}", id,
         fmt::join(ids, ", "));
  }
  return *slot;
}

AttentionBackendPtr BackendRegistry::Impl::load(const std::string& id, std::string& error) {
  const Slot& before = require(id);
  if (before.backend || !before.load_error.empty()) {
    error = before.load_error;
    return before.backend;
  }
  if (before.loading) {
    error = "its factory asked for the backend that it is to make";
    return nullptr;
  }
  const Source source = before.overridden ? before.replacement : before.original;
  const std::uint64_t version = before.version;
  require(id).loading = true;
  AttentionBackendPtr backend;
  try {
    backend = source.factory ? source.factory() : load_plugin_backend(source.library, id);
    error = backend ? "" : "its factory returned null";
  } catch (const std::exception& exception) {
    error = exception.what();
  } catch (...) {
    error = "its factory threw something that is no std::exception";
  }
  Slot& after = require(id);
  after.loading = false;
  if (after.version != version) {
    return load(id, error);  // Overridden by its own factory.
  }
  after.backend = backend;
  after.load_error = error;
  return backend;
}

void BackendRegistry::Impl::add(std::string_view id, std::string_view display_name, Source source,
                                std::string_view before) {
  const std::lock_guard lock(mutex);
  const std::string upper = upper_id(id);
  check(!upper.empty() && upper != "AUTO", "id is '{}', it must be a name other than 'auto'", id);
  check(find(upper) == nullptr, "id is '{}', a backend of that id exists: override it instead",
        upper);
  Slot slot;
  slot.id = upper;
  slot.display_name = display_name;
  slot.original = std::move(source);
  if (before.empty()) {
    slots.push_back(std::move(slot));
  } else {
    const Slot& next = require(before);
    slots.insert(slots.begin() + (&next - slots.data()), std::move(slot));
  }
  ++structure;
}

void BackendRegistry::Impl::replace(std::string_view id, Source source) {
  const std::lock_guard lock(mutex);
  Slot& slot = require(id);
  slot.overridden = source.factory || !source.library.empty();
  slot.replacement = std::move(source);
  slot.backend = nullptr;
  slot.load_error.clear();
  ++slot.version;
}

BackendRegistry::BackendRegistry() : impl_(std::make_unique<Impl>()) {}
BackendRegistry::~BackendRegistry() = default;

BackendRegistry& BackendRegistry::global() {
  // Never destroyed: backends of plug-ins may be in use until the very end of the process.
  static BackendRegistry& registry = *[] {
    auto* made = new BackendRegistry;
    register_builtin_backends(*made);
    for (Impl::Slot& slot : made->impl_->slots) {
      slot.original.label = "built-in";
    }
    return made;
  }();
  return registry;
}

std::vector<BackendRegistry::Entry> BackendRegistry::entries() const {
  const std::lock_guard lock(impl_->mutex);
  std::vector<Entry> entries;
  for (const Impl::Slot& slot : impl_->slots) {
    entries.push_back({slot.id, slot.display_name,
                       (slot.overridden ? slot.replacement : slot.original).label, slot.overridden,
                       slot.backend != nullptr});
  }
  return entries;
}

bool BackendRegistry::contains(std::string_view id) const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->find(upper_id(id)) != nullptr;
}

void BackendRegistry::add(std::string_view id, std::string_view display_name,
                          BackendFactory factory, std::string_view before) {
  check(static_cast<bool>(factory), "factory of backend '{}' is empty, it must make a backend", id);
  impl_->add(id, display_name, {std::move(factory), {}, "added"}, before);
}

void BackendRegistry::add_library(std::string_view id, std::string_view display_name,
                                  std::string_view path, std::string_view before) {
  check(!path.empty(), "path of backend '{}' is empty, it must name a shared library", id);
  impl_->add(id, display_name, {{}, std::string(path), std::string(path)}, before);
}

void BackendRegistry::override_backend(std::string_view id, BackendFactory factory) {
  check(static_cast<bool>(factory), "factory of backend '{}' is empty, it must make a backend", id);
  impl_->replace(id, {std::move(factory), {}, "added"});
}

void BackendRegistry::override_with_library(std::string_view id, std::string_view path) {
  check(!path.empty(), "path of backend '{}' is empty, it must name a shared library", id);
  impl_->replace(id, {{}, std::string(path), std::string(path)});
}

void BackendRegistry::clear_override(std::string_view id) { impl_->replace(id, {}); }

AttentionBackendPtr BackendRegistry::get(std::string_view id) {
  const std::lock_guard lock(impl_->mutex);
  const std::string upper = impl_->require(id).id;
  std::string error;
  AttentionBackendPtr backend = impl_->load(upper, error);
  if (!backend) {
    fail(ErrorCode::unsupported, "backend {} cannot be loaded: {}", upper, error);
  }
  return backend;
}

}  // namespace foveal
