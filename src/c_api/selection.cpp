// Version, devices, and the choice of a backend.
#include <limits>
#include <memory>
#include <utility>

#include "c_api/convert.h"
#include "c_api/errors.h"
#include "c_api/handles.h"
#include "foveal/devices.h"
#include "foveal/registry.h"

using namespace foveal;
using namespace foveal::c_api;

namespace {

/// Looked up once: handles of the driver stay what they are, and names must stay where they are.
const std::vector<DeviceInfo>& known_devices() {
  static const std::vector<DeviceInfo> found = devices();
  return found;
}

foveal_backend* new_backend(AttentionBackendPtr backend) {
  auto handle = std::make_unique<foveal_backend>();
  handle->name = backend->name();
  handle->runtime = backend->runtime();
  handle->backend = std::move(backend);
  return handle.release();
}

}  // namespace

const char* foveal_version(void) { return version().data(); }

foveal_status foveal_num_devices(int32_t* out) {
  return guarded([&] { require("out", out) = static_cast<int32_t>(known_devices().size()); });
}

foveal_status foveal_get_device(int32_t index, foveal_device_info* out) {
  return guarded([&] {
    const auto& all = known_devices();
    check(index >= 0 && index < std::ssize(all),
          "index is {}, it must be in [0, foveal_num_devices = {})", index, all.size());
    const DeviceInfo& info = all[static_cast<std::size_t>(index)];
    const auto type = info.device.type == DeviceType::cpu ? kDLCPU : kDLCUDA;
    write_struct("out", out,
                 {.struct_size = 0,
                  .device = {type, info.device.index},
                  .name = info.name.c_str(),
                  .compute_capability = info.compute_capability,
                  .memory_bytes = info.memory_bytes});
  });
}

foveal_status foveal_spec_init(foveal_spec* spec, size_t struct_size) {
  return guarded([&] {
    const AttentionSpec defaults;
    foveal_spec c{};
    c.scale = std::numeric_limits<float>::quiet_NaN();
    c.dtype = from_dtype(defaults.dtype);
    c.window_left = defaults.window.left;
    c.window_right = defaults.window.right;
    c.q_scale = defaults.scales.q;
    c.k_scale = defaults.scales.k;
    c.v_scale = defaults.scales.v;
    init_struct("spec", spec, struct_size, c);
  });
}

foveal_status foveal_selector_config_init(foveal_selector_config* config, size_t struct_size,
                                          const foveal_spec* spec, int32_t device_type,
                                          int32_t compute_capability) {
  return guarded([&] {
    const DeviceType device = to_device_type("device_type", device_type);
    SelectorConfig wanted;
    wanted.device = device;
    wanted.compute_capability = compute_capability;
    if (spec != nullptr) {
      wanted = SelectorConfig::from(to_spec("spec", spec), device, compute_capability);
    }
    init_struct("config", config, struct_size, from_selector_config(wanted));
  });
}

foveal_status foveal_select_backend(const foveal_selector_config* config, foveal_backend** out) {
  return guarded([&] {
    require("out", out);
    *out = new_backend(select_backend(to_selector_config(config)));
  });
}

foveal_status foveal_get_backend(const char* id, foveal_backend** out) {
  return guarded([&] {
    require("out", out);
    *out = new_backend(BackendRegistry::global().get(&require("id", id)));
  });
}

void foveal_backend_destroy(foveal_backend* backend) { delete backend; }

const char* foveal_backend_name(const foveal_backend* backend) {
  return backend == nullptr ? nullptr : backend->name.c_str();
}

const char* foveal_backend_runtime(const foveal_backend* backend) {
  return backend == nullptr ? nullptr : backend->runtime.c_str();
}

foveal_status foveal_add_backend_library(const char* id, const char* display_name, const char* path,
                                         const char* before) {
  return guarded([&] {
    BackendRegistry::global().add_library(&require("id", id),
                                          &require("display_name", display_name),
                                          &require("path", path), before == nullptr ? "" : before);
  });
}

foveal_status foveal_explain_selection(const foveal_selector_config* config,
                                       foveal_selection** out) {
  return guarded([&] {
    require("out", out);
    auto selection = std::make_unique<foveal_selection>();
    selection->report = explain_selection(to_selector_config(config));
    selection->summary = selection->report.summary();
    selection->text = selection->report.text();
    selection->json = selection->report.json();
    for (const Candidate& candidate : selection->report.candidates) {
      std::vector<const char*>& reasons = selection->reasons.emplace_back();
      for (const std::string& reason : candidate.reasons) {
        reasons.push_back(reason.c_str());
      }
    }
    *out = selection.release();
  });
}

void foveal_selection_destroy(foveal_selection* selection) { delete selection; }

const char* foveal_selection_chosen(const foveal_selection* selection) {
  return selection == nullptr ? nullptr : selection->report.chosen.c_str();
}

const char* foveal_selection_summary(const foveal_selection* selection) {
  return selection == nullptr ? nullptr : selection->summary.c_str();
}

const char* foveal_selection_text(const foveal_selection* selection) {
  return selection == nullptr ? nullptr : selection->text.c_str();
}

const char* foveal_selection_json(const foveal_selection* selection) {
  return selection == nullptr ? nullptr : selection->json.c_str();
}

int64_t foveal_selection_num_candidates(const foveal_selection* selection) {
  return selection == nullptr ? -1 : std::ssize(selection->report.candidates);
}

foveal_status foveal_selection_candidate(const foveal_selection* selection, int64_t index,
                                         foveal_candidate* out) {
  return guarded([&] {
    const auto& candidates = require("selection", selection).report.candidates;
    check(index >= 0 && index < std::ssize(candidates),
          "index is {}, it must be in [0, foveal_selection_num_candidates = {})", index,
          candidates.size());
    const auto i = static_cast<std::size_t>(index);
    const Candidate& candidate = candidates[i];
    write_struct("out", out,
                 {.struct_size = 0,
                  .id = candidate.id.c_str(),
                  .display_name = candidate.display_name.c_str(),
                  .priority = candidate.priority,
                  .chosen = candidate.chosen,
                  .reasons = selection->reasons[i].data(),
                  .num_reasons = std::ssize(selection->reasons[i])});
  });
}
