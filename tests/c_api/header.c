#include "foveal/foveal_c.h"

/* Structs begin as zeros, and sizes are known at compile time. */
_Static_assert(offsetof(foveal_spec, struct_size) == 0, "the size comes first");
static const foveal_forward_args kArgs = {.struct_size = sizeof kArgs};
extern size_t foveal_c_header_compiles_as_c(void);
size_t foveal_c_header_compiles_as_c(void) { return kArgs.struct_size; }
