// What every kernel here shares: element types, 16-byte vectors, sums in a fixed order, launch checks.
// Only torch's stable C++ ABI is used, so a file compiles in seconds and runs with torch >= 2.11.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#include <atomic>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

using torch::stable::Tensor;
using torch::headeronly::ScalarType;

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define HD __host__ __device__ __forceinline__

using bf16 = __nv_bfloat16;
using half_t = __half;
HD float to_float(float x) { return x; }
HD float to_float(bf16 x) { return __bfloat162float(x); }
HD float to_float(half_t x) { return __half2float(x); }
template <class T> HD T from_float(float x);
template <> HD float from_float<float>(float x) { return x; }
template <> HD bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }
template <> HD half_t from_float<half_t>(float x) { return __float2half_rn(x); }
template <class T> HD float round_to(float x) { return to_float(from_float<T>(x)); }

// Element i of a gain that is float32 (masters) or of the activations' own type.
template <class T> __device__ __forceinline__ float gain(const void* w, bool w_f32, int64_t i) {
    return w_f32 ? static_cast<const float*>(w)[i] : to_float(static_cast<const T*>(w)[i]);
}

// Two neighbours at once, or one element where there is no neighbour. A product or sum is rounded once to T and never
// contracted into an fma, so it has the bits of torch's own op.
template <class T> struct PairOf;
template <> struct PairOf<float> { using type = float2; };
template <> struct PairOf<bf16> { using type = __nv_bfloat162; };
template <> struct PairOf<half_t> { using type = __half2; };
__device__ __forceinline__ float2 to_floats(float2 x) { return x; }
__device__ __forceinline__ float2 to_floats(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ __forceinline__ float2 to_floats(__half2 x) { return __half22float2(x); }
template <class P> __device__ __forceinline__ P from_floats(float x, float y);
template <> __device__ __forceinline__ float2 from_floats<float2>(float x, float y) { return {x, y}; }
template <> __device__ __forceinline__ __nv_bfloat162 from_floats<__nv_bfloat162>(float x, float y) { return __floats2bfloat162_rn(x, y); }
template <> __device__ __forceinline__ __half2 from_floats<__half2>(float x, float y) { return __floats2half2_rn(x, y); }
__device__ __forceinline__ float2 mul_rn(float2 a, float2 b) { return {__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y)}; }
__device__ __forceinline__ __nv_bfloat162 mul_rn(__nv_bfloat162 a, __nv_bfloat162 b) { return __hmul2_rn(a, b); }
__device__ __forceinline__ __half2 mul_rn(__half2 a, __half2 b) { return __hmul2_rn(a, b); }
__device__ __forceinline__ float2 add_rn(float2 a, float2 b) { return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y)}; }
__device__ __forceinline__ __nv_bfloat162 add_rn(__nv_bfloat162 a, __nv_bfloat162 b) { return __hadd2_rn(a, b); }
__device__ __forceinline__ __half2 add_rn(__half2 a, __half2 b) { return __hadd2_rn(a, b); }
__device__ __forceinline__ float2 negative(float2 a) { return {-a.x, -a.y}; }
__device__ __forceinline__ __nv_bfloat162 negative(__nv_bfloat162 a) { return __hneg2(a); }
__device__ __forceinline__ __half2 negative(__half2 a) { return __hneg2(a); }

// N elements that move as one load or store; N * sizeof(T) is 16 on the fast path. Kept packed: half the registers of floats.
template <class T, int N> struct alignas(sizeof(T) * N) Vec {
    T v[N];
    __device__ __forceinline__ float operator[](int i) const { return to_float(v[i]); }
    __device__ __forceinline__ void set(int i, float x) { v[i] = from_float<T>(x); }
    using P = typename PairOf<T>::type;
    __device__ __forceinline__ P& pair(int i) { return reinterpret_cast<P*>(v)[i]; }
    __device__ __forceinline__ const P& pair(int i) const { return reinterpret_cast<const P*>(v)[i]; }
    __device__ __forceinline__ static Vec load(const T* p) { return *reinterpret_cast<const Vec*>(p); }
    __device__ __forceinline__ void store(T* p) const { *reinterpret_cast<Vec*>(p) = *this; }
    // Makes the compiler forget that it has unpacked these already: unpacking again is cheaper than twice the registers.
    __device__ __forceinline__ void repack() {
#pragma unroll
        for (int i = 0; i < (int)(sizeof(Vec) / 4); i++) asm volatile("" : "+r"(reinterpret_cast<unsigned*>(v)[i]));
    }
    // For results that nothing reads soon: evicted first, so that they leave the cache in the order they were written.
    __device__ __forceinline__ void store_once(T* p) const {
        if constexpr (sizeof(Vec) == 16) __stcs(reinterpret_cast<int4*>(p), *reinterpret_cast<const int4*>(this));
        else store(p);
    }
};

// RMSNorm of N channels, r = 1/rms: w * round(x * r), rounded again
template <class T, int N> __device__ __forceinline__ Vec<T, N> normed(const Vec<T, N>& x, float r, const Vec<T, N>& w) {
    Vec<T, N> o;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float2 f = to_floats(x.pair(i));
        o.pair(i) = mul_rn(w.pair(i), from_floats<typename Vec<T, N>::P>(f.x * r, f.y * r));
    }
    return o;
}

// 16 bytes from global to shared memory without passing through registers; a thread waits for its own copies.
__device__ __forceinline__ void copy_async(void* smem, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(smem)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Sum over `width` neighbouring lanes (a power of two up to 32), the same tree every time; all lanes get it.
__device__ __forceinline__ float lane_sum(float x, int width) {
    for (int o = width >> 1; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    return x;
}
// Sums over `width` neighbouring lanes of N numbers at once, so that their exchanges overlap
template <int N> __device__ __forceinline__ void lane_sums(float (&x)[N], int width) {
#pragma unroll
    for (int o = 16; o; o >>= 1)
        if (o < width)
#pragma unroll
            for (int k = 0; k < N; k++) x[k] += __shfl_xor_sync(~0u, x[k], o);
}
// 1 / D as two floats, and a mean with it: as exact as a division, for one multiply-add more. (One float alone is wrong by up to half a unit of its last place, for all rows alike.)
inline float2 one_over(int64_t D) { const float hi = 1.f / D; return {hi, (float)(1. / D - hi)}; }
__device__ __forceinline__ float mean_plus(float sum, float2 one_over_D, float eps) { return fmaf(sum, one_over_D.x, fmaf(sum, one_over_D.y, eps)); }
// 1 / sqrt(m). In float32 to half a unit of the last place, where the hardware's own is off by up to two and so by more than all the rest of a row;
// a half precision does not see that.
template <class T> __device__ __forceinline__ float inverse_root(float m) {
    const float r = rsqrtf(m);
    if (sizeof(T) < 4) return r;
    const float p = __fmul_rn(m, r), e = fmaf(-fmaf(m, r, -p), r, fmaf(-p, r, 1.f));     // 1 - m * r * r, with what rounding p lost
    return e == e ? fmaf(.5f * r, e, r) : r;                                             // not of 0 or infinity
}
// Running sums of N numbers: an addition errs with the size of what it adds to, so in float32 eight turns are summed by themselves and
// the eights in double. A half precision rounds so much more at the end that plain sums do.
template <class T, int N, int EACH> struct Sums {                  // EACH: terms a turn
    float s[N] = {};
    __device__ __forceinline__ void turn() {}
    __device__ __forceinline__ float total(int i) const { return s[i]; }
};
template <int N, int EACH> struct Sums<float, N, EACH> {
    float s[N] = {};
    double all[N] = {};
    int turns = 0;
    __device__ __forceinline__ void turn() {
        if (++turns < 8 / EACH) return;
        turns = 0;
#pragma unroll
        for (int i = 0; i < N; i++) { all[i] += s[i]; s[i] = 0.f; }
    }
    __device__ __forceinline__ float total(int i) const { return (float)(all[i] + s[i]); }
};
// Sums of two numbers over the block, all threads get them; `smem` holds 64 floats and is free again after the next barrier.
__device__ __forceinline__ float2 block_sum(float2 x, float* smem) {
    x = {lane_sum(x.x, 32), lane_sum(x.y, 32)};
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    if (lane == 0) { smem[threadIdx.x >> 5] = x.x; smem[32 + (threadIdx.x >> 5)] = x.y; }
    __syncthreads();
    return {lane_sum(lane < warps ? smem[lane] : 0.f, 32), lane_sum(lane < warps ? smem[32 + lane] : 0.f, 32)};
}
__device__ __forceinline__ float block_sum(float x, float* smem) { return block_sum(make_float2(x, 0.f), smem).x; }

// dw[c] = sum over parts [parts, D], always in the same order: 32 rows of threads take every 32nd part, then one adds the 32.
template <class W> __global__ void __launch_bounds__(1024) sum_parts(const float* __restrict__ part, W* __restrict__ dw, int parts, int64_t D) {
    __shared__ double s[32][33];
    const int64_t c = blockIdx.x * 32ll + threadIdx.x;
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    double a = 0;
    if (c < D)
#pragma unroll 8
        for (int p = threadIdx.y; p < parts; p += 32) a += part[p * D + c];
    s[threadIdx.y][threadIdx.x] = a;
    __syncthreads();
    if (threadIdx.y == 0 && c < D) {
        double t = 0;
        for (int k = 0; k < 32; k++) t += s[k][threadIdx.x];
        dw[c] = from_float<W>((float)t);
    }
}

// Said by a kernel that is done, to one that `launch_after` put behind it.
__device__ __forceinline__ void done() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Of the current device
inline int of_device(cudaDeviceAttr what) {
    int dev, n;
    cudaGetDevice(&dev);
    cudaDeviceGetAttribute(&n, what, dev);
    return n;
}
// Hopper or newer, and the code that the card runs, too? That of an older one (TORCH_CUDA_ARCH_LIST=8.0+PTX) runs here as well, but neither waits (`griddepcontrol`) nor knows of clusters.
// `kernel`: any one of the library; answers by device, asked once, during the capture of a graph too.
static inline bool hopper_code(const void* kernel) {
    static std::atomic<signed char> known[64];                                 // of each device: 1 yes, -1 no
    int dev, major;
    cudaGetDevice(&dev);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, dev);
    if (major < 9) return false;
    signed char k = dev < 64 ? known[dev].load(std::memory_order_relaxed) : 0;
    if (!k) {
        cudaFuncAttributes a;
        const bool found = cudaFuncGetAttributes(&a, kernel) == cudaSuccess;
        if (!found) cudaGetLastError();
        k = !found || a.ptxVersion == 0 || a.ptxVersion >= 90 ? 1 : -1;
        if (found && dev < 64) known[dev].store(k, std::memory_order_relaxed);
    }
    return k > 0;
}
// Hopper itself, and code for it? Only there are kernels made for sm_90a more than a `__trap`.
static inline bool is_hopper(const void* kernel) { return of_device(cudaDevAttrComputeCapabilityMajor) == 9 && hopper_code(kernel); }
// Lets launches of a kernel ask for `bytes` of shared memory. Said always: what a kernel declares counts toward the 48 KiB that need no asking.
inline void allow_smem(const char* op, const void* kernel, int64_t bytes) {
    const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (e == cudaSuccess) return;
    cudaGetLastError();
    STD_TORCH_CHECK(false, op, ": ", bytes, " bytes of shared memory for a block: ", cudaGetErrorString(e));
}
// A norm's kernels read a gain in these two dtypes
inline void check_gain(const char* op, const Tensor& w, const Tensor& x) { STD_TORCH_CHECK(w.scalar_type() == ScalarType::Float || w.scalar_type() == x.scalar_type(), op, ": the gain must be float32 or of x's dtype"); }
// Launch a kernel that waits by itself (`griddepcontrol.wait`) for the one before it in the stream: its start overlaps the other's end.
template <class... P, class... A> void launch_after(void (*kernel)(P...), dim3 blocks, dim3 threads, int bytes, cudaStream_t s, A... args) { // bytes: of shared memory, asked for at run time
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t c{};
    c.gridDim = blocks; c.blockDim = threads; c.dynamicSmemBytes = bytes; c.stream = s; c.attrs = &early; c.numAttrs = hopper_code((const void*)kernel);
    cudaLaunchKernelEx(&c, kernel, static_cast<P>(args)...);
}
template <class... P, class... A> void launch_after(void (*kernel)(P...), dim3 blocks, dim3 threads, cudaStream_t s, A... args) { launch_after(kernel, blocks, threads, 0, s, args...); }
// dw = the sum over `parts` rows of `part` [parts, D], in dw's type (float32 or T)
template <class T> void reduce_parts(const void* part, void* dw, bool f32, int64_t parts, int64_t D, cudaStream_t s) {
    const dim3 blocks((unsigned)((D + 31) / 32)), threads(32, 32);
    if (f32) launch_after(sum_parts<float>, blocks, threads, s, (const float*)part, (float*)dw, (int)parts, D);
    else launch_after(sum_parts<T>, blocks, threads, s, (const float*)part, (T*)dw, (int)parts, D);
}

inline cudaStream_t stream_of(const Tensor& x) {
    void* s;
    aoti_torch_get_current_cuda_stream(x.get_device_index(), &s);
    return (cudaStream_t)s;
}
inline int sm_count() { return of_device(cudaDevAttrMultiProcessorCount); }
inline void check_launch(const char* name) {
    cudaError_t e = cudaGetLastError();
    STD_TORCH_CHECK(e == cudaSuccess, name, ": ", cudaGetErrorString(e));
}
// Blocks of a grid: an error where a launch would fail, or wrap around and leave rows out
inline unsigned grid_of(int64_t blocks, const char* name) {
    STD_TORCH_CHECK(blocks < (int64_t(1) << 31), name, ": a grid holds 2^31 - 1 rows, got ", blocks, "; call it on parts");
    return (unsigned)blocks;
}
inline bool aligned16(const void* p) { return (reinterpret_cast<uintptr_t>(p) & 15) == 0; }

// Division of a number below 2^31 by one that is known before the launch: a multiplication and a shift.
struct Divisor {
    unsigned d, mul, shift;
    Divisor(int64_t n = 1) : d((unsigned)n), shift(0) {
        while ((1ull << shift) < d) shift++;
        mul = (unsigned)(((1ull << 32) * ((1ull << shift) - d)) / d + 1);
    }
    __device__ __forceinline__ unsigned quotient(unsigned n) const { return (__umulhi(n, mul) + n) >> shift; }
};

// Run the body with `T` the CUDA type of a tensor's elements.
#define DISPATCH(type, name, ...)                                                                   \
    switch (type) {                                                                                 \
        case ScalarType::Float: { using T = float; __VA_ARGS__; break; }                            \
        case ScalarType::BFloat16: { using T = bf16; __VA_ARGS__; break; }                          \
        case ScalarType::Half: { using T = half_t; __VA_ARGS__; break; }                            \
        default: STD_TORCH_CHECK(false, name, ": dtype must be float32, bfloat16 or float16");      \
    }
#else
#define HD inline
#endif

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int pow2_at_least(int64_t n) { int p = 1; while (p < n) p <<= 1; return p; }
