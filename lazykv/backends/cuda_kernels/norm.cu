// Rows reduced by one block each, in f32: rms_norm and softmax over the last axis.
//
// ELEMENT is the dtype of every array. The elements of a row are neighbours; rows of x lie `step`
// elements apart, those of the result side by side.

// x / sqrt(mean(x**2) + eps) * weight
extern "C" __global__ void __launch_bounds__(256)
lazykv_rms_norm(ELEMENT* __restrict__ out, const ELEMENT* __restrict__ x,
                const ELEMENT* __restrict__ weight, i64 rows, i64 width, i64 step, f32 eps) {
    __shared__ float lanes[256 / WARP];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const ELEMENT* from = x + row * step;
        float square = 0;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            float a = widen(from[i]);
            square += a * a;
        }
        float scale = 1 / sqrtf(block_sum(square, lanes) / (float)width + eps);
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            out[row * width + i] = narrow<ELEMENT>(widen(from[i]) * scale * widen(weight[i]));
        }
    }
}

// exp(x - max) / sum(exp(x - max)); a row of -inf only becomes zeros.
extern "C" __global__ void __launch_bounds__(256)
lazykv_softmax(ELEMENT* __restrict__ out, const ELEMENT* __restrict__ x, i64 rows, i64 width,
               i64 step) {
    __shared__ float lanes[256 / WARP];
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const ELEMENT* from = x + row * step;
        float top = minus_infinity();
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) top = fmaxf(top, widen(from[i]));
        top = block_max(top, lanes);
        if (top == minus_infinity()) top = 0;  // -inf - -inf would be NaN
        float sum = 0;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) sum += expf(widen(from[i]) - top);
        sum = block_sum(sum, lanes);
        if (sum == 0) sum = 1;
        for (i64 i = threadIdx.x; i < width; i += blockDim.x) {
            out[row * width + i] = narrow<ELEMENT>(expf(widen(from[i]) - top) / sum);
        }
    }
}
