#include "foveal/plugin.h"

#include <dlfcn.h>

#include <string>

#include "core/check.h"
#include "core/registry_impl.h"

namespace foveal {

namespace {

const char* text(const char* string) { return string != nullptr ? string : "unnamed"; }

}  // namespace

AttentionBackendPtr load_plugin_backend(const std::string& path, const std::string& id) {
  // Never closed: code of the plug-in may still be on some thread's stack, and its types in the
  // caller's objects.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    fail(ErrorCode::io, "plug-in {} cannot be opened: {}", path,
         reason != nullptr ? reason : "unknown reason");
  }
  const auto entry = reinterpret_cast<FovealPluginEntry>(dlsym(library, FOVEAL_PLUGIN_ENTRY));
  if (entry == nullptr) {
    fail(ErrorCode::io, "plug-in {} has no function {}, which every plug-in must export", path,
         FOVEAL_PLUGIN_ENTRY);
  }
  const FovealPlugin* plugin = entry();
  if (plugin == nullptr) {
    fail(ErrorCode::io, "plug-in {}: {} returned null", path, FOVEAL_PLUGIN_ENTRY);
  }
  if (plugin->abi_version != FOVEAL_PLUGIN_ABI_VERSION ||
      plugin->struct_size != sizeof(FovealPlugin)) {
    fail(ErrorCode::unsupported,
         "plug-in {} was built for plug-in interface {} ({} bytes), this library has {} ({} "
         "bytes): build it again with "
         "this version's headers",
         path, plugin->abi_version, plugin->struct_size, FOVEAL_PLUGIN_ABI_VERSION,
         sizeof(FovealPlugin));
  }
  if (plugin->create_backend == nullptr || plugin->destroy_backend == nullptr) {
    fail(ErrorCode::io, "plug-in {}: create_backend and destroy_backend must not be null", path);
  }
  const AttentionBackend* backend = plugin->create_backend(id.c_str());
  if (backend == nullptr) {
    fail(ErrorCode::unsupported, "plug-in {} ({} {}) has no backend of the id {}", path,
         text(plugin->name), text(plugin->version), id);
  }
  return {backend, plugin->destroy_backend};
}

}  // namespace foveal
