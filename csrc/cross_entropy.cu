// Cross-entropy of one row of V logits: loss = lse(z) - z[target], d loss/dz = softmax(z) - onehot(target).
// Forward reads the row once: every thread keeps a running maximum and a sum that is rescaled when the maximum grows, then
// the block merges them in a fixed tree. `loss_and_grad_` does both for the fused head: the second read finds the row in L2.
// Options: z-loss (z * lse^2 is added) and soft-cap (z becomes cap * tanh(z / cap)); 0 turns either off.
#include "common.cuh"
#include <cmath>

#ifdef __CUDACC__
constexpr int FWD_THREADS = 256, GRAD_THREADS = 512;                // tried on an H200: 4 and 2 blocks on a multiprocessor
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
    int64_t head, vecs, tail;
    __device__ Split(const T* p, int64_t V) {
        constexpr int VEC = 16 / sizeof(T);
        head = ((16 - (reinterpret_cast<uintptr_t>(p) & 15)) & 15) / sizeof(T);
        if (head > V) head = V;
        vecs = (V - head) / VEC;
        tail = head + vecs * VEC;
    }
};

template <class T, bool CAP> __device__ __forceinline__ Lse row_lse(const T* __restrict__ z, int64_t V, float cap, Lse* smem) {
    constexpr int VEC = 16 / sizeof(T), U = 4;
    const Split<T> sp(z, V);
    float m = -INFINITY, s = 0.f;
    auto one = [&](float x) {
        x = capped<CAP>(x, cap);
        if (x > m) { s = s * exp2f((m - x) * LOG2E) + 1.f; m = x; }
        else if (x > -INFINITY) s += exp2f((x - m) * LOG2E);
    };
    if (threadIdx.x < sp.head) one(to_float(z[threadIdx.x]));
    for (int64_t i = threadIdx.x; i < sp.vecs; i += (int64_t)blockDim.x * U) {
        Vec<T, VEC> v[U];
#pragma unroll
        for (int u = 0; u < U; u++) if (i + u * (int64_t)blockDim.x < sp.vecs) v[u] = Vec<T, VEC>::load(z + sp.head + (i + u * (int64_t)blockDim.x) * VEC);
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (i + u * (int64_t)blockDim.x >= sp.vecs) break;
            float x[VEC], top = -INFINITY;
#pragma unroll
            for (int k = 0; k < VEC; k++) { x[k] = capped<CAP>(v[u][k], cap); top = fmaxf(top, x[k]); }
            if (top > m) { s *= exp2f((m - top) * LOG2E); m = top; }
            const float ml = m > -INFINITY ? m * LOG2E : 0.f;
#pragma unroll
            for (int k = 0; k < VEC; k++) s += exp2_approx(fmaf(x[k], LOG2E, -ml));
        }
    }
    for (int64_t i = sp.tail + threadIdx.x; i < V; i += blockDim.x) one(to_float(z[i]));
    return block_merge({m, s}, smem);
}

// dz = g * (softmax * (1 + 2 z_loss lse) - onehot) * d capped/dz; `dz` may be `z`
template <class T, bool CAP> __device__ __forceinline__ void row_grad(const T* z, T* dz, int64_t V, int64_t target, float lse, float g, float z_loss, float cap) {
    constexpr int VEC = 16 / sizeof(T);
    const Split<T> sp(z, V);
    const float k1 = g * (1.f + 2.f * z_loss * lse);
    auto one = [&](float x, int64_t i) {
        const float y = capped<CAP>(x, cap);
        float d = k1 * exp2_approx((y - lse) * LOG2E);
        if (i == target) d -= g;
        return CAP ? d * (1.f - (y / cap) * (y / cap)) : d;
    };
    if (threadIdx.x < sp.head) dz[threadIdx.x] = from_float<T>(one(to_float(z[threadIdx.x]), threadIdx.x));
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < sp.vecs; i += blockDim.x) {
        const int64_t c = sp.head + i * VEC;
        Vec<T, VEC> v = Vec<T, VEC>::load(z + c);
#pragma unroll
        for (int k = 0; k < VEC; k++) v.set(k, one(v[k], c + k));
        v.store(dz + c);
    }
    for (int64_t i = sp.tail + threadIdx.x; i < V; i += blockDim.x) dz[i] = from_float<T>(one(to_float(z[i]), i));
}

template <class T, bool CAP>
__global__ void __launch_bounds__(FWD_THREADS, 4) fwd_kernel(const T* __restrict__ z, const int64_t* __restrict__ target, float* __restrict__ loss, float* __restrict__ lse_out, int64_t V, int64_t ignore, float z_loss, float cap) {
    __shared__ Lse smem[32];
    const int64_t row = blockIdx.x, t = target[row];
    if (t == ignore) { if (threadIdx.x == 0) { loss[row] = 0.f; lse_out[row] = 0.f; } return; }
    const Lse a = row_lse<T, CAP>(z + row * V, V, cap, smem);
    if (threadIdx.x == 0) {
        const float lse = a.m + logf(a.s);
        loss[row] = t >= 0 && t < V ? (a.m - capped<CAP>(to_float(z[row * V + t]), cap)) + logf(a.s) + z_loss * lse * lse : NAN;
        lse_out[row] = lse;
    }
}
template <class T, bool CAP>
__global__ void __launch_bounds__(GRAD_THREADS, 2) bwd_kernel(const float* __restrict__ g, int64_t g_stride, const T* z, const int64_t* __restrict__ target, const float* __restrict__ lse, T* dz, int64_t V, int64_t ignore, float z_loss, float cap) {
    const int64_t row = blockIdx.x, t = target[row];
    T* out = dz + row * V;
    if (t == ignore) { for (int64_t i = threadIdx.x; i < V; i += blockDim.x) out[i] = from_float<T>(0.f); return; }
    row_grad<T, CAP>(z + row * V, out, V, t, lse[row], g[row * g_stride], z_loss, cap);
}
template <class T, bool CAP>
__global__ void __launch_bounds__(GRAD_THREADS, 2) both_kernel(T* z, const int64_t* __restrict__ target, const float* __restrict__ weight, float* __restrict__ loss, int64_t V, int64_t ignore, float z_loss, float cap) {
    __shared__ Lse smem[32];
    const int64_t row = blockIdx.x, t = target[row];
    T* p = z + row * V;
    if (t == ignore) {
        for (int64_t i = threadIdx.x; i < V; i += blockDim.x) p[i] = from_float<T>(0.f);
        if (threadIdx.x == 0) loss[row] = 0.f;
        return;
    }
    const float zt = t >= 0 && t < V ? capped<CAP>(to_float(p[t]), cap) : NAN;   // before anything is overwritten
    const Lse a = row_lse<T, CAP>(p, V, cap, smem);
    __syncthreads();
    const float lse = a.m + logf(a.s), wt = weight ? weight[row] : 1.f;
    if (threadIdx.x == 0) loss[row] = wt * ((a.m - zt) + logf(a.s) + z_loss * lse * lse);
    row_grad<T, CAP>(p, p, V, t, lse, wt, z_loss, cap);
}

#define BY_CAP(cap, ...) if (cap > 0) { constexpr bool CAP = true; __VA_ARGS__ } else { constexpr bool CAP = false; __VA_ARGS__ }
std::tuple<Tensor, Tensor> cross_entropy(const Tensor& z_, const Tensor& target_, int64_t ignore, double z_loss, double cap) {
    const Tensor z = torch::stable::contiguous(z_), target = torch::stable::contiguous(target_);
    const int64_t N = z.size(0), V = z.size(1);
    Tensor loss = torch::stable::new_empty(z, {N}, ScalarType::Float), lse = torch::stable::new_empty(z, {N}, ScalarType::Float);
    if (!N) return {loss, lse};
    torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    DISPATCH(z.scalar_type(), "cross_entropy", BY_CAP(cap, {
        fwd_kernel<T, CAP><<<N, FWD_THREADS, 0, stream_of(z)>>>((const T*)z.const_data_ptr(), target.const_data_ptr<int64_t>(), loss.mutable_data_ptr<float>(), lse.mutable_data_ptr<float>(), V, ignore, (float)z_loss, (float)cap);
    }));
    check_launch("cross_entropy forward");
    return {loss, lse};
}
Tensor cross_entropy_backward(const Tensor& g, const Tensor& z_, const Tensor& target_, const Tensor& lse, int64_t ignore, double z_loss, double cap) {
    const Tensor z = torch::stable::contiguous(z_), target = torch::stable::contiguous(target_);
    Tensor dz = torch::stable::empty_like(z);
    const int64_t N = z.size(0), V = z.size(1);
    if (!N) return dz;
    torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    DISPATCH(z.scalar_type(), "cross_entropy", BY_CAP(cap, {
        bwd_kernel<T, CAP><<<N, GRAD_THREADS, 0, stream_of(z)>>>(g.const_data_ptr<float>(), g.stride(0), (const T*)z.const_data_ptr(), target.const_data_ptr<int64_t>(), lse.const_data_ptr<float>(), (T*)dz.mutable_data_ptr(), V, ignore, (float)z_loss, (float)cap);
    }));
    check_launch("cross_entropy backward");
    return dz;
}
// Turns logits into weight * d loss / d logits in place and returns weight * loss of each row. For the fused head only: nobody else holds these logits.
Tensor loss_and_grad_(Tensor z, const Tensor& target, const std::optional<Tensor>& weight, int64_t ignore, double z_loss, double cap) {
    const int64_t N = z.size(0), V = z.size(1);
    STD_TORCH_CHECK(z.is_contiguous(), "loss_and_grad_: logits must be contiguous");
    Tensor loss = torch::stable::new_empty(z, {N}, ScalarType::Float);
    if (!N) return loss;
    torch::stable::accelerator::DeviceGuard guard(z.get_device_index());
    DISPATCH(z.scalar_type(), "cross_entropy", BY_CAP(cap, {
        both_kernel<T, CAP><<<N, GRAD_THREADS, 0, stream_of(z)>>>((T*)z.mutable_data_ptr(), target.const_data_ptr<int64_t>(), weight ? weight->const_data_ptr<float>() : nullptr, loss.mutable_data_ptr<float>(), V, ignore, (float)z_loss, (float)cap);
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
    m.def("cross_entropy_backward(Tensor g, Tensor logits, Tensor target, Tensor lse, int ignore_index, float z_loss, float softcap) -> Tensor");
    m.def("loss_and_grad_(Tensor(a!) logits, Tensor target, Tensor? weight, int ignore_index, float z_loss, float softcap) -> Tensor");
}
