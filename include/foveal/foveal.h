#pragma once

/// All of Foveal's public C++ interface. foveal/dlpack.h is apart: it needs a dlpack.h.
#include "foveal/backend.h"
#include "foveal/devices.h"
#include "foveal/dtype.h"
#include "foveal/error.h"
#include "foveal/execution.h"
#include "foveal/kernels.h"
#include "foveal/metadata.h"
#include "foveal/ops.h"
#include "foveal/plugin.h"
#include "foveal/registry.h"
#include "foveal/selector.h"
#include "foveal/spec.h"
#include "foveal/tensor.h"
#include "foveal/version.h"
