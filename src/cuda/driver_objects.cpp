#include <utility>

#include "cuda/driver.h"
#include "cuda/driver_api.h"

// Memory, streams, events and graphs.
namespace foveal::cuda {
namespace {

constexpr unsigned kNonBlockingStream = 1;
constexpr unsigned kEventWithoutTiming = 2;
constexpr int kDeviceMemory = 2;

DeviceAddress address(const void* pointer) { return reinterpret_cast<DeviceAddress>(pointer); }

/// Runs a destructor's call in the device's context. Its failure has nowhere to go: at the end of a
/// process the driver may be gone already, and an error of earlier work was or will be reported by
/// the next call.
template <typename Action>
void release(int ordinal, Action&& action) noexcept {
  try {
    const ContextGuard guard(ordinal);
    action(driver_api());
  } catch (...) {
  }
}

/// For allocations: says how many bytes were asked for.
void check_allocation(Status status, const char* call, std::size_t bytes) {
  if (status != Status::success) {
    fail_call(status, call, " (" + std::to_string(bytes) + " bytes were asked for)");
  }
}

}  // namespace

DeviceBuffer::DeviceBuffer(int ordinal, std::size_t bytes) : bytes_(bytes), ordinal_(ordinal) {
  if (bytes == 0) {
    return;
  }
  const ContextGuard guard(ordinal);
  const DriverApi& api = driver_api();
  DeviceAddress allocated = 0;
  check_allocation(api.mem_alloc.raw(&allocated, bytes), api.mem_alloc.name(), bytes);
  data_ = reinterpret_cast<void*>(allocated);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(ordinal_, other.ordinal_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) {
    release(ordinal_, [&](const DriverApi& api) { api.mem_free.raw(address(data_)); });
  }
}

PinnedBuffer::PinnedBuffer(int ordinal, std::size_t bytes) : bytes_(bytes), ordinal_(ordinal) {
  if (bytes == 0) {
    return;
  }
  const ContextGuard guard(ordinal);
  const DriverApi& api = driver_api();
  check_allocation(api.mem_host_alloc.raw(&data_, bytes, 0), api.mem_host_alloc.name(), bytes);
}

PinnedBuffer::PinnedBuffer(PinnedBuffer&& other) noexcept { *this = std::move(other); }

PinnedBuffer& PinnedBuffer::operator=(PinnedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(ordinal_, other.ordinal_);
  return *this;
}

PinnedBuffer::~PinnedBuffer() {
  if (data_ != nullptr) {
    release(ordinal_, [&](const DriverApi& api) { api.mem_free_host.raw(data_); });
  }
}

void copy_async(void* destination, const void* source, std::size_t bytes, Stream stream) {
  if (bytes != 0) {
    driver_api().memcpy_async(address(destination), address(source), bytes, stream);
  }
}

void fill_async(void* destination, std::uint8_t value, std::size_t bytes, Stream stream) {
  if (bytes != 0) {
    driver_api().memset_d8_async(address(destination), value, bytes, stream);
  }
}

void fill32_async(void* destination, std::uint32_t value, std::size_t count, Stream stream) {
  if (count != 0) {
    driver_api().memset_d32_async(address(destination), value, count, stream);
  }
}

std::optional<int> device_of(const void* pointer) {
  const DriverApi& api = driver_api();
  // Memory that the driver does not know is an invalid value to it, not a failure.
  int memory_type = 0;
  if (api.pointer_get_attribute.raw(&memory_type, PointerAttribute::memory_type,
                                    address(pointer)) != Status::success ||
      memory_type != kDeviceMemory) {
    return std::nullopt;
  }
  int ordinal = 0;
  api.pointer_get_attribute(&ordinal, PointerAttribute::device_ordinal, address(pointer));
  return ordinal;
}

std::array<std::size_t, 2> memory_info() {
  std::array<std::size_t, 2> free_and_total{};
  driver_api().mem_get_info(&free_and_total[0], &free_and_total[1]);
  return free_and_total;
}

void synchronize(Stream stream) { driver_api().stream_synchronize(stream); }

bool is_capturing(Stream stream) {
  int status = 0;
  driver_api().stream_is_capturing(stream, &status);
  return status != 0;
}

OwnedStream::OwnedStream(int ordinal) : ordinal_(ordinal) {
  const ContextGuard guard(ordinal);
  driver_api().stream_create(&stream_, kNonBlockingStream);
}

OwnedStream::~OwnedStream() {
  release(ordinal_, [&](const DriverApi& api) { api.stream_destroy.raw(stream_); });
}

Event::Event(int ordinal, bool timing) : ordinal_(ordinal) {
  const ContextGuard guard(ordinal);
  driver_api().event_create(&event_, timing ? 0 : kEventWithoutTiming);
}

Event::~Event() {
  release(ordinal_, [&](const DriverApi& api) { api.event_destroy.raw(event_); });
}

void Event::record(Stream stream) { driver_api().event_record(event_, stream); }
void Event::wait(Stream stream) { driver_api().stream_wait_event(stream, event_, 0); }
void Event::synchronize() { driver_api().event_synchronize(event_); }

float Event::elapsed_ms(Event& begin, Event& end) {
  end.synchronize();
  float milliseconds = 0;
  driver_api().event_elapsed_time(&milliseconds, begin.event_, end.event_);
  return milliseconds;
}

Graph Graph::capture(int ordinal, Stream stream, const std::function<void()>& body) {
  const ContextGuard guard(ordinal);
  const DriverApi& api = driver_api();
  api.stream_begin_capture(stream, CaptureMode::global);
  CUgraph_st* graph = nullptr;
  try {
    body();
  } catch (...) {
    api.stream_end_capture.raw(stream, &graph);
    if (graph != nullptr) {
      api.graph_destroy.raw(graph);
    }
    throw;
  }
  api.stream_end_capture(stream, &graph);
  Graph result;
  result.ordinal_ = ordinal;
  const Status status = api.graph_instantiate.raw(&result.exec_, graph, 0);
  api.graph_destroy.raw(graph);
  if (status != Status::success) {
    fail_call(status, api.graph_instantiate.name());
  }
  return result;
}

Graph::Graph(Graph&& other) noexcept { *this = std::move(other); }

Graph& Graph::operator=(Graph&& other) noexcept {
  std::swap(exec_, other.exec_);
  std::swap(ordinal_, other.ordinal_);
  return *this;
}

Graph::~Graph() {
  if (exec_ != nullptr) {
    release(ordinal_, [&](const DriverApi& api) { api.graph_exec_destroy.raw(exec_); });
  }
}

void Graph::launch(Stream stream) { driver_api().graph_launch(exec_, stream); }

}  // namespace foveal::cuda
