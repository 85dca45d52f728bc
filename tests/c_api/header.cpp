#include "foveal/foveal_c.h"

foveal_status foveal_c_header_compiles_as_cxx(foveal_spec* spec);
foveal_status foveal_c_header_compiles_as_cxx(foveal_spec* spec) {
  return foveal_spec_init(spec, sizeof *spec);
}
