#pragma once

#include <cstdint>

#include "foveal/backend.h"

/// Backends in shared libraries. The library exports one C function, foveal_plugin_v1, which
/// returns a description that stays valid while the process lives; a plug-in is never unloaded. It
/// is built against the same headers as the host: the host compares abi_version and struct_size
/// before it calls anything else. examples/plugin is a whole one.
extern "C" {

/// Raised whenever a public type that crosses the boundary changes.
#define FOVEAL_PLUGIN_ABI_VERSION 1

struct FovealPlugin {
  std::uint32_t
      abi_version;  ///< FOVEAL_PLUGIN_ABI_VERSION of the headers the plug-in was built with.
  std::uint32_t struct_size;  ///< sizeof(FovealPlugin) there.
  const char* name;           ///< For messages.
  const char* version;        ///< For messages.
  /// A new backend for an id of the registry, or null when the plug-in has none of that name. Must
  /// not throw.
  const foveal::AttentionBackend* (*create_backend)(const char* id);
  void (*destroy_backend)(const foveal::AttentionBackend* backend);
};

using FovealPluginEntry = const FovealPlugin* (*)();
}

/// Name of the entry point, of type FovealPluginEntry.
#define FOVEAL_PLUGIN_ENTRY "foveal_plugin_v1"
