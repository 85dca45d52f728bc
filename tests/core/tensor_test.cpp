#include "foveal/tensor.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <vector>

#include "foveal/dlpack.h"
#include "support/expect_error.h"

namespace foveal {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;

TEST(TensorView, ContiguousStridesAndViews) {
  std::vector<float> data(24);
  std::iota(data.begin(), data.end(), 0.0F);
  const TensorView tensor(data.data(), DType::f32, {2, 3, 4});
  EXPECT_THAT(tensor.strides(), ElementsAre(12, 4, 1));
  EXPECT_EQ(tensor.numel(), 24);
  EXPECT_TRUE(tensor.is_contiguous());

  const TensorView swapped = tensor.permute({1, 0, 2});
  EXPECT_THAT(swapped.shape(), ElementsAre(3, 2, 4));
  EXPECT_THAT(swapped.strides(), ElementsAre(4, 12, 1));
  EXPECT_FALSE(swapped.is_contiguous());

  const TensorView row = tensor.select(1, 2);
  EXPECT_THAT(row.shape(), ElementsAre(2, 4));
  EXPECT_EQ(*row.as<float>(), 8.0F);

  const TensorView part = tensor.slice(2, 1, 3);
  EXPECT_THAT(part.shape(), ElementsAre(2, 3, 2));
  EXPECT_EQ(*part.as<float>(), 1.0F);
  EXPECT_EQ(tensor.slice(0, 2, 2).numel(), 0);
  EXPECT_EQ(tensor.describe(), "f32[2, 3, 4] on cpu");
}

TEST(TensorView, AbsentAndScalar) {
  const TensorView absent;
  EXPECT_TRUE(absent.empty());
  EXPECT_EQ(absent.numel(), 0);
  EXPECT_EQ(absent.describe(), "absent");
  float value = 1.0F;
  const TensorView scalar(&value, DType::f32, std::initializer_list<std::int64_t>{});
  EXPECT_FALSE(scalar.empty());
  EXPECT_EQ(scalar.numel(), 1);
}

TEST(TensorView, SizesBeyond32Bits) {
  const TensorView huge(nullptr, DType::u8, {1LL << 33, 3});
  EXPECT_EQ(huge.numel(), 3 * (1LL << 33));
  EXPECT_EQ(huge.stride(0), 3);
}

TEST(TensorView, RefusesElementsWhoseAddressesWrapAround) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const auto view = [](std::vector<std::int64_t> shape, std::vector<std::int64_t> strides) {
    return TensorView(nullptr, DType::f32, shape, strides, Device{});
  };
  for (const std::int64_t stride : {kMost, -kMost - 1, std::int64_t{1} << 58}) {
    expect_error(
        ErrorCode::invalid_argument,
        [&] {
          view({9, 2}, {stride, 1});
        },
        "stride 0 is");
  }
  // Of one element or none the stride does not matter.
  EXPECT_EQ(view({1, 2}, {kMost, 1}).numel(), 2);
  EXPECT_EQ(view({9, 0}, {kMost, 1}).numel(), 0);
}

TEST(TensorView, RefusesWhatIsOutOfRange) {
  std::vector<float> data(6);
  const TensorView tensor(data.data(), DType::f32, {2, 3});
  const auto invalid = ErrorCode::invalid_argument;
  expect_error(
      invalid,
      [&] {
        TensorView(data.data(), DType::f32, {2, -1});
      },
      "shape is [2, -1]");
  expect_error(
      invalid,
      [&] {
        TensorView(data.data(), DType::f32, {1, 1, 1, 1, 1, 1, 1, 1, 1});
      },
      "9 dimensions", "8");
  expect_error(
      invalid, [&] { tensor.select(2, 0); }, "dim is 2", "[0, 2)");
  expect_error(
      invalid, [&] { tensor.select(1, 3); }, "index is 3", "[0, 3)");
  expect_error(
      invalid, [&] { tensor.slice(1, 2, 4); }, "[2, 4)", "[0, 3)");
  expect_error(
      invalid,
      [&] {
        tensor.permute({0, 0});
      },
      "dimension 0 twice");
  expect_error(
      invalid, [&] { tensor.permute({0}); }, "1 entries");
  expect_error(
      invalid, [&] { tensor.view_as(DType::f16); }, "dtype is f16", "4 bytes");
}

TEST(DLPack, ThereAndBack) {
  std::vector<std::uint8_t> data(64);
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2,
                            DType::f64, DType::i32, DType::i64, DType::u8}) {
    const TensorView tensor = TensorView(data.data(), dtype, {2, 3}).permute({1, 0});
    const DLPackView exported(tensor);
    EXPECT_EQ(exported.tensor.data, data.data());
    const TensorView back = from_dlpack(exported.tensor);
    EXPECT_EQ(back.dtype(), dtype);
    EXPECT_THAT(back.shape(), ElementsAre(3, 2));
    EXPECT_THAT(back.strides(), ElementsAre(1, 3));
    EXPECT_EQ(back.data(), data.data());
  }
}

TEST(DLPack, OffsetsNullStridesAndDevices) {
  std::vector<float> data(8);
  std::int64_t shape[] = {2, 3};
  DLTensor tensor{};
  tensor.data = data.data();
  tensor.device = {kDLCUDA, 1};
  tensor.ndim = 2;
  tensor.dtype = {kDLFloat, 32, 1};
  tensor.shape = shape;
  tensor.byte_offset = 8;
  const TensorView view = from_dlpack(tensor);
  EXPECT_EQ(view.data(), data.data() + 2);
  EXPECT_THAT(view.strides(), ElementsAre(3, 1));
  EXPECT_EQ(view.device(), (Device{DeviceType::cuda, 1}));
}

TEST(DLPack, RefusesByName) {
  std::int64_t shape[] = {1};
  DLTensor tensor{};
  tensor.ndim = 1;
  tensor.shape = shape;
  tensor.device = {kDLCPU, 0};
  tensor.dtype = {kDLComplex, 64, 1};
  expect_error(
      ErrorCode::unsupported, [&] { from_dlpack(tensor); }, "64 bits", "bf16");
  tensor.dtype = {kDLFloat, 32, 4};
  expect_error(
      ErrorCode::unsupported, [&] { from_dlpack(tensor); }, "4 lanes");
  tensor.dtype = {kDLFloat, 32, 1};
  tensor.device = {kDLVulkan, 0};
  expect_error(
      ErrorCode::unsupported, [&] { from_dlpack(tensor); }, "device_type is 7");
  expect_error(
      ErrorCode::invalid_argument, [] { DLPackView exported{TensorView()}; }, "absent");
}

}  // namespace
}  // namespace foveal
