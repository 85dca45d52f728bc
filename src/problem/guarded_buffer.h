#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "foveal/tensor.h"

namespace foveal::problem {

/// Storage of one or several tensors of a dtype that knows which of its elements a run may write,
/// and what must stand in the others. Canaries stand on both sides.
class GuardedBuffer {
 public:
  /// `elements` elements, each `fill`.
  GuardedBuffer(DType dtype, std::int64_t elements, double fill);
  GuardedBuffer(GuardedBuffer&&) = default;
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  /// Element 0, aligned to 64 bytes.
  std::byte* data() { return begin_; }
  const std::byte* data() const { return begin_; }
  TensorView view(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides,
                  std::int64_t offset = 0);

  /// Takes the content for what must be found after the run.
  void seal();
  /// The run must write `value` to the element of `view`, one of this buffer's.
  void expect(const TensorView& view, std::span<const std::int64_t> index, double value);
  /// The run may write any number to the elements of `view`.
  void allow(const TensorView& view);

  /// What the run wrote where it must not, or did not write where it must; one message for each of
  /// the first few elements. `names` are the tensors in this buffer.
  std::vector<std::string> damage(std::span<const std::pair<std::string, TensorView>> names) const;

 private:
  std::int64_t offset_of(const TensorView& view, std::span<const std::int64_t> index) const;
  std::string describe(std::int64_t offset,
                       std::span<const std::pair<std::string, TensorView>> names) const;

  DType dtype_;
  std::int64_t elements_;
  std::vector<std::byte> storage_;
  std::byte* begin_;
  std::vector<std::byte> sealed_;
  std::vector<bool> allowed_;
};

}  // namespace foveal::problem
