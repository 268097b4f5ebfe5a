// Rotary embedding, rotate-half: y = x*cos + rotate_half(x)*sin, and the same behind a per-head RMSNorm (QK-norm) in one pass.
// A head is a row of D channels; one thread holds the same VEC channels of both halves, so a rotation needs no exchange.
// The gradient of a rotation is the rotation back. dw of the norm is summed per block over a fixed set of rows, then in block order.
#include "common.cuh"

#ifdef __CUDACC__
#ifndef ROPE_BLOCKS
#define ROPE_BLOCKS 4
#endif
// x is [B, H, T, D] with any strides but a dense last axis; its rows are walked in memory order, `tpr` threads a row.
struct Shape {
    int64_t B, H, T, xb, xh, xt, yb, yh, yt, gb, gh, gt, tb;      // strides of x, of the result, of the gradient; tb: of the tables' batch axis, 0 if shared
    int D, tpr;
    bool heads_inside;                                            // memory order B, T, H (what a projection writes), else B, H, T
    __device__ __forceinline__ void split(int64_t row, int64_t& b, int64_t& h, int64_t& t) const {
        const int64_t n1 = heads_inside ? H : T, n2 = heads_inside ? T : H;
        int64_t i1, i2;
        if (row >> 31) { i1 = row % n1; row /= n1; i2 = row % n2; b = row / n2; }
        else {                                                    // 32-bit division is several times cheaper
            unsigned r = (unsigned)row, m1 = (unsigned)n1, m2 = (unsigned)n2;
            i1 = r % m1; r /= m1; i2 = r % m2; b = r / m2;
        }
        h = heads_inside ? i1 : i2; t = heads_inside ? i2 : i1;
    }
};
template <class T, int VEC, bool NORM>
__global__ void __launch_bounds__(256) fwd_kernel(const T* __restrict__ x, const T* __restrict__ cs, const T* __restrict__ sn, const void* __restrict__ w, bool w_f32, T* __restrict__ y, Shape S, float eps) {
    using V = Vec<T, VEC>;
    const int lane = threadIdx.x % S.tpr, half = S.D / 2;
    const int64_t row = blockIdx.x * (int64_t)(blockDim.x / S.tpr) + threadIdx.x / S.tpr;
    const bool live = row < S.B * S.H * S.T;
    int64_t b, h, t;
    S.split(live ? row : 0, b, h, t);
    const T* px = x + b * S.xb + h * S.xh + t * S.xt;
    T* py = y + b * S.yb + h * S.yh + t * S.yt;
    const int64_t tab = b * S.tb + t * S.D;
    for (int c0 = 0; c0 < half; c0 += S.tpr * VEC) {              // one turn, except for rows too wide or ragged for vectors
        const int c = c0 + lane * VEC;
        const bool on = live && c < half;
        V lo, hi, a, z;
        if (on) { lo = V::load(px + c); hi = V::load(px + half + c); }
        float r = 1.f;
        if (NORM) {
            float ss = 0.f;
            if (on)
#pragma unroll
                for (int i = 0; i < VEC; i++) ss += lo[i] * lo[i] + hi[i] * hi[i];
            r = __frsqrt_rn(lane_sum(ss, S.tpr) / S.D + eps);
        }
        if (!on) continue;
        const V c1 = V::load(cs + tab + c), c2 = V::load(cs + tab + half + c), s1 = V::load(sn + tab + c), s2 = V::load(sn + tab + half + c);
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            const float p = NORM ? gain<T>(w, w_f32, c + i) * (lo[i] * r) : lo[i], q = NORM ? gain<T>(w, w_f32, half + c + i) * (hi[i] * r) : hi[i];
            a.set(i, p * c1[i] - q * s1[i]);
            z.set(i, q * c2[i] + p * s2[i]);
        }
        a.store(py + c); z.store(py + half + c);
    }
}

template <class T, int VEC, bool NORM>
__global__ void __launch_bounds__(256) bwd_kernel(const T* __restrict__ g, const T* __restrict__ x, const T* __restrict__ cs, const T* __restrict__ sn, const void* __restrict__ w, bool w_f32,
                                                  T* __restrict__ dx, float* __restrict__ dw_part, Shape S, float eps) {
    using V = Vec<T, VEC>;
    extern __shared__ float acc[];
    const int lane = threadIdx.x % S.tpr, slot = threadIdx.x / S.tpr, per_block = blockDim.x / S.tpr, half = S.D / 2;
    const int64_t rows = S.B * S.H * S.T;
    float dw1[VEC] = {}, dw2[VEC] = {}, w1[VEC], w2[VEC];
    if (NORM && lane * VEC < half)
#pragma unroll
        for (int i = 0; i < VEC; i++) { w1[i] = gain<T>(w, w_f32, lane * VEC + i); w2[i] = gain<T>(w, w_f32, half + lane * VEC + i); }
    for (int64_t base = blockIdx.x * (int64_t)per_block; base < rows; base += (int64_t)gridDim.x * per_block) {
        const int64_t row = base + slot;
        const bool live = row < rows;
        int64_t b, h, t;
        S.split(live ? row : 0, b, h, t);
        const T *pg = g + b * S.gb + h * S.gh + t * S.gt, *px = x + b * S.xb + h * S.xh + t * S.xt;
        T* pd = dx + b * S.yb + h * S.yh + t * S.yt;
        const int64_t tab = b * S.tb + t * S.D;
        for (int c0 = 0; c0 < half; c0 += S.tpr * VEC) {
            const int c = c0 + lane * VEC;
            const bool on = live && c < half;
            V g1, g2, x1, x2, o1, o2;
            float a[VEC], z[VEC];
            if (on) {
                g1 = V::load(pg + c); g2 = V::load(pg + half + c);
                if (NORM) { x1 = V::load(px + c); x2 = V::load(px + half + c); }
                const V c1 = V::load(cs + tab + c), c2 = V::load(cs + tab + half + c), s1 = V::load(sn + tab + c), s2 = V::load(sn + tab + half + c);
#pragma unroll
                for (int i = 0; i < VEC; i++) { a[i] = g1[i] * c1[i] + g2[i] * s2[i]; z[i] = g2[i] * c2[i] - g1[i] * s1[i]; }
            }
            if (NORM) {
                float ss = 0.f, dot = 0.f;
                if (on)
#pragma unroll
                    for (int i = 0; i < VEC; i++) { ss += x1[i] * x1[i] + x2[i] * x2[i]; dot += a[i] * w1[i] * x1[i] + z[i] * w2[i] * x2[i]; }
                const float r = __frsqrt_rn(lane_sum(ss, S.tpr) / S.D + eps), k = lane_sum(dot, S.tpr) / S.D * r * r;
                if (on)
#pragma unroll
                    for (int i = 0; i < VEC; i++) {
                        dw1[i] += a[i] * x1[i] * r; dw2[i] += z[i] * x2[i] * r;
                        a[i] = r * (a[i] * w1[i] - x1[i] * k); z[i] = r * (z[i] * w2[i] - x2[i] * k);
                    }
            }
            if (!on) continue;
#pragma unroll
            for (int i = 0; i < VEC; i++) { o1.set(i, a[i]); o2.set(i, z[i]); }
            o1.store(pd + c); o2.store(pd + half + c);
        }
    }
    if (NORM) {                                                   // the block's share of dw: its row slots one after the other
        const int c = lane * VEC;
        if (c < half)
#pragma unroll
            for (int i = 0; i < VEC; i++) { acc[slot * S.D + c + i] = dw1[i]; acc[slot * S.D + half + c + i] = dw2[i]; }
        __syncthreads();
        for (int k = threadIdx.x; k < S.D; k += blockDim.x) {
            float s = 0.f;
            for (int j = 0; j < per_block; j++) s += acc[j * S.D + k];
            dw_part[blockIdx.x * (int64_t)S.D + k] = s;
        }
    }
}

inline Tensor dense_last(const Tensor& x) { return x.stride(3) == 1 ? x : torch::stable::contiguous(x); }
inline bool vector_ok(const Tensor& t, int vec) {
    if (!aligned16(t.const_data_ptr())) return false;
    for (int i = 0; i < 3; i++) if (t.stride(i) % vec) return false;
    return true;
}
Shape shape_of(const Tensor& x, const Tensor& y, const Tensor& g, const Tensor& cs, int tpr) {
    Shape S{x.size(0), x.size(1), x.size(2), x.stride(0), x.stride(1), x.stride(2), y.stride(0), y.stride(1), y.stride(2), g.stride(0), g.stride(1), g.stride(2), 0, (int)x.size(3), tpr, x.stride(2) >= x.stride(1)};
    if (cs.numel() != S.T * S.D) S.tb = S.T * S.D;
    return S;
}

template <bool NORM> Tensor forward(const Tensor& x_, const Tensor& cs_, const Tensor& sn_, const Tensor* w, double eps) {
    const Tensor x = dense_last(x_), cs = torch::stable::contiguous(cs_), sn = torch::stable::contiguous(sn_);
    Tensor y = torch::stable::empty_like(x);
    const int D = (int)x.size(3);
    const int64_t n = x.numel() / (D ? D : 1);
    if (!n || !D) return y;
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    const cudaStream_t s = stream_of(x);
    const bool w_f32 = NORM && w->scalar_type() == ScalarType::Float;
    DISPATCH(x.scalar_type(), "rope", {
        constexpr int VEC = 16 / sizeof(T);
        const bool fast = D % (2 * VEC) == 0 && D <= 64 * VEC && vector_ok(x, VEC) && vector_ok(y, VEC) && aligned16(cs.const_data_ptr()) && aligned16(sn.const_data_ptr());
        const int tpr = fast ? pow2_at_least(D / 2 / VEC) : NORM ? 32 : pow2_at_least(D / 2 < 32 ? D / 2 : 32);
        STD_TORCH_CHECK(!NORM || fast || D <= 64, "qk_norm_rope: head_dim above 64 must be a multiple of ", 2 * VEC, " and 16-byte aligned; got ", D);
        const Shape S = shape_of(x, y, x, cs, tpr);
        const int64_t blocks = ceil_div(n, 256 / tpr);
        const T *px = (const T*)x.const_data_ptr(), *pc = (const T*)cs.const_data_ptr(), *ps = (const T*)sn.const_data_ptr();
        const void* pw = NORM ? w->const_data_ptr() : nullptr;
        T* py = (T*)y.mutable_data_ptr();
        if (fast) fwd_kernel<T, VEC, NORM><<<blocks, 256, 0, s>>>(px, pc, ps, pw, w_f32, py, S, (float)eps);
        else fwd_kernel<T, 1, NORM><<<blocks, 256, 0, s>>>(px, pc, ps, pw, w_f32, py, S, (float)eps);
    });
    check_launch("rope forward");
    return y;
}
template <bool NORM> void backward(const Tensor& g_, const Tensor& x, const Tensor& cs_, const Tensor& sn_, const Tensor* w, double eps, Tensor& dx, Tensor* dw) {
    const Tensor g = dense_last(g_), cs = torch::stable::contiguous(cs_), sn = torch::stable::contiguous(sn_);
    const int D = (int)g.size(3);
    const int64_t n = g.numel() / (D ? D : 1);
    if (!n || !D) { if (NORM) torch::stable::zero_(*dw); return; }
    torch::stable::accelerator::DeviceGuard guard(g.get_device_index());
    const cudaStream_t s = stream_of(g);
    const bool w_f32 = NORM && w->scalar_type() == ScalarType::Float;
    DISPATCH(g.scalar_type(), "rope", {
        constexpr int VEC = 16 / sizeof(T);
        const bool fast = D % (2 * VEC) == 0 && D <= 64 * VEC && vector_ok(x, VEC) && vector_ok(g, VEC) && vector_ok(dx, VEC) && aligned16(cs.const_data_ptr()) && aligned16(sn.const_data_ptr());
        const int tpr = fast ? pow2_at_least(D / 2 / VEC) : NORM ? 32 : pow2_at_least(D / 2 < 32 ? D / 2 : 32);
        const Shape S = shape_of(x, dx, g, cs, tpr);
        int64_t blocks = ceil_div(n, 256 / tpr);
        if (NORM && blocks > sm_count() * ROPE_BLOCKS) blocks = sm_count() * ROPE_BLOCKS;
        Tensor part = g;
        if (NORM) part = torch::stable::new_empty(g, {blocks, (int64_t)D}, ScalarType::Float);
        float* pp = NORM ? (float*)part.mutable_data_ptr() : nullptr;
        const size_t smem = NORM ? 256 / tpr * D * sizeof(float) : 0;
        const T *pg = (const T*)g.const_data_ptr(), *px = (const T*)x.const_data_ptr(), *pc = (const T*)cs.const_data_ptr(), *ps = (const T*)sn.const_data_ptr();
        const void* pw = NORM ? w->const_data_ptr() : nullptr;
        T* pd = (T*)dx.mutable_data_ptr();
        if (fast) bwd_kernel<T, VEC, NORM><<<blocks, 256, smem, s>>>(pg, px, pc, ps, pw, w_f32, pd, pp, S, (float)eps);
        else bwd_kernel<T, 1, NORM><<<blocks, 256, smem, s>>>(pg, px, pc, ps, pw, w_f32, pd, pp, S, (float)eps);
        if (NORM) {
            const dim3 block(32, 32);
            if (w_f32) sum_parts<float><<<ceil_div(D, 32), block, 0, s>>>(pp, (float*)dw->mutable_data_ptr(), (int)blocks, D);
            else sum_parts<T><<<ceil_div(D, 32), block, 0, s>>>(pp, (T*)dw->mutable_data_ptr(), (int)blocks, D);
        }
    });
    check_launch("rope backward");
}
Tensor rope(const Tensor& x, const Tensor& cs, const Tensor& sn) { return forward<false>(x, cs, sn, nullptr, 0); }
Tensor rope_backward(const Tensor& g_, const Tensor& cs, const Tensor& sn) {
    const Tensor g = dense_last(g_);
    Tensor dx = torch::stable::empty_like(g);
    backward<false>(g, g, cs, sn, nullptr, 0, dx, nullptr);
    return dx;
}
Tensor qk_norm_rope(const Tensor& x, const Tensor& w_, const Tensor& cs, const Tensor& sn, double eps) {
    const Tensor w = torch::stable::contiguous(w_);
    return forward<true>(x, cs, sn, &w, eps);
}
std::tuple<Tensor, Tensor> qk_norm_rope_backward(const Tensor& g, const Tensor& x_, const Tensor& w_, const Tensor& cs, const Tensor& sn, double eps) {
    const Tensor w = torch::stable::contiguous(w_), x = dense_last(x_);
    Tensor dx = torch::stable::empty_like(x), dw = torch::stable::empty_like(w);
    backward<true>(g, x, cs, sn, &w, eps, dx, &dw);
    return {dx, dw};
}
STABLE_TORCH_LIBRARY_IMPL(XTRAIN_NS, CUDA, m) {
    m.impl("rope", TORCH_BOX(&rope));
    m.impl("rope_backward", TORCH_BOX(&rope_backward));
    m.impl("qk_norm_rope", TORCH_BOX(&qk_norm_rope));
    m.impl("qk_norm_rope_backward", TORCH_BOX(&qk_norm_rope_backward));
}
#endif

STABLE_TORCH_LIBRARY_FRAGMENT(XTRAIN_NS, m) {
    m.def("rope(Tensor x, Tensor cos, Tensor sin) -> Tensor");
    m.def("rope_backward(Tensor g, Tensor cos, Tensor sin) -> Tensor");
    m.def("qk_norm_rope(Tensor x, Tensor w, Tensor cos, Tensor sin, float eps) -> Tensor");
    m.def("qk_norm_rope_backward(Tensor g, Tensor x, Tensor w, Tensor cos, Tensor sin, float eps) -> (Tensor, Tensor)");
}
