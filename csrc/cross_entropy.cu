// Cross-entropy of one row of V logits: loss = lse(z) - z[target], d loss/dz = softmax(z) - onehot(target).
// Forward reads the row once: every thread keeps a running maximum and a sum that is rescaled when the maximum grows, then
// the block merges them in a fixed tree. Reads V, writes the loss, the maximum m and the sum s = sum exp(z - m). Backward reads V and writes V.
// `loss_and_grad_` does both for the fused head and writes over the logits: what fits of the row waits in shared memory for its
// second use, the rest is read again and is mostly found in L2. Reads V, writes V.
// A target outside [0, V) that is not `ignore`: NaN loss and NaN gradients. Nothing is read or written out of bounds.
// Options: z-loss (z * lse^2 is added) and soft-cap (z becomes cap * tanh(z / cap)); 0 turns either off.
#include "common.cuh"
#include <cmath>

#ifdef __CUDACC__
constexpr int FWD_THREADS = 256, GRAD_THREADS = 512;                // tried on an H200: 4 and 2 blocks on a multiprocessor
constexpr int BOTH_THREADS = 512, BOTH_BLOCKS = 2;
constexpr int CACHE_BYTES = 112 << 10;                              // of a row in shared memory, for each of BOTH_BLOCKS blocks
constexpr float LOG2E = 1.4426950408889634f;
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
struct Lse { float m, s; };                                        // max, and sum of exp(z - max)
__device__ __forceinline__ Lse merge(Lse a, Lse b) {
    const float m = fmaxf(a.m, b.m);
    if (m == -INFINITY) return {m, 0.f};
    return {m, a.s * exp2f((a.m - m) * LOG2E) + b.s * exp2f((b.m - m) * LOG2E)};
}
__device__ __forceinline__ Lse block_merge(Lse x, Lse* smem) {
    for (int o = 16; o; o >>= 1) x = merge(x, {__shfl_xor_sync(~0u, x.m, o), __shfl_xor_sync(~0u, x.s, o)});
    if ((threadIdx.x & 31) == 0) smem[threadIdx.x >> 5] = x;
    __syncthreads();
    x = (threadIdx.x & 31) < (blockDim.x >> 5) ? smem[threadIdx.x & 31] : Lse{-INFINITY, 0.f};
    for (int o = 16; o; o >>= 1) x = merge(x, {__shfl_xor_sync(~0u, x.m, o), __shfl_xor_sync(~0u, x.s, o)});
    return x;
}
template <bool CAP> __device__ __forceinline__ float capped(float z, float cap) { return CAP ? cap * tanhf(z / cap) : z; }

// The row's elements before the first 16-byte boundary, the vectors, and what is left; f sees (index, count) runs.
template <class T> struct Split {
    int head, vecs;                                                 // 32 bits suffice for one row
    int64_t tail;
    __device__ Split(const T* p, int64_t V) {
        constexpr int VEC = 16 / sizeof(T);
        head = int((16 - (reinterpret_cast<uintptr_t>(p) & 15)) & 15) / (int)sizeof(T);
        if (head > V) head = (int)V;
        vecs = (int)((V - head) / VEC);
        tail = head + (int64_t)vecs * VEC;
    }
};

// The first `cached` vectors stay in `cache`: each thread puts its own there and takes them out again, so no barrier is needed.
template <class T, bool CAP> __device__ __forceinline__ Lse row_lse(const T* z, int64_t V, float cap, Lse* smem, Vec<T, 16 / sizeof(T)>* cache = nullptr, int cached = 0) {
    constexpr int VEC = 16 / sizeof(T), U = 4;
    const Split<T> sp(z, V);
    float m = -INFINITY, s = 0.f;
    auto one = [&](float x) {
        x = capped<CAP>(x, cap);
        if (x > m) { s = s * exp2f((m - x) * LOG2E) + 1.f; m = x; }
        else if (x > -INFINITY) s += exp2f((x - m) * LOG2E);
    };
    if (threadIdx.x < sp.head) one(to_float(z[threadIdx.x]));
    for (int i = threadIdx.x; i < sp.vecs; i += (int)blockDim.x * U) {
        Vec<T, VEC> v[U];
#pragma unroll
        for (int u = 0; u < U; u++) if (i + u * (int)blockDim.x < sp.vecs) v[u] = Vec<T, VEC>::load(z + sp.head + (int64_t)(i + u * (int)blockDim.x) * VEC);
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (i + u * (int)blockDim.x >= sp.vecs) break;
            if (i + u * (int)blockDim.x < cached) cache[i + u * (int)blockDim.x] = v[u];
            float x[VEC], top = -INFINITY;
#pragma unroll
            for (int k = 0; k < VEC; k++) { x[k] = capped<CAP>(v[u][k], cap); top = fmaxf(top, x[k]); }
            if (top > m) { s *= exp2f((m - top) * LOG2E); m = top; }
            const float base = m > -INFINITY ? m : 0.f;                                // subtract first: a common offset of the logits must cost nothing
#pragma unroll
            for (int k = 0; k < VEC; k++) s += exp2_approx((x[k] - base) * LOG2E);
        }
    }
    for (int64_t i = sp.tail + threadIdx.x; i < V; i += blockDim.x) one(to_float(z[i]));
    return block_merge({m, s}, smem);
}

// dz = (k * exp(y - m) - g * onehot) * dy/dz with k = g (1 + 2 z_loss lse) / s. The one-hot touches one element: `fix_target`
// writes it again once the row is done, so that the others need not ask whether they are it.
template <class T, bool CAP> __device__ __forceinline__ float grad_one(float x, float m, float k, float g, float cap) {
    const float y = capped<CAP>(x, cap), d = k * exp2_approx((y - m) * LOG2E) - g;
    return CAP ? d * (1.f - (y / cap) * (y / cap)) : d;
}
// `dz` may be `z`; if not, its rows may begin elsewhere within 16 bytes, and then loads go one by one.
template <class T, bool CAP> __device__ __forceinline__ void row_grad(const T* z, T* dz, int64_t V, float m, float k, float cap, const Vec<T, 16 / sizeof(T)>* cache = nullptr, int cached = 0) {
    constexpr int VEC = 16 / sizeof(T);
    const Split<T> sp(dz, V);
    const bool alike = ((reinterpret_cast<uintptr_t>(z) ^ reinterpret_cast<uintptr_t>(dz)) & 15) == 0;
    if (threadIdx.x < sp.head) dz[threadIdx.x] = from_float<T>(grad_one<T, CAP>(to_float(z[threadIdx.x]), m, k, 0.f, cap));
#pragma unroll 4
    for (int i = threadIdx.x; i < sp.vecs; i += blockDim.x) {
        const int64_t c = sp.head + (int64_t)i * VEC;
        Vec<T, VEC> v;
        if (i < cached) v = cache[i];
        else if (alike) v = Vec<T, VEC>::load(z + c);
        else
#pragma unroll
            for (int q = 0; q < VEC; q++) v.v[q] = z[c + q];
#pragma unroll
        for (int q = 0; q < VEC; q++) v.set(q, grad_one<T, CAP>(v[q], m, k, 0.f, cap));
        v.store(dz + c);
    }
    for (int64_t i = sp.tail + threadIdx.x; i < V; i += blockDim.x) dz[i] = from_float<T>(grad_one<T, CAP>(to_float(z[i]), m, k, 0.f, cap));
}
template <class T, bool CAP> __device__ __forceinline__ void fix_target(T* at, float z, float m, float k, float g, float cap) {
    __syncthreads();
    if (threadIdx.x == 0) *at = from_float<T>(grad_one<T, CAP>(z, m, k, g, cap));
}

template <class T, bool CAP>
__global__ void __launch_bounds__(FWD_THREADS, 4) fwd_kernel(const T* __restrict__ z, int64_t stride, const int64_t* __restrict__ target, float* __restrict__ loss, float2* __restrict__ stats, int64_t V, int64_t ignore, float z_loss, float cap) {
    __shared__ Lse smem[32];
    const int64_t row = blockIdx.x, t = target[row];
    if (t == ignore) { if (threadIdx.x == 0) { loss[row] = 0.f; stats[row] = {0.f, 1.f}; } return; }
    const Lse a = row_lse<T, CAP>(z + row * stride, V, cap, smem);
    if (threadIdx.x == 0) {
        const bool known = t >= 0 && t < V;
        const float log_s = logf(a.s), lse = a.m + log_s;
        loss[row] = known ? (a.m - capped<CAP>(to_float(z[row * stride + t]), cap)) + log_s + z_loss * lse * lse : NAN;
        stats[row] = {a.m, known ? a.s : NAN};
    }
}
__device__ __forceinline__ float factor(float g, float2 a, float z_loss) { return g * (1.f + 2.f * z_loss * (a.x + logf(a.y))) / a.y; }
template <class T, bool CAP>
__global__ void __launch_bounds__(GRAD_THREADS, 2) bwd_kernel(const float* __restrict__ g, int64_t g_stride, const T* z, int64_t stride, const int64_t* __restrict__ target, const float2* __restrict__ stats, T* dz, int64_t V, int64_t ignore, float z_loss, float cap) {
    const int64_t row = blockIdx.x, t = target[row];
    T* out = dz + row * V;
    if (t == ignore) { for (int64_t i = threadIdx.x; i < V; i += blockDim.x) out[i] = from_float<T>(0.f); return; }
    const float2 a = stats[row];
    const float gr = g[row * g_stride], k = factor(gr, a, z_loss);
    row_grad<T, CAP>(z + row * stride, out, V, a.x, k, cap);
    if (t >= 0 && t < V) fix_target<T, CAP>(out + t, to_float(z[row * stride + t]), a.x, k, gr, cap);
}
template <class T, bool CAP>
__global__ void __launch_bounds__(BOTH_THREADS, BOTH_BLOCKS) both_kernel(T* z, int64_t stride, const int64_t* __restrict__ target, const float* __restrict__ weight, float* __restrict__ loss, int64_t V, int64_t ignore, float z_loss, float cap, int cached) {
    __shared__ Lse smem[32];
    extern __shared__ int4 dynamic[];
    auto* cache = reinterpret_cast<Vec<T, 16 / sizeof(T)>*>(dynamic);
    const int64_t row = blockIdx.x, t = target[row];
    const float g = weight ? weight[row] : 1.f;
    T* p = z + row * stride;
    if (t == ignore || g == 0.f) {
        for (int64_t i = threadIdx.x; i < V; i += blockDim.x) p[i] = from_float<T>(0.f);
        if (threadIdx.x == 0) loss[row] = 0.f;
        return;
    }
    const bool known = t >= 0 && t < V;
    const float zt = known ? to_float(p[t]) : NAN;                                     // before anything is overwritten
    const Lse a = row_lse<T, CAP>(p, V, cap, smem, cache, cached);
    __syncthreads();
    if (threadIdx.x == 0) {
        const float log_s = logf(a.s), lse = a.m + log_s;
        loss[row] = g * ((a.m - capped<CAP>(zt, cap)) + log_s + z_loss * lse * lse);
    }
    const float k = factor(g, {a.m, known ? a.s : NAN}, z_loss);
    row_grad<T, CAP>(p, p, V, a.m, k, cap, cache, cached);
    if (known) fix_target<T, CAP>(p + t, zt, a.m, k, g, cap);
}
// How many bytes of a row each of BOTH_BLOCKS blocks may keep in shared memory on this device.
inline int cache_bytes(const void* kernel, int64_t row_bytes) {
    int dev, most = 0, per_sm = 0;
    cudaGetDevice(&dev);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev);
    cudaDeviceGetAttribute(&per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, dev);
    int64_t n = per_sm / BOTH_BLOCKS - 2048;                                            // the system keeps 1 KiB a block, `smem` is static
    n = n < most - 1024 ? n : most - 1024;
    n = n < CACHE_BYTES ? n : CACHE_BYTES;
    n = n < row_bytes ? n : row_bytes;
    n = n / 16 * 16;
    if (n > (40 << 10)) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n);
    return (int)n;
}

#define BY_CAP(cap, ...) if (cap > 0) { constexpr bool CAP = true; __VA_ARGS__ } else { constexpr bool CAP = false; __VA_ARGS__ }
// Rows may lie apart (a slice of a padded vocabulary); within a row the logits must follow one another, or a copy is made.
inline Tensor dense_rows(const Tensor& z) { return z.stride(1) == 1 || z.size(1) == 1 ? z : torch::stable::contiguous(z); }
std::tuple<Tensor, Tensor> cross_entropy(const Tensor& z_, const Tensor& target_, int64_t ignore, double z_loss, double cap) {
    const Tensor z = dense_rows(z_), target = torch::stable::contiguous(target_);
    const int64_t N = z.size(0), V = z.size(1);
    Tensor loss = torch::stable::new_empty(z, {N}, ScalarType::Float), stats = torch::stable::new_empty(z, {N, 2}, ScalarType::Float);
    if (!N) return {loss, stats};
    torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    DISPATCH(z.scalar_type(), "cross_entropy", BY_CAP(cap, {
        fwd_kernel<T, CAP><<<N, FWD_THREADS, 0, stream_of(z)>>>((const T*)z.const_data_ptr(), z.stride(0), target.const_data_ptr<int64_t>(), loss.mutable_data_ptr<float>(), (float2*)stats.mutable_data_ptr(), V, ignore, (float)z_loss, (float)cap);
    }));
    check_launch("cross_entropy forward");
    return {loss, stats};
}
Tensor cross_entropy_backward(const Tensor& g, const Tensor& z_, const Tensor& target_, const Tensor& stats, int64_t ignore, double z_loss, double cap) {
    const Tensor z = dense_rows(z_), target = torch::stable::contiguous(target_);
    const int64_t N = z.size(0), V = z.size(1);
    Tensor dz = torch::stable::new_empty(z, {N, V});
    if (!N) return dz;
    torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    DISPATCH(z.scalar_type(), "cross_entropy", BY_CAP(cap, {
        bwd_kernel<T, CAP><<<N, GRAD_THREADS, 0, stream_of(z)>>>(g.const_data_ptr<float>(), g.stride(0), (const T*)z.const_data_ptr(), z.stride(0), target.const_data_ptr<int64_t>(), (const float2*)stats.const_data_ptr(), (T*)dz.mutable_data_ptr(), V, ignore, (float)z_loss, (float)cap);
    }));
    check_launch("cross_entropy backward");
    return dz;
}
// Turns logits into weight * d loss / d logits in place and returns weight * loss of each row. For the fused head only: nobody else
// holds these logits. Rows may lie further apart than V, so that a matrix product finds each of them aligned.
Tensor loss_and_grad_(Tensor z, const Tensor& target_, const std::optional<Tensor>& weight_, int64_t ignore, double z_loss, double cap) {
    const int64_t N = z.size(0), V = z.size(1);
    STD_TORCH_CHECK((z.stride(1) == 1 || V == 1) && (N < 2 || z.stride(0) >= V), "loss_and_grad_: each row of the logits must be contiguous");
    const Tensor target = torch::stable::contiguous(target_);
    std::optional<Tensor> weight;
    if (weight_) weight = torch::stable::contiguous(*weight_);
    STD_TORCH_CHECK(!weight || weight->scalar_type() == ScalarType::Float, "loss_and_grad_: weight must be float32");
    Tensor loss = torch::stable::new_empty(z, {N}, ScalarType::Float);
    if (!N) return loss;
    torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    DISPATCH(z.scalar_type(), "cross_entropy", BY_CAP(cap, {
        const int bytes = cache_bytes((const void*)both_kernel<T, CAP>, V * sizeof(T));
        both_kernel<T, CAP><<<N, BOTH_THREADS, bytes, stream_of(z)>>>((T*)z.mutable_data_ptr(), z.stride(0), target.const_data_ptr<int64_t>(), weight ? weight->const_data_ptr<float>() : nullptr, loss.mutable_data_ptr<float>(), V, ignore, (float)z_loss, (float)cap, bytes / 16);
    }));
    check_launch("cross_entropy fused");
    return loss;
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {
    m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
    m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
    m.impl("loss_and_grad_", TORCH_BOX(&loss_and_grad_));
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("cross_entropy(Tensor logits, Tensor target, int ignore_index, float z_loss, float softcap) -> (Tensor, Tensor)");
    m.def("cross_entropy_backward(Tensor g, Tensor logits, Tensor target, Tensor stats, int ignore_index, float z_loss, float softcap) -> Tensor");
    m.def("loss_and_grad_(Tensor(a!) logits, Tensor target, Tensor? weight, int ignore_index, float z_loss, float softcap) -> Tensor");
}
