// Rotary embedding, rotate-half: y = x*cos + rotate_half(x)*sin, and the same behind a per-head RMSNorm (QK-norm) in one pass.
// A head is a row of D channels; one lane holds the same VEC channels of both halves, so a rotation needs no exchange.
// A group of lanes turns HEADS heads of one token: their loads are all in flight together, and the tables are read once for
// them. Every product and sum is rounded to T where torch's ops would round, so rope has the bits of `rope_ref`.
// The gradient of a rotation is the rotation back. dw of the norm is summed per block over a fixed set of rows, then in block order.
#include "common.cuh"

#ifdef __CUDACC__
// Heads that one group of lanes turns at once, and threads of a block
#ifndef TURN_HEADS
#define TURN_HEADS 4
#define TURN_THREADS 128
#define GRAD_HEADS 2
#define GRAD_THREADS 128
#endif

struct Strides { int64_t b, h, t; };
// x is [B, H, T, D] with any strides but a dense last axis. An item is one token and every `groups`-th of its heads; items are
// numbered in the order of x's memory, so that neighbouring lanes touch neighbouring addresses.
struct Shape {
    int64_t B, H, T, items;
    Strides x, y, g, cs, sn;                                      // of x, the result, the gradient and the tables (0: the axis is shared)
    int D, lanes, groups;
    bool heads_inside;                                            // memory order B, T, H (what a projection writes), else B, H, T
    __device__ __forceinline__ void split(int64_t item, int64_t& b, int64_t& h, int64_t& t) const {
        const int64_t n1 = heads_inside ? groups : T, n2 = heads_inside ? T : groups;
        int64_t i1, i2;
        if (item >> 31) { i1 = item % n1; item /= n1; i2 = item % n2; b = item / n2; }
        else {                                                    // 32-bit division is several times cheaper
            unsigned r = (unsigned)item, m1 = (unsigned)n1, m2 = (unsigned)n2;
            i1 = r % m1; r /= m1; i2 = r % m2; b = r / m2;
        }
        h = heads_inside ? i1 : i2; t = heads_inside ? i2 : i1;
    }
    __device__ __forceinline__ int64_t heads(int64_t h) const { return (H - h + groups - 1) / groups; }
};
__device__ __forceinline__ int64_t place(const Strides& s, int64_t b, int64_t h, int64_t t) { return b * s.b + h * s.h + t * s.t; }

template <class T, int VEC> using Half = Vec<T, VEC>;             // one lane's channels of one half of a head
template <class T, int VEC> struct Head { Half<T, VEC> lo, hi; };
template <class T, int VEC> __device__ __forceinline__ Head<T, VEC> load_head(const T* p, int half) { return {Half<T, VEC>::load(p), Half<T, VEC>::load(p + half)}; }

// One rounded product or sum for a lane's channels: in pairs, or one by one where VEC is 1
template <class T, int VEC> __device__ __forceinline__ Half<T, VEC> times(const Half<T, VEC>& a, const Half<T, VEC>& b) {
    Half<T, VEC> o;
    if constexpr (VEC == 1) o.set(0, a[0] * b[0]);
    else
#pragma unroll
        for (int i = 0; i < VEC / 2; i++) o.pair(i) = mul_rn(a.pair(i), b.pair(i));
    return o;
}
template <class T, int VEC> __device__ __forceinline__ Half<T, VEC> plus(const Half<T, VEC>& a, const Half<T, VEC>& b) {
    Half<T, VEC> o;
    if constexpr (VEC == 1) o.set(0, a[0] + b[0]);
    else
#pragma unroll
        for (int i = 0; i < VEC / 2; i++) o.pair(i) = add_rn(a.pair(i), b.pair(i));
    return o;
}
template <class T, int VEC> __device__ __forceinline__ Half<T, VEC> minus(Half<T, VEC> a) {
    if constexpr (VEC == 1) a.set(0, -a[0]);
    else
#pragma unroll
        for (int i = 0; i < VEC / 2; i++) a.pair(i) = negative(a.pair(i));
    return a;
}
// w * round(x * r), rounded again: the order of roundings of rms_norm
template <class T, int VEC> __device__ __forceinline__ Half<T, VEC> normed(const Half<T, VEC>& x, float r, const Half<T, VEC>& w) {
    Half<T, VEC> o;
#pragma unroll
    for (int i = 0; i < VEC; i++) o.set(i, x[i] * r);
    return times(w, o);
}
template <class T, int VEC> __device__ __forceinline__ Half<T, VEC> load_gain(const void* w, bool w_f32, int i) {
    Half<T, VEC> o;
#pragma unroll
    for (int k = 0; k < VEC; k++) o.set(k, gain<T>(w, w_f32, i + k));
    return o;
}
// Sums over `lanes` neighbouring lanes of N numbers at once, so that their exchanges overlap
template <int N> __device__ __forceinline__ void lane_sums(float (&x)[N], int lanes) {
    for (int o = lanes >> 1; o; o >>= 1)
#pragma unroll
        for (int k = 0; k < N; k++) x[k] += __shfl_xor_sync(~0u, x[k], o);
}

// y = turn(x) or turn(norm(x)); BACK turns by the negative angle, which is the gradient.
template <class T, int VEC, int HEADS, bool NORM, bool BACK>
__global__ void __launch_bounds__(TURN_THREADS) turn_kernel(const T* __restrict__ x, const T* __restrict__ cs, const T* __restrict__ sn, const void* __restrict__ w, bool w_f32, T* __restrict__ y, Shape S, float eps) {
    const int lane = threadIdx.x % S.lanes, half = S.D / 2;
    const int64_t item = blockIdx.x * (int64_t)(blockDim.x / S.lanes) + threadIdx.x / S.lanes;
    int64_t b, h, t;
    S.split(item < S.items ? item : 0, b, h, t);
    const int64_t heads = item < S.items ? S.heads(h) : 0;
    const T* px = x + place(S.x, b, h, t);
    T* py = y + place(S.y, b, h, t);
    const T *pc = cs + place(S.cs, b, h, t), *ps = sn + place(S.sn, b, h, t);
    const int64_t dx = S.groups * S.x.h, dy = S.groups * S.y.h;
    for (int c = lane * VEC; c < half || (NORM && c == lane * VEC); c += S.lanes * VEC) {      // one turn, except for wide or ragged heads
        const bool on = c < half;
        Head<T, VEC> v[HEADS];
#pragma unroll
        for (int k = 0; k < HEADS; k++) if (on && k < heads) v[k] = load_head<T, VEC>(px + k * dx + c, half);
        Head<T, VEC> cv, sv;
        if (on && heads) { cv = load_head<T, VEC>(pc + c, half); sv = load_head<T, VEC>(ps + c, half); }
        if constexpr (NORM) {
            float ss[HEADS] = {};
#pragma unroll
            for (int k = 0; k < HEADS; k++) if (on && k < heads)
#pragma unroll
                for (int i = 0; i < VEC; i++) ss[k] += v[k].lo[i] * v[k].lo[i] + v[k].hi[i] * v[k].hi[i];
            lane_sums(ss, S.lanes);
            if (on && heads) {
                const Half<T, VEC> w1 = load_gain<T, VEC>(w, w_f32, c), w2 = load_gain<T, VEC>(w, w_f32, half + c);
#pragma unroll
                for (int k = 0; k < HEADS; k++) {
                    const float r = __frsqrt_rn(ss[k] / S.D + eps);
                    v[k].lo = normed(v[k].lo, r, w1); v[k].hi = normed(v[k].hi, r, w2);
                }
            }
        }
        const Half<T, VEC> s1 = BACK ? sv.hi : minus(sv.lo), s2 = BACK ? minus(sv.lo) : sv.hi;
#pragma unroll
        for (int k = 0; k < HEADS; k++) if (on && k < heads) {
            plus(times(v[k].lo, cv.lo), times(v[k].hi, s1)).store(py + k * dy + c);
            plus(times(v[k].hi, cv.hi), times(v[k].lo, s2)).store(py + k * dy + half + c);
        }
    }
}

// Gradient of turn(norm(x)). With a = the gradient turned back, r = 1/rms and k = mean(a*w*x) * r^2:
// dx = r * (a*w - x*k),  dw = sum over heads and tokens of a * x * r.  All in float32, rounded once.
template <class T, int VEC, int HEADS>
__global__ void __launch_bounds__(GRAD_THREADS) grad_kernel(const T* __restrict__ g, const T* __restrict__ x, const T* __restrict__ cs, const T* __restrict__ sn, const void* __restrict__ w, bool w_f32,
                                                            T* __restrict__ dx, float* __restrict__ dw_part, Shape S, float eps) {
    extern __shared__ float acc[];
    const int lane = threadIdx.x % S.lanes, slot = threadIdx.x / S.lanes, slots = blockDim.x / S.lanes, half = S.D / 2, c = lane * VEC;
    const bool on = c < half;
    float dw1[VEC] = {}, dw2[VEC] = {};
    Half<T, VEC> w1, w2;
    if (on) { w1 = load_gain<T, VEC>(w, w_f32, c); w2 = load_gain<T, VEC>(w, w_f32, half + c); }
    for (int64_t base = blockIdx.x * (int64_t)slots; base < S.items; base += (int64_t)gridDim.x * slots) {
        const int64_t item = base + slot;
        int64_t b, h, t;
        S.split(item < S.items ? item : 0, b, h, t);
        const int64_t heads = on && item < S.items ? S.heads(h) : 0;
        const T *pg = g + place(S.g, b, h, t) + c, *px = x + place(S.x, b, h, t) + c;
        T* pd = dx + place(S.y, b, h, t) + c;
        Head<T, VEC> gv[HEADS], xv[HEADS], cv, sv;
#pragma unroll
        for (int k = 0; k < HEADS; k++) if (k < heads) {
            xv[k] = load_head<T, VEC>(px + k * S.groups * S.x.h, half);
            gv[k] = load_head<T, VEC>(pg + k * S.groups * S.g.h, half);
        }
        if (heads) { cv = load_head<T, VEC>(cs + place(S.cs, b, h, t) + c, half); sv = load_head<T, VEC>(sn + place(S.sn, b, h, t) + c, half); }
        auto back1 = [&](int k, int i) { return gv[k].lo[i] * cv.lo[i] + gv[k].hi[i] * sv.hi[i]; };
        auto back2 = [&](int k, int i) { return gv[k].hi[i] * cv.hi[i] - gv[k].lo[i] * sv.lo[i]; };
        float sums[2 * HEADS] = {};                               // x^2 and a*w*x of each head
#pragma unroll
        for (int k = 0; k < HEADS; k++) if (k < heads)
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                sums[2 * k] += xv[k].lo[i] * xv[k].lo[i] + xv[k].hi[i] * xv[k].hi[i];
                sums[2 * k + 1] += back1(k, i) * w1[i] * xv[k].lo[i] + back2(k, i) * w2[i] * xv[k].hi[i];
            }
        lane_sums(sums, S.lanes);
#pragma unroll
        for (int k = 0; k < HEADS; k++) if (k < heads) {
            const float r = __frsqrt_rn(sums[2 * k] / S.D + eps), m = sums[2 * k + 1] / S.D * r * r;
            Half<T, VEC> o1, o2;
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                const float a = back1(k, i), z = back2(k, i), u = xv[k].lo[i], v = xv[k].hi[i];
                dw1[i] += a * (u * r); dw2[i] += z * (v * r);
                o1.set(i, r * (a * w1[i] - u * m)); o2.set(i, r * (z * w2[i] - v * m));
            }
            o1.store(pd + k * S.groups * S.y.h); o2.store(pd + k * S.groups * S.y.h + half);
        }
    }
    // the block's share of dw: its slots one after the other
    if (on)
#pragma unroll
        for (int i = 0; i < VEC; i++) { acc[slot * S.D + c + i] = dw1[i]; acc[slot * S.D + half + c + i] = dw2[i]; }
    __syncthreads();
    for (int j = threadIdx.x; j < S.D; j += blockDim.x) {
        float s = 0.f;
        for (int k = 0; k < slots; k++) s += acc[k * S.D + j];
        dw_part[blockIdx.x * (int64_t)S.D + j] = s;
    }
}

inline Tensor dense_last(const Tensor& x) { return x.stride(x.dim() - 1) == 1 ? x : torch::stable::contiguous(x); }
// Do rows begin at 16-byte boundaries?
inline bool vectors(const Tensor& t, int vec) {
    if (!aligned16(t.const_data_ptr())) return false;
    for (int i = 0; i + 1 < t.dim(); i++) if (t.size(i) > 1 && t.stride(i) % vec) return false;
    return true;
}
inline Tensor with_vectors(const Tensor& t, int vec) { return vectors(t, vec) ? t : torch::stable::clone(t); }
// Strides of the axes B, H, T of a tensor in that order, or of a table that broadcasts to it
inline Strides strides_of(const Tensor& t) {
    const int n = (int)t.dim();
    auto stride = [&](int i) { return n > i && t.size(n - 1 - i) > 1 ? (int64_t)t.stride(n - 1 - i) : 0; };
    return {stride(3), stride(2), stride(1)};
}
template <int HEADS> Shape shape_of(const Tensor& x, const Tensor& y, const Tensor& g, const Tensor& cs, const Tensor& sn, int lanes) {
    Shape S{x.size(0), x.size(1), x.size(2), 0, strides_of(x), strides_of(y), strides_of(g), strides_of(cs), strides_of(sn), (int)x.size(3), lanes, 0, false};
    S.heads_inside = S.x.t >= S.x.h;
    S.groups = (int)ceil_div(S.H, HEADS);
    S.items = S.B * S.T * S.groups;
    return S;
}

// x and y are [B, H, T, D] of any memory order
template <bool NORM, bool BACK> void turn(const Tensor& x_, const Tensor& cs_, const Tensor& sn_, const Tensor* w, double eps, Tensor& y) {
    if (!x_.numel()) return;
    const int D = (int)x_.size(3);
    torch::stable::accelerator::DeviceGuard guard(x_.get_device_index());
    const cudaStream_t s = stream_of(x_);
    const bool w_f32 = NORM && w->scalar_type() == ScalarType::Float;
    DISPATCH(x_.scalar_type(), "rope", {
        constexpr int VEC = 16 / sizeof(T);
        const bool whole = D % (2 * VEC) == 0;
        STD_TORCH_CHECK(!NORM || (whole && D <= 64 * VEC), "qk_norm_rope: head_dim must be a multiple of ", 2 * VEC, " up to ", 64 * VEC, ", got ", D);
        const Tensor x = whole ? with_vectors(dense_last(x_), VEC) : dense_last(x_), cs = whole ? with_vectors(dense_last(cs_), VEC) : dense_last(cs_), sn = whole ? with_vectors(dense_last(sn_), VEC) : dense_last(sn_);
        const int vec = whole ? VEC : 1, lanes = pow2_at_least(D / 2 / vec < 32 ? D / 2 / vec : 32);
        const bool shared = strides_of(cs).h == 0 && strides_of(sn).h == 0;      // one angle for all heads of a token
        const Shape S = whole && shared ? shape_of<TURN_HEADS>(x, y, x, cs, sn, lanes) : shape_of<1>(x, y, x, cs, sn, lanes);
        const int64_t blocks = ceil_div(S.items, TURN_THREADS / lanes);
        const T *px = (const T*)x.const_data_ptr(), *pc = (const T*)cs.const_data_ptr(), *ps = (const T*)sn.const_data_ptr();
        const void* pw = NORM ? w->const_data_ptr() : nullptr;
        T* py = (T*)y.mutable_data_ptr();
        if (whole && shared) turn_kernel<T, VEC, TURN_HEADS, NORM, BACK><<<blocks, TURN_THREADS, 0, s>>>(px, pc, ps, pw, w_f32, py, S, (float)eps);
        else if (whole) turn_kernel<T, VEC, 1, NORM, BACK><<<blocks, TURN_THREADS, 0, s>>>(px, pc, ps, pw, w_f32, py, S, (float)eps);
        else if constexpr (!NORM) turn_kernel<T, 1, 1, NORM, BACK><<<blocks, TURN_THREADS, 0, s>>>(px, pc, ps, pw, w_f32, py, S, (float)eps);
    });
    check_launch("rope");
}
Tensor rope(const Tensor& x, const Tensor& cs, const Tensor& sn) {
    Tensor y = torch::stable::empty_like(dense_last(x));
    turn<false, false>(x, cs, sn, nullptr, 0, y);
    return y;
}
Tensor rope_backward(const Tensor& g, const Tensor& cs, const Tensor& sn) {
    Tensor dx = torch::stable::empty_like(dense_last(g));
    turn<false, true>(g, cs, sn, nullptr, 0, dx);
    return dx;
}
// x is [B, T, H, D], as a projection writes it; the result is [B, H, T, D], as attention reads it, in the same memory order
inline Tensor heads_first(const Tensor& x) { return torch::stable::transpose(x, 1, 2); }
Tensor qk_norm_rope(const Tensor& x, const Tensor& w_, const Tensor& cs, const Tensor& sn, double eps) {
    const Tensor w = torch::stable::contiguous(w_);
    Tensor y = heads_first(torch::stable::new_empty(x, {x.size(0), x.size(1), x.size(2), x.size(3)}));
    turn<true, false>(heads_first(x), cs, sn, &w, eps, y);
    return y;
}
std::tuple<Tensor, Tensor> qk_norm_rope_backward(const Tensor& g_, const Tensor& x_, const Tensor& w_, const Tensor& cs_, const Tensor& sn_, double eps) {
    const Tensor w = torch::stable::contiguous(w_);
    Tensor dx = torch::stable::new_empty(x_, {x_.size(0), x_.size(1), x_.size(2), x_.size(3)}), dw = torch::stable::empty_like(w);
    if (!x_.numel()) { torch::stable::zero_(dw); return {dx, dw}; }
    const int D = (int)x_.size(3);
    torch::stable::accelerator::DeviceGuard guard(x_.get_device_index());
    const cudaStream_t s = stream_of(x_);
    const bool w_f32 = w.scalar_type() == ScalarType::Float;
    DISPATCH(x_.scalar_type(), "qk_norm_rope", {
        constexpr int VEC = 16 / sizeof(T);
        STD_TORCH_CHECK(D % (2 * VEC) == 0 && D <= 64 * VEC, "qk_norm_rope: head_dim must be a multiple of ", 2 * VEC, " up to ", 64 * VEC, ", got ", D);
        const Tensor g = with_vectors(dense_last(g_), VEC), x = heads_first(with_vectors(dense_last(x_), VEC)), cs = with_vectors(dense_last(cs_), VEC), sn = with_vectors(dense_last(sn_), VEC), out = heads_first(dx);
        const int lanes = pow2_at_least(D / 2 / VEC), slots = GRAD_THREADS / lanes;
        const bool shared = strides_of(cs).h == 0 && strides_of(sn).h == 0;
        const Shape S = shared ? shape_of<GRAD_HEADS>(x, out, g, cs, sn, lanes) : shape_of<1>(x, out, g, cs, sn, lanes);
        const auto kernel = shared ? grad_kernel<T, VEC, GRAD_HEADS> : grad_kernel<T, VEC, 1>;
        const size_t smem = slots * D * sizeof(float);
        int resident = 1;
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, GRAD_THREADS, smem);
        const int64_t want = (int64_t)sm_count() * resident, have = ceil_div(S.items, slots), parts = want < have ? want : have;
        Tensor part = torch::stable::new_empty(x, {parts, (int64_t)D}, ScalarType::Float);
        kernel<<<parts, GRAD_THREADS, smem, s>>>((const T*)g.const_data_ptr(), (const T*)x.const_data_ptr(), (const T*)cs.const_data_ptr(), (const T*)sn.const_data_ptr(), w.const_data_ptr(), w_f32,
                                                 (T*)dx.mutable_data_ptr(), (float*)part.mutable_data_ptr(), S, (float)eps);
        check_launch("qk_norm_rope gradient");
        const dim3 block(32, 32);
        if (w_f32) sum_parts<float><<<ceil_div(D, 32), block, 0, s>>>((const float*)part.const_data_ptr(), (float*)dw.mutable_data_ptr(), (int)parts, D);
        else sum_parts<T><<<ceil_div(D, 32), block, 0, s>>>((const float*)part.const_data_ptr(), (T*)dw.mutable_data_ptr(), (int)parts, D);
    });
    check_launch("qk_norm_rope gain gradient");
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
