// One result per element of up to three operands: out = EXPR.
//
// In EXPR x, y and z are the operands' elements (f32 for the 16-bit floats), `real` and `whole`
// numbers of the call, and `index` the element's place in the result. Compiled for OUT, X, Y and Z
// (dtypes; u8 for bool, and for operands that are not there), INPUTS and EXPR.

typedef double f64;
typedef signed char i8;

constexpr int AXES = 6;

// The result is contiguous. Strides are in elements; axes from `rank` on are not looked at.
struct MapArgs {
    i64 shape[AXES];
    i64 x[AXES];
    i64 y[AXES];
    i64 z[AXES];
    i64 size;
    i64 rank;
};

struct Offsets { i64 x, y, z; };

template <class Index> __device__ Offsets offsets_of(const MapArgs& a, Index i) {
    Offsets at = {0, 0, 0};
    for (int axis = (int)a.rank - 1; axis >= 0; axis--) {
        Index extent = (Index)a.shape[axis], above = axis ? i / extent : 0;
        i64 index = (i64)(i - above * extent);
        at.x += index * a.x[axis];
        at.y += index * a.y[axis];
        at.z += index * a.z[axis];
        i = above;
    }
    return at;
}

template <class T> __device__ inline T widen(T x) { return x; }

// Conversions keep subnormals also where arithmetic flushes them: they go by bits.

__device__ inline bool is_zero(float x) { return (__float_as_uint(x) & 0x7fffffffu) == 0; }

template <class T> __device__ inline bool is_zero(T x) { return x == 0; }

__device__ inline f64 to_f64(float x) {
    u32 bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    if (size >= 0x00800000u || size == 0) return (f64)x;
    return bits >> 31 ? size * -0x1p-149 : size * 0x1p-149;
}

__device__ inline float to_f32(f64 x) {
    f64 size = x < 0 ? -x : x;
    if (!(size < 0x1p-126) || size == 0) return (float)x;
    u32 bits = (u32)(size * 0x1p149 + 0x1p52 - 0x1p52);  // to a whole number, ties to even
    return __uint_as_float(x < 0 ? bits | 0x80000000u : bits);
}

// A number as an f32 whose last bit is set if that is not exact, so that rounding to 16 bits is the
// only rounding to nearest.
__device__ inline float sticky(f64 x) {
    float near = to_f32(x);
    u32 bits = __float_as_uint(near);
    f64 found = to_f64(near);
    if (found == x || (bits & 0x7fffffffu) >= 0x7f800000u) return near;
    if (x < 0 ? found < x : found > x) bits--;
    return __uint_as_float(bits | 1u);
}

__device__ inline float sticky(i32 x) { return sticky((f64)x); }

__device__ inline float sticky(u32 x) { return sticky((f64)x); }

// Beyond 53 bits the last 11 become one first, which is set if any of them is.
__device__ inline float sticky(i64 x) {
    i64 low = x & 2047, most = 1ll << 53;
    return sticky((f64)(x >= -most && x <= most ? x : (x - low) | (low ? 2048 : 0)));
}

template <class V> __device__ inline float sticky(V x) { return (float)x; }

template <class T> struct Result {
    template <class V> __device__ static T of(V value) { return (T)value; }
};

template <> struct Result<f64> {
    template <class V> __device__ static f64 of(V value) { return (f64)value; }
    __device__ static f64 of(float value) { return to_f64(value); }
};

template <> struct Result<f32> {
    template <class V> __device__ static f32 of(V value) { return (f32)value; }
    __device__ static f32 of(f64 value) { return to_f32(value); }
};

template <class T> struct Result16 {
    template <class V> __device__ static T of(V value) { return narrow<T>(sticky(value)); }
};

template <> struct Result<f16> : Result16<f16> {};
template <> struct Result<bf16> : Result16<bf16> {};

// The remainder that is never negative, for n >= 1.
__device__ inline i64 modulo(i64 x, i64 n) { return x % n < 0 ? x % n + n : x % n; }

extern "C" __global__ void __launch_bounds__(256)
lazykv_map(OUT* __restrict__ out, const X* __restrict__ xs, const Y* __restrict__ ys,
           const Z* __restrict__ zs, f32 real, i64 whole, MapArgs a) {
    (void)xs, (void)ys, (void)zs, (void)real, (void)whole;
    i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x; index < a.size; index += step) {
        // A 64-bit division costs several 32-bit ones.
        Offsets at = a.size <= 0xffffffffll ? offsets_of(a, (u32)index) : offsets_of(a, (u64)index);
        (void)at;
#if INPUTS > 0
        auto x = widen(xs[at.x]);
#endif
#if INPUTS > 1
        auto y = widen(ys[at.y]);
#endif
#if INPUTS > 2
        auto z = widen(zs[at.z]);
#endif
        out[index] = Result<OUT>::of(EXPR);
    }
}
