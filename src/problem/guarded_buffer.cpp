#include "problem/guarded_buffer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/check.h"
#include "core/convert.h"
#include "problem/problem.h"

namespace foveal::problem {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kGuardBytes = 512;
constexpr std::byte kCanary{0xA5};

/// Calls fn(index) for every index of the shape.
template <typename Fn>
void for_each_index(const TensorView& view, Fn fn) {
  if (view.numel() == 0) {
    return;
  }
  std::vector<std::int64_t> index(static_cast<std::size_t>(view.ndim()), 0);
  for (;;) {
    fn(index);
    int dim = view.ndim() - 1;
    while (dim >= 0 && ++index[static_cast<std::size_t>(dim)] == view.size(dim)) {
      index[static_cast<std::size_t>(dim--)] = 0;
    }
    if (dim < 0) {
      return;
    }
  }
}

}  // namespace

GuardedBuffer::GuardedBuffer(DType dtype, std::int64_t elements, double fill)
    : dtype_(dtype),
      elements_(elements),
      storage_(static_cast<std::size_t>(elements * size_of(dtype)) + 2 * kGuardBytes + kAlignment,
               kCanary) {
  const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
  begin_ = storage_.data() + kGuardBytes + (kAlignment - address % kAlignment) % kAlignment;
  for (std::int64_t i = 0; i < elements; ++i) {
    store_element(begin_, dtype, i, fill);
  }
}

TensorView GuardedBuffer::view(std::span<const std::int64_t> shape,
                               std::span<const std::int64_t> strides, std::int64_t offset) {
  return {begin_ + offset * size_of(dtype_), dtype_, shape, strides};
}

void GuardedBuffer::seal() {
  sealed_ = storage_;
  allowed_.assign(static_cast<std::size_t>(elements_), false);
}

std::int64_t GuardedBuffer::offset_of(const TensorView& view,
                                      std::span<const std::int64_t> index) const {
  std::int64_t offset = (static_cast<std::byte*>(view.data()) - begin_) / size_of(dtype_);
  for (std::size_t d = 0; d < index.size(); ++d) {
    offset += index[d] * view.stride(static_cast<int>(d));
  }
  return offset;
}

void GuardedBuffer::expect(const TensorView& view, std::span<const std::int64_t> index,
                           double value) {
  store_element(sealed_.data() + (begin_ - storage_.data()), dtype_, offset_of(view, index), value);
}

void GuardedBuffer::allow(const TensorView& view) {
  for_each_index(view, [&](const std::vector<std::int64_t>& index) {
    allowed_[static_cast<std::size_t>(offset_of(view, index))] = true;
  });
}

std::vector<std::string> GuardedBuffer::damage(
    std::span<const std::pair<std::string, TensorView>> names) const {
  std::vector<std::string> messages;
  const std::byte* sealed_begin = sealed_.data() + (begin_ - storage_.data());
  const auto same = [](const std::byte* a, const std::byte* b, std::ptrdiff_t bytes) {
    return bytes == 0 || std::memcmp(a, b, static_cast<std::size_t>(bytes)) == 0;
  };
  const std::string& name = names.front().first;
  const std::byte* end = begin_ + elements_ * size_of(dtype_);
  if (!same(storage_.data(), sealed_.data(), begin_ - storage_.data())) {
    messages.push_back(fmt::format("memory before {} was overwritten", name));
  }
  if (!same(end, sealed_begin + (end - begin_), storage_.data() + storage_.size() - end)) {
    messages.push_back(fmt::format("memory behind {} was overwritten", name));
  }
  std::size_t elements = 0;
  for (std::int64_t i = 0; i < elements_; ++i) {
    const std::int64_t offset = i * size_of(dtype_);
    if (allowed_[static_cast<std::size_t>(i)] ||
        same(begin_ + offset, sealed_begin + offset, size_of(dtype_))) {
      continue;
    }
    if (++elements <= kMaxMessages) {
      messages.push_back(fmt::format("{} is {}, it must be {}", describe(i, names),
                                     load_element(begin_, dtype_, i),
                                     load_element(sealed_begin, dtype_, i)));
    }
  }
  if (elements > kMaxMessages) {
    messages.push_back(fmt::format("{} more elements of {} are not as they must be",
                                   elements - kMaxMessages, name));
  }
  return messages;
}

/// "name[3, 0, 17]", or how far behind the nearest element before it.
std::string GuardedBuffer::describe(
    std::int64_t offset, std::span<const std::pair<std::string, TensorView>> names) const {
  std::string best;
  std::int64_t best_distance = std::numeric_limits<std::int64_t>::max();
  for (const auto& [name, view] : names) {
    std::int64_t rest = offset - offset_of(view, {});
    if (rest < 0 || view.numel() == 0) {
      continue;
    }
    // The outermost dimension in memory takes as much as it can.
    std::vector<int> order;
    for (int d = 0; d < view.ndim(); ++d) {
      order.push_back(d);
    }
    std::stable_sort(order.begin(), order.end(), [&strides = view](int a, int b) {
      return strides.stride(a) > strides.stride(b);
    });
    std::vector<std::int64_t> index(order.size(), 0);
    for (const int d : order) {
      if (view.stride(d) > 0) {
        const std::int64_t i = std::min(rest / view.stride(d), view.size(d) - 1);
        index[static_cast<std::size_t>(d)] = i;
        rest -= i * view.stride(d);
      }
    }
    if (rest < best_distance) {
      best_distance = rest;
      best = fmt::format("{}[{}]", name, fmt::join(index, ", "));
    }
  }
  return best_distance == 0 ? best
                            : fmt::format("padding {} elements behind {}", best_distance, best);
}

}  // namespace foveal::problem
