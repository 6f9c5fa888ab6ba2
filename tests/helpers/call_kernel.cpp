// Calls a function of a library: call_kernel LIBRARY FUNCTION ARGUMENT... An argument is a file, of which a pointer to
// its bytes is given and which holds what the function wrote afterwards, "null", "i:NUMBER" or "f:NUMBER".

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

void* bytes_of(const char* path) {
  const int file = open(path, O_RDWR);
  struct stat info;
  if (file < 0 || fstat(file, &info)) return nullptr;
  return mmap(nullptr, info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
}

int main(int count, char** argument) {
  dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);  // as PyTorch's is there for the wheel's library
  void* library = dlopen(argument[1], RTLD_NOW);
  void* function = library ? dlsym(library, argument[2]) : nullptr;
  if (!function) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  // Integers and pointers have registers of their own, and so do floats: their order among each other does not matter.
  int64_t a[12] = {};
  float f[4] = {};
  for (int i = 3, integers = 0, floats = 0; i < count; ++i) {
    if (!std::strncmp(argument[i], "f:", 2)) f[floats++] = std::strtof(argument[i] + 2, nullptr);
    else if (!std::strncmp(argument[i], "i:", 2)) a[integers++] = std::strtoll(argument[i] + 2, nullptr, 10);
    else a[integers++] = std::strcmp(argument[i], "null") ? int64_t(bytes_of(argument[i])) : 0;
  }
  using Function = int (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                           int64_t, int64_t, float, float, float, float);
  reinterpret_cast<Function>(function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], f[0],
                                       f[1], f[2], f[3]);
  return 0;
}
