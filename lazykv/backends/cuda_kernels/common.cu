// Types, 16-bit floats and helpers of all kernels; every other file is compiled behind this one.
//
// No header is included: NVRTC needs no include path then, and a C++ compiler can run the same text
// on a CPU. Everything stays right when subnormal floats are flushed (CuPy compiles so), except
// that arithmetic on subnormals gives zeros.

typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;

// Raw bits: a buffer holds nothing else.
struct f16 { u16 bits; };
struct bf16 { u16 bits; };

// A warp, and all of its lanes as the mask of a shuffle.
constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ inline float widen(f32 x) { return x; }

__device__ inline float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ inline float widen(f16 x) {
    const u32 exponent = 0x7c00u << 13, rebias = 112u << 23;
    u32 bits = (u32)(x.bits & 0x7fffu) << 13, sign = (u32)(x.bits & 0x8000u) << 16;
    u32 wide = bits + rebias;
    if ((bits & exponent) == exponent) {
        wide += rebias;  // infinity and NaN keep the highest exponent
    } else if ((bits & exponent) == 0) {
        // A subnormal: as the mantissa of 2^-14 it is a normal float, less a 2^-14 too much.
        wide = __float_as_uint(__uint_as_float(wide + (1u << 23)) - __uint_as_float(113u << 23));
    }
    return __uint_as_float(wide | sign);
}

template <class T> __device__ inline T narrow(float x);

template <> __device__ inline f32 narrow<f32>(float x) { return x; }

template <> __device__ inline bf16 narrow<bf16>(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {  // rounding could make an infinity of a NaN
        return bf16{(u16)((bits >> 16) | 0x40u)};
    }
    return bf16{(u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <> __device__ inline f16 narrow<f16>(float x) {
    u32 bits = __float_as_uint(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    u32 half;
    if (size > 0x7f800000u) {
        half = 0x7e00u;
    } else if (size >= 0x477ff000u) {  // 65520 and above is nearer to 65536, which is infinity
        half = 0x7c00u;
    } else if (size < 0x38800000u) {  // below 2^-14: at 0.5 a float's unit is the subnormal one
        half = __float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u;
    } else {
        half = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
    }
    return f16{(u16)(sign | half)};
}

// N neighbouring elements, read by one instruction; the address is a multiple of the size.
template <class T, int N> struct alignas(sizeof(T) * N) Pack { T at[N]; };

template <int N, class T> __device__ inline Pack<T, N> load(const T* p) {
    return *reinterpret_cast<const Pack<T, N>*>(p);
}

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

__device__ inline i64 least(i64 a, i64 b) { return a < b ? a : b; }

__device__ inline i64 greatest(i64 a, i64 b) { return a > b ? a : b; }

__device__ inline i64 divide_up(i64 a, i64 b) { return (a + b - 1) / b; }

// A refusal: it stays until the host clears the word.
__device__ inline void refuse(i32* error) { *error = 1; }

// The sum over all threads of a block, for every thread. `lanes` is shared, one float per warp.
__device__ inline float block_sum(float x, float* lanes) {
    for (int step = WARP / 2; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    __syncthreads();  // an earlier result may still be read
    if (threadIdx.x % WARP == 0) lanes[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0;
    for (int warp = 0; warp < (int)(blockDim.x / WARP); warp++) sum += lanes[warp];
    return sum;
}

// The maximum over all threads of a block, for every thread; NaN counts as no number.
__device__ inline float block_max(float x, float* lanes) {
    for (int step = WARP / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    __syncthreads();
    if (threadIdx.x % WARP == 0) lanes[threadIdx.x / WARP] = x;
    __syncthreads();
    float top = lanes[0];
    for (int warp = 1; warp < (int)(blockDim.x / WARP); warp++) top = fmaxf(top, lanes[warp]);
    return top;
}
