// repeat_kv: copy each KV head to its group of query heads, and the gradient: the sum over the group in a fixed order, no atomics.
// x is [B, Hkv, S, D] seen as [B*Hkv, S*D]; y is [B*Hkv*group, S*D]. Forward reads 1 and writes `group`; backward the reverse.
#include "common.cuh"
#include <type_traits>
#include <algorithm>

#ifdef __CUDACC__
constexpr int THREADS = 128, U = 2;                                 // each thread has U vectors under way
// Every element of y is written in memory order, as a copy would; x is read from memory once and then comes out of the cache.
template <class T, int VEC> __global__ void __launch_bounds__(THREADS) fwd_kernel(const T* __restrict__ x, T* __restrict__ y, int64_t heads, int64_t block, int group) {
    const int64_t i0 = (blockIdx.x * (int64_t)(THREADS * U) + threadIdx.x) * VEC;
    for (int64_t head = blockIdx.y; head < heads * group; head += gridDim.y) {
        const T* in = x + (head >> 31 ? head / group : (unsigned)head / (unsigned)group) * block + i0;
        Vec<T, VEC> v[U];
#pragma unroll
        for (int u = 0; u < U; u++) if (i0 + u * THREADS * VEC < block) v[u] = Vec<T, VEC>::load(in + u * THREADS * VEC);
#pragma unroll
        for (int u = 0; u < U; u++) if (i0 + u * THREADS * VEC < block) v[u].store_once(y + head * block + i0 + u * THREADS * VEC);
    }
}
template <class T, int VEC> __global__ void __launch_bounds__(THREADS) bwd_kernel(const T* __restrict__ g, T* __restrict__ dx, int64_t heads, int64_t block, int group) {
    const int64_t i = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * VEC;
    if (i >= block) return;
    for (int64_t head = blockIdx.y; head < heads; head += gridDim.y) {
        const T* in = g + head * group * block + i;
        float s[VEC] = {};
        int r = 0;
        const auto add = [&](auto Q) {                                                 // Q loads before the first addition
            for (; r + Q.value <= group; r += Q.value) {
                Vec<T, VEC> v[Q.value];
#pragma unroll
                for (int q = 0; q < Q.value; q++) v[q] = Vec<T, VEC>::load(in + (r + q) * block);
#pragma unroll
                for (int k = 0; k < VEC; k++) {                                        // in pairs: fewer roundings one after the other
                    float t = v[0][k];
                    if (Q.value > 1) t += v[1 % Q.value][k];
                    if (Q.value > 2) t += v[2 % Q.value][k] + v[3 % Q.value][k];
                    s[k] += t;
                }
            }
        };
        add(std::integral_constant<int, 4>());
        add(std::integral_constant<int, 2>());
        add(std::integral_constant<int, 1>());
        Vec<T, VEC> out;
#pragma unroll
        for (int k = 0; k < VEC; k++) out.set(k, s[k]);
        out.store_once(dx + head * block + i);
    }
}
template <bool FWD> Tensor run(const Tensor& x, int64_t group, Tensor out, int64_t heads, int64_t block) {
    if (!heads || !block) return out;
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    DISPATCH(x.scalar_type(), "repeat_kv", {
        constexpr int VEC = 16 / sizeof(T);
        const T* px = (const T*)x.const_data_ptr();
        T* po = (T*)out.mutable_data_ptr();
        const bool fast = block % VEC == 0 && aligned16(px);
        const dim3 g(ceil_div(fast ? block / VEC : block, FWD ? THREADS * U : THREADS), std::min<int64_t>(FWD ? heads * group : heads, 65535));
        if (FWD && fast) fwd_kernel<T, VEC><<<g, THREADS, 0, stream_of(x)>>>(px, po, heads, block, (int)group);
        else if (FWD) fwd_kernel<T, 1><<<g, THREADS, 0, stream_of(x)>>>(px, po, heads, block, (int)group);
        else if (fast) bwd_kernel<T, VEC><<<g, THREADS, 0, stream_of(x)>>>(px, po, heads, block, (int)group);
        else bwd_kernel<T, 1><<<g, THREADS, 0, stream_of(x)>>>(px, po, heads, block, (int)group);
    });
    check_launch("repeat_kv");
    return out;
}
Tensor repeat_kv(const Tensor& x_, int64_t group) {
    const Tensor x = torch::stable::contiguous(x_);
    const int64_t B = x.size(0), H = x.size(1), S = x.size(2), D = x.size(3);
    return run<true>(x, group, torch::stable::new_empty(x, {B, H * group, S, D}), B * H, S * D);
}
Tensor repeat_kv_backward(const Tensor& g_, int64_t group) {
    const Tensor g = torch::stable::contiguous(g_);
    const int64_t B = g.size(0), H = g.size(1) / group, S = g.size(2), D = g.size(3);
    return run<false>(g, group, torch::stable::new_empty(g, {B, H, S, D}), B * H, S * D);
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {
    m.impl("repeat_kv", TORCH_BOX(&repeat_kv));
    m.impl("repeat_kv_backward", TORCH_BOX(&repeat_kv_backward));
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("repeat_kv(Tensor x, int group) -> Tensor");
    m.def("repeat_kv_backward(Tensor g, int group) -> Tensor");
}
