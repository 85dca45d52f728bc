# Warnings and sanitizers, applied to every target of this project through foveal_options.
add_library(foveal_options INTERFACE)
target_compile_options(foveal_options INTERFACE -Wall -Wextra $<$<BOOL:${FOVEAL_WERROR}>:-Werror>)
# GCC 12 sees an overlapping memcpy in every `"text" + std::string` (GCC bug 105651).
target_compile_options(foveal_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
# Several files at once need more memory than GCC expects of a file, and its collector runs again and again: 6 % of a build.
target_compile_options(foveal_options INTERFACE $<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=262144>)
if(FOVEAL_SANITIZE)
  target_compile_options(foveal_options INTERFACE -fsanitize=${FOVEAL_SANITIZE} -fno-omit-frame-pointer
                                                  -fno-sanitize-recover=all)
  target_link_options(foveal_options INTERFACE -fsanitize=${FOVEAL_SANITIZE})
endif()
