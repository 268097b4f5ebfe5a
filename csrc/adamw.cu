// AdamW over many tensors in one launch: each float32 master, gradient and moment is read once and written once, a copy in
// another dtype (bfloat16) is written in the same pass. The gradient norm is summed in float64, chunk by chunk in a fixed
// order, so huge finite gradients do not overflow it; the clip factor stays on the device, so the host never waits.
// A norm that is not finite leaves every weight and moment as it is.
#include "common.cuh"
#include <cmath>

#ifdef __CUDACC__
// One work item is a chunk of one tensor. `table` holds 6 rows of n pointers or numbers: master, grad, m, v, copy (or 0), weight decay (as bits).
constexpr int64_t CHUNK = 1 << 14;                                  // elements
struct Item { float *p, *m, *v; const void* g; void* copy; float decay; int64_t n; };

template <class G> __global__ void __launch_bounds__(512) norm_kernel(const int64_t* __restrict__ grads, const int64_t* __restrict__ sizes, const int32_t* __restrict__ tensor_of, const int32_t* __restrict__ chunk_of, double* __restrict__ part) {
    constexpr int VEC = 16 / sizeof(G);
    __shared__ double smem[16];
    const int t = tensor_of[blockIdx.x];
    const int64_t start = chunk_of[blockIdx.x] * CHUNK, n = min(CHUNK, sizes[t] - start);
    const G* g = reinterpret_cast<const G*>(grads[t]) + start;
    double s = 0;
    const int64_t vecs = (reinterpret_cast<uintptr_t>(g) & 15) ? 0 : n / VEC;
    for (int64_t i = threadIdx.x; i < vecs; i += blockDim.x) {
        const Vec<G, VEC> v = Vec<G, VEC>::load(g + i * VEC);
        float a = 0.f;                                              // exact enough: 4 to 8 squares, and only where they cannot overflow
        double d = 0;
#pragma unroll
        for (int k = 0; k < VEC; k++) { const float x = v[k]; if (fabsf(x) < 1e18f) a += x * x; else d += (double)x * x; }
        s += d + a;
    }
    for (int64_t i = vecs * VEC + threadIdx.x; i < n; i += blockDim.x) { const double x = to_float(g[i]); s += x * x; }
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if ((threadIdx.x & 31) == 0) smem[threadIdx.x >> 5] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < (int)blockDim.x >> 5; w++) s += smem[w];
        part[blockIdx.x] = s;
    }
}
// norm, and the factor min(1, max_norm / norm); 1 if max_norm is 0
__global__ void norm_sum(const double* __restrict__ part, int64_t chunks, float max_norm, float* __restrict__ out) {
    __shared__ double smem[32];
    double s = 0;
    for (int64_t i = threadIdx.x; i < chunks; i += blockDim.x) s += part[i];
    for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    if ((threadIdx.x & 31) == 0) smem[threadIdx.x >> 5] = s;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < (int)blockDim.x >> 5; w++) s += smem[w];
        const double norm = sqrt(s);
        out[0] = (float)norm;
        out[1] = max_norm > 0.f && norm > max_norm ? (float)(max_norm / norm) : 1.f;
        out[2] = isfinite(norm) ? 1.f : 0.f;
    }
}

template <class G, class C> __global__ void __launch_bounds__(512) step_kernel(const int64_t* __restrict__ table, int64_t tensors, const float* __restrict__ decay_of, const int64_t* __restrict__ sizes,
                                                                              const int32_t* __restrict__ tensor_of, const int32_t* __restrict__ chunk_of, const float* __restrict__ norm,
                                                                              float lr, float b1, float b2, float omb1, float omb2, float eps, float step_size, float sqrt_bc2) {
    if (norm && norm[2] == 0.f) return;
    const float clip = norm ? norm[1] : 1.f;
    const int t = tensor_of[blockIdx.x];
    const int64_t start = chunk_of[blockIdx.x] * CHUNK, n = min(CHUNK, sizes[t] - start);
    float *p = reinterpret_cast<float*>(table[t]) + start, *m = reinterpret_cast<float*>(table[2 * tensors + t]) + start, *v = reinterpret_cast<float*>(table[3 * tensors + t]) + start;
    const G* g = reinterpret_cast<const G*>(table[tensors + t]) + start;
    C* c = table[4 * tensors + t] ? reinterpret_cast<C*>(table[4 * tensors + t]) + start : nullptr;
    const float decay = __fsub_rn(1.f, __fmul_rn(lr, decay_of[t]));
    // order and rounding of torch.optim.AdamW's single-tensor float32 path
    auto one = [&](float& pp, float& mm, float& vv, float gg) {
        gg = clip == 1.f ? gg : gg * clip;
        pp = __fmul_rn(pp, decay);
        mm = fmaf(omb1, __fsub_rn(gg, mm), mm);
        vv = fmaf(omb2, __fmul_rn(gg, gg), __fmul_rn(vv, b2));
        const float den = __fadd_rn(__fdiv_rn(__fsqrt_rn(vv), sqrt_bc2), eps);
        pp = __fadd_rn(pp, __fdiv_rn(__fmul_rn(-step_size, mm), den));
    };
    constexpr int VEC = 4;
    const bool ok = !((reinterpret_cast<uintptr_t>(p) | reinterpret_cast<uintptr_t>(m) | reinterpret_cast<uintptr_t>(v)) & 15) && !(reinterpret_cast<uintptr_t>(g) & (sizeof(G) * VEC - 1)) && !(reinterpret_cast<uintptr_t>(c) & (sizeof(C) * VEC - 1));
    const int64_t vecs = ok ? n / VEC : 0;
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < vecs; i += blockDim.x) {
        Vec<float, VEC> vp = Vec<float, VEC>::load(p + i * VEC), vm = Vec<float, VEC>::load(m + i * VEC), vv = Vec<float, VEC>::load(v + i * VEC);
        const Vec<G, VEC> vg = Vec<G, VEC>::load(g + i * VEC);
        Vec<C, VEC> vc;
#pragma unroll
        for (int k = 0; k < VEC; k++) { one(vp.v[k], vm.v[k], vv.v[k], vg[k]); vc.set(k, vp.v[k]); }
        vp.store(p + i * VEC); vm.store(m + i * VEC); vv.store(v + i * VEC);
        if (c) vc.store(c + i * VEC);
    }
    for (int64_t i = vecs * VEC + threadIdx.x; i < n; i += blockDim.x) {
        one(p[i], m[i], v[i], to_float(g[i]));
        if (c) c[i] = from_float<C>(p[i]);
    }
}

// grads [n] int64 pointers of one dtype (given by `like`'s), sizes [n], tensor_of and chunk_of [chunks]; result float32 [3]: norm, clip factor, finite
Tensor grad_norm(const Tensor& like, const Tensor& grads, const Tensor& sizes, const Tensor& tensor_of, const Tensor& chunk_of, double max_norm) {
    const int64_t chunks = tensor_of.numel();
    Tensor out = torch::stable::new_empty(grads, {3}, ScalarType::Float), part = torch::stable::new_empty(grads, {chunks}, ScalarType::Double);
    torch::stable::accelerator::DeviceGuard guard(grads.get_device_index());
    const cudaStream_t s = stream_of(grads);
    if (chunks) DISPATCH(like.scalar_type(), "grad_norm", {
        norm_kernel<T><<<chunks, 512, 0, s>>>(grads.const_data_ptr<int64_t>(), sizes.const_data_ptr<int64_t>(), tensor_of.const_data_ptr<int32_t>(), chunk_of.const_data_ptr<int32_t>(), part.mutable_data_ptr<double>());
    });
    norm_sum<<<1, 1024, 0, s>>>(part.const_data_ptr<double>(), chunks, (float)max_norm, out.mutable_data_ptr<float>());
    check_launch("grad_norm");
    return out;
}
// table [5, n] int64 pointers: master, grad, m, v, copy (0: none). `like_grad`, `like_copy` give the dtypes. `norm` is what grad_norm returned.
void adamw_(const Tensor& like_grad, const Tensor& like_copy, const Tensor& table, const Tensor& decay, const Tensor& sizes, const Tensor& tensor_of, const Tensor& chunk_of, const std::optional<Tensor>& norm,
            double lr, double b1, double b2, double eps, int64_t step) {
    const int64_t chunks = tensor_of.numel(), n = sizes.numel();
    if (!chunks) return;
    torch::stable::accelerator::DeviceGuard guard(table.get_device_index());
    const double bc1 = 1 - std::pow(b1, (double)step), bc2 = 1 - std::pow(b2, (double)step);
    DISPATCH(like_grad.scalar_type(), "adamw", {
        using G = T;
        DISPATCH(like_copy.scalar_type(), "adamw", {
            step_kernel<G, T><<<chunks, 512, 0, stream_of(table)>>>(table.const_data_ptr<int64_t>(), n, decay.const_data_ptr<float>(), sizes.const_data_ptr<int64_t>(), tensor_of.const_data_ptr<int32_t>(), chunk_of.const_data_ptr<int32_t>(),
                norm ? norm->const_data_ptr<float>() : nullptr, (float)lr, (float)b1, (float)b2, (float)(1 - b1), (float)(1 - b2), (float)eps, (float)(lr / bc1), (float)std::sqrt(bc2));
        });
    });
    check_launch("adamw");
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {
    m.impl("grad_norm", TORCH_BOX(&grad_norm));
    m.impl("adamw_", TORCH_BOX(&adamw_));
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("grad_norm(Tensor like, Tensor grads, Tensor sizes, Tensor tensor_of, Tensor chunk_of, float max_norm) -> Tensor");
    m.def("adamw_(Tensor like_grad, Tensor like_copy, Tensor table, Tensor decay, Tensor sizes, Tensor tensor_of, Tensor chunk_of, Tensor? norm, float lr, float b1, float b2, float eps, int step) -> ()");
}
