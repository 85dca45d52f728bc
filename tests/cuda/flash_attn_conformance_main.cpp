// The conformance suite and the closed-form cases on FLASH_ATTN. Needs a GPU; without one
// everything is skipped.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "cuda/driver.h"
#include "cuda/flash_attn_mirror.h"

int main(int argc, char** argv) {
  // First, for tests are named after it.
  setenv("FOVEAL_TEST_BACKEND", "FLASH_ATTN_MIRROR", 1);
  testing::InitGoogleTest(&argc, argv);
  if (!foveal::cuda::available()) {
    std::printf("skipped: %s\n", foveal::cuda::unavailable_reason().c_str());
    return 0;
  }
  foveal::tests::register_flash_attn_mirror();
  return RUN_ALL_TESTS();
}
