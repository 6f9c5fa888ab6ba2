// GCC 11 and later call this for a vector of an absurd size; with it here a built library also loads where libstdc++ is
// older than the compiler.

#include <new>

#if defined(__GLIBCXX__)
namespace std {
__attribute__((visibility("hidden"), noreturn)) void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_alloc(); }
}  // namespace std
#endif
