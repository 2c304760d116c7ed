// Instruction sets that the kernels leave alone although the processor has them: PSHARD_CPU_WITHOUT names them, so that
// what another processor runs can be run and tested on this one.
#pragma once

#include <cstdlib>
#include <cstring>

namespace pshard {

// Whether a comma-separated list in the environment has this name: "avx2", "avx512", "avx512_vbmi",
// "avx512_bf16" or "amx".
inline bool is_hidden(const char* set) {
  const char* list = std::getenv("PSHARD_CPU_WITHOUT");
  const size_t length = std::strlen(set);
  while (list && *list) {
    const size_t name = std::strcspn(list, ",");
    if (name == length && !std::strncmp(list, set, length)) return true;
    list += name + (list[name] == ',');
  }
  return false;
}

}  // namespace pshard
