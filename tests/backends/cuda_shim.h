// CUDA C for a C++ compiler: what the kernels use of the language and its built-in functions.
// `cuda_shim.cpp` runs them. No standard header but one, so that a module compiles fast.

#pragma once

#include <utility>

#define __global__
#define __device__
#define __launch_bounds__(threads)
// One section for all shared variables: the linker names its ends.
#define __shared__ static __attribute__((section("shared_memory")))

struct ShimDim { unsigned x, y, z; };

extern ShimDim threadIdx, blockIdx, blockDim, gridDim;

extern "C" {
float expf(float);
float sqrtf(float);
float tanhf(float);
float fmaxf(float, float);

void shim_barrier();
float shim_exchange(float value, unsigned from_lane);
[[noreturn]] void shim_unsupported(const char* what);
int shim_launch(void (*call)(void** args), const unsigned* grid, unsigned threads, void** args,
                int flags);
}

inline void __syncthreads() { shim_barrier(); }

inline float __shfl_xor_sync(unsigned mask, float value, int with) {
    if (mask != 0xffffffffu) shim_unsupported("a shuffle of a part of a warp");
    return shim_exchange(value, threadIdx.x % 32 ^ unsigned(with));
}

inline int atomicCAS(int* address, int expected, int value) {
    int old = *address;
    if (old == expected) *address = value;
    return old;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

namespace shim {

// Arguments as cuLaunchKernel takes them: `args[i]` points to the i-th one.
template <class... Args, unsigned long... I>
void call(void (*kernel)(Args...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<Args*>(args[I])...);
}

template <class... Args> void call(void (*kernel)(Args...), void** args) {
    call(kernel, args, std::index_sequence_for<Args...>());
}

template <class T> struct Size { static constexpr int value = sizeof(T); };
template <class T> struct Size<T*> { static constexpr int value = -1; };
template <> struct Size<float> { static constexpr int value = -2; };
template <> struct Size<int> { static constexpr int value = -3; };
template <> struct Size<long long> { static constexpr int value = -4; };

template <class... Args> int kinds(void (*)(Args...), int* out) {
    int count = 0;
    ((out[count++] = Size<Args>::value), ...);
    return count;
}

}  // namespace shim

// What Python calls for a kernel: run it, and the kinds of its parameters.
#define SHIM_KERNEL(name)                                                                        \
    static void call_##name(void** args) { shim::call(name, args); }                             \
    extern "C" int run_##name(const unsigned* grid, unsigned threads, void** args, int flags) {  \
        return shim_launch(call_##name, grid, threads, args, flags);                             \
    }                                                                                            \
    extern "C" int kinds_##name(int* out) { return shim::kinds(name, out); }
