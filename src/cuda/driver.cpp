#include "cuda/driver.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <vector>

#include "core/check.h"
#include "cuda/driver_api.h"

namespace foveal::cuda {
namespace {

// cuLaunchKernelEx is of 11.8, cuTensorMapEncodeTiled of 12.0.
constexpr int kMinDriverVersion = 12000;

struct Driver {
  std::string reason;
  int version = 0;
  std::vector<DeviceProperties> devices;
  std::deque<std::atomic<CUctx_st*>> contexts;  // one a device, null until first used
  std::mutex contexts_mutex;
};

// Nothing here is ever destroyed: kernels and buffers of other static objects may be released later
// than any order we could give.
const DriverApi& loaded_api() {
  static const DriverApi& api = *new DriverApi();
  return api;
}

std::string describe(Status status) {
  const DriverApi& api = loaded_api();
  const char* name = nullptr;
  const char* text = nullptr;
  api.get_error_name.raw(status, &name);
  api.get_error_string.raw(status, &text);
  if (name == nullptr || text == nullptr) {
    return fmt::format("error {}", static_cast<int>(status));
  }
  return fmt::format("{}: {}", name, text);
}

DeviceProperties query_device(int ordinal) {
  const DriverApi& api = loaded_api();
  int device = 0;
  api.device_get(&device, ordinal);
  const auto attribute = [&](DeviceAttribute which) {
    int value = 0;
    api.device_get_attribute(&value, which, device);
    return value;
  };
  DeviceProperties properties;
  properties.ordinal = ordinal;
  char name[256] = {};
  api.device_get_name(name, sizeof(name) - 1, device);
  properties.name = name;
  properties.compute_capability = 10 * attribute(DeviceAttribute::compute_capability_major) +
                                  attribute(DeviceAttribute::compute_capability_minor);
  properties.sm_count = attribute(DeviceAttribute::sm_count);
  properties.l2_bytes = attribute(DeviceAttribute::l2_bytes);
  std::size_t memory = 0;
  api.device_total_mem(&memory, device);
  properties.memory_bytes = static_cast<std::int64_t>(memory);
  properties.shared_bytes_per_block = attribute(DeviceAttribute::shared_bytes_per_block_optin);
  properties.shared_bytes_per_sm = attribute(DeviceAttribute::shared_bytes_per_sm);
  properties.registers_per_sm = attribute(DeviceAttribute::registers_per_sm);
  properties.threads_per_sm = attribute(DeviceAttribute::threads_per_sm);
  return properties;
}

/// Fills `driver`; what stands in the way is returned as a sentence, empty when nothing does.
std::string open_driver(Driver& driver) {
  const DriverApi& api = loaded_api();
  if (api.library.handle == nullptr) {
    return fmt::format("the CUDA driver could not be opened ({})", api.library.error);
  }
  if (!api.library.missing.empty()) {
    return fmt::format("the CUDA driver is too old: it has no {}; 12.0 or later is needed",
                       api.library.missing);
  }
  if (const Status status = api.driver_get_version.raw(&driver.version);
      status != Status::success) {
    return fmt::format("cuDriverGetVersion: {}", describe(status));
  }
  if (driver.version < kMinDriverVersion) {
    return fmt::format("the CUDA driver supports CUDA {}.{}; 12.0 or later is needed",
                       driver.version / 1000, driver.version % 1000 / 10);
  }
  if (const Status status = api.init.raw(0); status != Status::success) {
    return fmt::format("cuInit: {}", describe(status));
  }
  int count = 0;
  if (const Status status = api.device_get_count.raw(&count); status != Status::success) {
    return fmt::format("cuDeviceGetCount: {}", describe(status));
  }
  if (count == 0) {
    return "the CUDA driver finds no device";
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    driver.devices.push_back(query_device(ordinal));
    driver.contexts.emplace_back(nullptr);
  }
  return {};
}

Driver& driver() {
  static Driver& instance = []() -> Driver& {
    auto* made = new Driver();
    try {
      made->reason = open_driver(*made);
    } catch (const Error& error) {
      made->reason = error.what();
    }
    return *made;
  }();
  return instance;
}

CUctx_st* primary_context(int ordinal) {
  Driver& state = driver();
  device_properties(ordinal);  // checks the ordinal
  std::atomic<CUctx_st*>& slot = state.contexts[static_cast<std::size_t>(ordinal)];
  if (CUctx_st* context = slot.load(std::memory_order_acquire)) {
    return context;
  }
  const std::lock_guard lock(state.contexts_mutex);
  CUctx_st* context = slot.load(std::memory_order_relaxed);
  if (context == nullptr) {
    int device = 0;
    loaded_api().device_get(&device, ordinal);
    // The host of the runtime may be capturing: creating the context is none of its graph's.
    const RelaxedCaptureScope relaxed;
    loaded_api().primary_context_retain(&context, device);
    slot.store(context, std::memory_order_release);
  }
  return context;
}

}  // namespace

Library::Library(const char* name) {
  handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* text = dlerror();
    error = text != nullptr ? text : name;
  }
}

void* Library::find(const char* symbol) {
  if (handle == nullptr) {
    return nullptr;
  }
  void* address = dlsym(handle, symbol);
  if (address == nullptr && missing.empty()) {
    missing = symbol;
  }
  return address;
}

void fail_call(Status status, const char* call, const std::string& details) {
  const ErrorCode code =
      status == Status::out_of_memory ? ErrorCode::out_of_memory : ErrorCode::device;
  fail(code, "{} failed: {}{}", call, describe(status), details);
}

const DriverApi& driver_api() {
  const Driver& state = driver();
  if (!state.reason.empty()) [[unlikely]] {
    fail(ErrorCode::device, "CUDA is not available: {}", state.reason);
  }
  return loaded_api();
}

bool available() { return driver().reason.empty(); }
const std::string& unavailable_reason() { return driver().reason; }

int driver_version() {
  driver_api();
  return driver().version;
}

int device_count() {
  driver_api();
  return static_cast<int>(driver().devices.size());
}

const DeviceProperties& device_properties(int ordinal) {
  driver_api();
  const std::vector<DeviceProperties>& devices = driver().devices;
  check(ordinal >= 0 && ordinal < static_cast<int>(devices.size()),
        "device is cuda:{}, it must be one of the {} that the CUDA driver has", ordinal,
        devices.size());
  return devices[static_cast<std::size_t>(ordinal)];
}

ContextGuard::ContextGuard(int ordinal) {
  const DriverApi& api = driver_api();
  CUctx_st* context = primary_context(ordinal);
  CUctx_st* current = nullptr;
  api.context_get_current(&current);
  if (current != context) {
    api.context_push(context);
    pushed_ = true;
  }
}

ContextGuard::~ContextGuard() {
  if (pushed_) {
    CUctx_st* popped = nullptr;
    driver_api().context_pop.raw(&popped);
  }
}

RelaxedCaptureScope::RelaxedCaptureScope() {
  CaptureMode mode = CaptureMode::relaxed;
  driver_api().exchange_capture_mode(&mode);
  previous_mode_ = static_cast<int>(mode);
}

RelaxedCaptureScope::~RelaxedCaptureScope() {
  auto mode = static_cast<CaptureMode>(previous_mode_);
  driver_api().exchange_capture_mode.raw(&mode);
}

}  // namespace foveal::cuda
