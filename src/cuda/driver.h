#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

// The CUDA driver (libcuda.so.1), opened on first use: no toolkit is needed to build, and a machine
// without a driver just has a reason. Every function here may be called from any thread; every
// driver call is checked and a failure is an Error (device, or out_of_memory) that names the call.
namespace foveal::cuda {

/// Opaque handles of the driver's ABI.
struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUevent_st;
struct CUgraphExec_st;

/// The caller's stream (CUstream, cudaStream_t, torch.cuda.current_stream().cuda_stream). Null is
/// the legacy default stream.
using Stream = void*;

/// Whether a driver of at least 12.0 and a device are there. Loads the driver when first called.
bool available();
/// Why not, for people; empty when available.
const std::string& unavailable_reason();
/// 1000·major + 10·minor of the newest CUDA the driver knows. Throws device when not available.
int driver_version();
int device_count();

struct DeviceProperties {
  int ordinal = 0;
  std::string name{};
  int compute_capability = 0;  ///< 10·major + minor: 80, 90, 100, …
  int sm_count = 0;
  std::int64_t l2_bytes = 0;
  std::int64_t memory_bytes = 0;
  int shared_bytes_per_block = 0;  ///< The most one block may have, dynamic part opted in.
  int shared_bytes_per_sm = 0;
  int registers_per_sm = 0;
  int threads_per_sm = 0;
};

/// Of the device with this ordinal (cached). Throws invalid_argument when there is no such device.
const DeviceProperties& device_properties(int ordinal);

/// Makes the device's primary context current in this thread, and what was current again when it
/// leaves. The primary context is the one the CUDA runtime (and so PyTorch) uses: pointers, streams
/// and events pass freely between the two. It is retained on first use and never released, since a
/// host of the runtime may use it until the process ends. All functions below that take no device
/// need a guard to be in scope; it costs well under a microsecond.
class ContextGuard {
 public:
  explicit ContextGuard(int ordinal);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

// ---- Memory --------------------------------------------------------------------------------

/// Device memory of its own, 256-byte aligned. Allocation synchronises: never in a step.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(int ordinal, std::size_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  int ordinal_ = 0;
};

/// Page-locked host memory: copies from it are truly asynchronous and may be captured.
class PinnedBuffer {
 public:
  PinnedBuffer() = default;
  PinnedBuffer(int ordinal, std::size_t bytes);
  PinnedBuffer(PinnedBuffer&& other) noexcept;
  PinnedBuffer& operator=(PinnedBuffer&& other) noexcept;
  ~PinnedBuffer();

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  int ordinal_ = 0;
};

/// Any direction: the driver knows from the addresses where each side lives.
void copy_async(void* destination, const void* source, std::size_t bytes, Stream stream);
void fill_async(void* destination, std::uint8_t value, std::size_t bytes, Stream stream);
/// `count` 32-bit words; `destination` is aligned to 4.
void fill32_async(void* destination, std::uint32_t value, std::size_t count, Stream stream);
/// The ordinal of the device that owns this memory; empty for host memory the driver does not know.
std::optional<int> device_of(const void* pointer);
/// Free and total bytes of the current context's device.
std::array<std::size_t, 2> memory_info();

// ---- Streams, events, graphs ---------------------------------------------------------------

void synchronize(Stream stream);
/// Whether the stream is recording into a graph.
bool is_capturing(Stream stream);

/// A non-blocking stream of one's own (tests, benches; the library itself uses the caller's).
class OwnedStream {
 public:
  explicit OwnedStream(int ordinal);
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  Stream get() const { return stream_; }

 private:
  Stream stream_ = nullptr;
  int ordinal_ = 0;
};

class Event {
 public:
  explicit Event(int ordinal, bool timing = true);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(Stream stream);
  /// Later work of `stream` waits for what was recorded.
  void wait(Stream stream);
  void synchronize();
  /// Milliseconds between two recorded events; waits for `end`.
  static float elapsed_ms(Event& begin, Event& end);

 private:
  CUevent_st* event_ = nullptr;
  int ordinal_ = 0;
};

/// A captured and instantiated graph (tests, benches).
class Graph {
 public:
  /// Records what `body` enqueues on `stream`, which must not be the default stream. When `body`
  /// throws, the capture is ended and the exception passed on.
  static Graph capture(int ordinal, Stream stream, const std::function<void()>& body);
  Graph(Graph&& other) noexcept;
  Graph& operator=(Graph&& other) noexcept;
  ~Graph();
  void launch(Stream stream);

 private:
  Graph() = default;
  CUgraphExec_st* exec_ = nullptr;
  int ordinal_ = 0;
};

/// Lets this thread make calls that a capture elsewhere would forbid and be broken by (module
/// loading, allocation), for as long as it is in scope.
class RelaxedCaptureScope {
 public:
  RelaxedCaptureScope();
  ~RelaxedCaptureScope();
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

 private:
  int previous_mode_ = 0;
};

// ---- Modules and launches ------------------------------------------------------------------

struct FunctionAttributes {
  int registers = 0;
  int local_bytes = 0;          ///< Stack and spills of a thread.
  int static_shared_bytes = 0;  ///< Of a block.
  int max_threads = 0;          ///< The largest block that can be launched.
};

/// A loaded cubin. Unloaded with the object (which must outlive its functions).
class Module {
 public:
  Module() = default;
  Module(int ordinal, std::span<const std::byte> cubin);
  Module(Module&& other) noexcept;
  Module& operator=(Module&& other) noexcept;
  ~Module();
  /// The kernel of that name (extern "C").
  CUfunc_st* function(const std::string& name) const;

 private:
  CUmod_st* module_ = nullptr;
  int ordinal_ = 0;
};

FunctionAttributes attributes_of(CUfunc_st* function);
/// Opts in to this much dynamic shared memory for a block; needed above 48 KiB.
void set_max_dynamic_shared_bytes(CUfunc_st* function, int bytes);
/// Allows clusters of more than 8 blocks (up to 16 on Hopper).
void allow_non_portable_cluster(CUfunc_st* function);
/// Resident blocks of one SM.
int max_active_blocks_per_sm(CUfunc_st* function, int threads, int dynamic_shared_bytes);

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct LaunchConfig {
  Dim3 grid{};
  Dim3 block{};
  unsigned dynamic_shared_bytes = 0;
  Stream stream = nullptr;
  Dim3 cluster{};  ///< All 1: no cluster attribute is set.
  /// Programmatic dependent launch: the kernel may start before the one ahead of it in the stream
  /// has ended, and must itself wait with griddepcontrol.wait before it reads what that one wrote.
  bool programmatic_serialization = false;
  bool cooperative = false;
};

/// `parameters` holds one pointer to each kernel parameter. A grid with a zero dimension launches
/// nothing. Prefer launch(Kernel, …) of jit.h, which also checks the parameters' sizes.
void launch(CUfunc_st* function, const LaunchConfig& config, void** parameters);

// ---- Tensor maps (TMA, compute capability 9.0 and later) ---------------------------------------

/// The descriptor itself. Pass it by value as a `const __grid_constant__` kernel parameter, of a
/// type that is as large and as aligned in the device code.
struct alignas(128) TensorMap {
  std::array<std::uint64_t, 16> opaque{};
};

/// The driver's values.
enum class TensorMapType : int { u8 = 0, u16 = 1, i32 = 3, i64 = 5, f16 = 6, f32 = 7, bf16 = 9 };
enum class TensorMapSwizzle : int { none = 0, bytes32 = 1, bytes64 = 2, bytes128 = 3 };
enum class TensorMapL2Promotion : int { none = 0, bytes64 = 1, bytes128 = 2, bytes256 = 3 };

struct TensorMapSpec {
  TensorMapType type = TensorMapType::bf16;
  int rank = 2;                         ///< 1…5; dimension 0 is the innermost and contiguous.
  void* address = nullptr;              ///< Aligned to 16.
  std::array<std::uint64_t, 5> size{};  ///< Elements.
  std::array<std::uint64_t, 5> stride_bytes{};  ///< Of dimensions 1…; [0] is ignored.
  std::array<std::uint32_t, 5> box{};           ///< Elements copied at once, each ≤ 256.
  TensorMapSwizzle swizzle = TensorMapSwizzle::none;
  TensorMapL2Promotion l2_promotion = TensorMapL2Promotion::bytes128;
};

/// Elements outside the tensor read as zero. Host only: needs no context.
TensorMap encode_tiled(const TensorMapSpec& spec);

}  // namespace foveal::cuda
