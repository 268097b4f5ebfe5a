// SwiGLU y = silu(gate) * up and its gradient. Every element is read once and written once, 16 bytes at a time.
// Forward reads 2 tensors and writes 1; backward reads 3 and writes 2: in a half precision 6 and 10 bytes an element.
// The arithmetic is shared by the kernel and the CPU loop, so a machine without a GPU tests it too.
#include "common.cuh"
#include <cmath>

HD float forward_one(float g, float u) { return g / (1.f + expf(-g)) * u; }          // rounded to T once, at the store
template <class T> HD void backward_one(float dy, float g, float u, float& dg, float& du) {
    const float d = 1.f + expf(-g), s = 1.f / d, silu = sizeof(T) == 4 ? g / d : g * s;  // g * s rounds once more, which a half precision does not see
    du = dy * silu;
    dg = dy * u * (s + silu * (1.f - s));
}

#ifdef __CUDACC__
template <class T, int VEC> __global__ void fwd_kernel(const T* __restrict__ g, const T* __restrict__ u, T* __restrict__ y, int64_t n) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    if (i + VEC > n) {                                                               // the last few
        for (int64_t k = i; k < n; k++) y[k] = from_float<T>(forward_one(to_float(g[k]), to_float(u[k])));
        return;
    }
    using V = Vec<T, VEC>;
    const V a = V::load(g + i), b = V::load(u + i);
    V out;
#pragma unroll
    for (int k = 0; k < VEC; k++) out.set(k, forward_one(a[k], b[k]));
    out.store(y + i);
}
template <class T, int VEC> __global__ void bwd_kernel(const T* __restrict__ dy, const T* __restrict__ g, const T* __restrict__ u, T* __restrict__ dg, T* __restrict__ du, int64_t n) {
    const int64_t i = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) * VEC;
    if (i >= n) return;
    if (i + VEC > n) {
        for (int64_t k = i; k < n; k++) {
            float x, z;
            backward_one<T>(to_float(dy[k]), to_float(g[k]), to_float(u[k]), x, z);
            dg[k] = from_float<T>(x); du[k] = from_float<T>(z);
        }
        return;
    }
    using V = Vec<T, VEC>;
    const V d = V::load(dy + i), a = V::load(g + i), b = V::load(u + i);
    V ga, gb;
#pragma unroll
    for (int k = 0; k < VEC; k++) {
        float x, z;
        backward_one<T>(d[k], a[k], b[k], x, z);
        ga.set(k, x); gb.set(k, z);
    }
    ga.store(dg + i); gb.store(du + i);
}

Tensor swiglu(const Tensor& gate_, const Tensor& up_) {
    const Tensor g = torch::stable::contiguous(gate_), u = torch::stable::contiguous(up_);
    Tensor y = torch::stable::empty_like(g);
    const int64_t n = g.numel();
    if (!n) return y;
    torch::stable::accelerator::DeviceGuard guard(g.get_device_index());
    DISPATCH(g.scalar_type(), "swiglu", {
        constexpr int VEC = 16 / sizeof(T);
        const T *pg = (const T*)g.const_data_ptr(), *pu = (const T*)u.const_data_ptr();
        T* py = (T*)y.mutable_data_ptr();
        if (aligned16(pg) && aligned16(pu)) fwd_kernel<T, VEC><<<ceil_div(n, 256 * VEC), 256, 0, stream_of(g)>>>(pg, pu, py, n);
        else fwd_kernel<T, 1><<<ceil_div(n, 256), 256, 0, stream_of(g)>>>(pg, pu, py, n);
    });
    check_launch("swiglu forward");
    return y;
}
std::tuple<Tensor, Tensor> swiglu_backward(const Tensor& dy_, const Tensor& gate_, const Tensor& up_) {
    const Tensor d = torch::stable::contiguous(dy_), g = torch::stable::contiguous(gate_), u = torch::stable::contiguous(up_);
    Tensor dg = torch::stable::empty_like(g), du = torch::stable::empty_like(u);
    const int64_t n = g.numel();
    if (!n) return {dg, du};
    torch::stable::accelerator::DeviceGuard guard(g.get_device_index());
    DISPATCH(g.scalar_type(), "swiglu", {
        constexpr int VEC = 16 / sizeof(T);
        const T *pd = (const T*)d.const_data_ptr(), *pg = (const T*)g.const_data_ptr(), *pu = (const T*)u.const_data_ptr();
        T *pdg = (T*)dg.mutable_data_ptr(), *pdu = (T*)du.mutable_data_ptr();
        if (aligned16(pd) && aligned16(pg) && aligned16(pu)) bwd_kernel<T, VEC><<<ceil_div(n, 256 * VEC), 256, 0, stream_of(g)>>>(pd, pg, pu, pdg, pdu, n);
        else bwd_kernel<T, 1><<<ceil_div(n, 256), 256, 0, stream_of(g)>>>(pd, pg, pu, pdg, pdu, n);
    });
    check_launch("swiglu backward");
    return {dg, du};
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {
    m.impl("swiglu", TORCH_BOX(&swiglu));
    m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward));
}
#endif

// The CPU half: float32 only, one loop.
Tensor swiglu_cpu(const Tensor& gate_, const Tensor& up_) {
    const Tensor g = torch::stable::contiguous(gate_), u = torch::stable::contiguous(up_);
    STD_TORCH_CHECK(g.scalar_type() == ScalarType::Float, "swiglu: the CPU half takes float32");
    Tensor y = torch::stable::empty_like(g);
    const float *pg = g.const_data_ptr<float>(), *pu = u.const_data_ptr<float>();
    float* py = y.mutable_data_ptr<float>();
    for (int64_t i = 0; i < g.numel(); i++) py[i] = forward_one(pg[i], pu[i]);
    return y;
}
std::tuple<Tensor, Tensor> swiglu_backward_cpu(const Tensor& dy_, const Tensor& gate_, const Tensor& up_) {
    const Tensor d = torch::stable::contiguous(dy_), g = torch::stable::contiguous(gate_), u = torch::stable::contiguous(up_);
    STD_TORCH_CHECK(g.scalar_type() == ScalarType::Float, "swiglu: the CPU half takes float32");
    Tensor dg = torch::stable::empty_like(g), du = torch::stable::empty_like(u);
    const float *pd = d.const_data_ptr<float>(), *pg = g.const_data_ptr<float>(), *pu = u.const_data_ptr<float>();
    float *pdg = dg.mutable_data_ptr<float>(), *pdu = du.mutable_data_ptr<float>();
    for (int64_t i = 0; i < g.numel(); i++) backward_one<float>(pd[i], pg[i], pu[i], pdg[i], pdu[i]);
    return {dg, du};
}
STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
    m.def("swiglu_backward(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CPU, m) {
    m.impl("swiglu", TORCH_BOX(&swiglu_cpu));
    m.impl("swiglu_backward", TORCH_BOX(&swiglu_backward_cpu));
}
