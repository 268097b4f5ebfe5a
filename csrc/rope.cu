// Rotary embedding, rotate-half: y = x*cos + rotate_half(x)*sin, and the same behind a per-head RMSNorm (QK-norm) in one pass.
// A head is a row of D channels, 16 bytes a lane; the other half of the rotation comes from the lane half a head away.
// A group of lanes turns several heads of one token: their loads are all in flight together, and the tables are read once for
// them. Every product and sum is rounded to T where torch's ops would round, so rope has the bits of `rope_ref`.
// The gradient of a rotation is the rotation back. dw of the norm is summed per block over a fixed set of rows, then in block order.
#include "common.cuh"

// `x` with its channels side by side in memory, so that a tensor which torch lays out alike has them so too. Rows that overlap (a sliding window) are
// copied: torch would lay out its like with the tokens side by side.
inline Tensor dense_last(const Tensor& x) {
    const int64_t last = x.dim() - 1;
    bool dense = x.stride(last) == 1;
    for (int64_t i = 0; i < last; i++) dense = dense && (x.size(i) < 2 || x.stride(i) == 0 || x.stride(i) >= x.size(last));
    return dense ? x : torch::stable::contiguous(x);
}

#ifdef __CUDACC__
// Measured on an H200. Behind a norm a group turns four heads at once, alone one; the norm's gradient takes four, two blocks on a multiprocessor.
template <bool NORM> constexpr int TURN_HEADS = NORM ? 4 : 1;
template <bool NORM> constexpr int TURN_THREADS = NORM ? 256 : 128;
constexpr int GRAD_HEADS = 4, GRAD_THREADS = 192, GRAD_BLOCKS = 2;
static_assert(GRAD_BLOCKS * ((2 * 2 * GRAD_HEADS * GRAD_THREADS * 16) + 1024) <= 100 << 10, "two stages of x and g for each block: a multiprocessor of sm_86, sm_89 and sm_120 has 100 KiB, of which the system keeps one a block");

template <class I> struct Strides { I b, h, t; };
// x is [B, H, T, D] with any strides but a dense last axis, which count vectors where a lane moves vectors (I is unsigned), else
// elements. An item is one token and every `groups`-th of its heads; items are numbered in the order of x's memory, so that
// neighbouring lanes touch neighbouring addresses.
template <class I> struct Shape {
    int64_t items;
    int B, H, T, D, lanes, shift, groups;                         // of a group: its lanes and their logarithm
    float2 one_over_D;
    bool heads_inside;                                            // memory order B, T, H (what a projection writes), else B, H, T
    Divisor inner, outer;                                         // of an item's number: sizes of the innermost axis, and of the next
    Strides<I> x, y, g, cs, sn;                                   // of x, the result, the gradient and the tables (0: the axis is shared)
    int64_t next_x, next_y, next_g;                               // from one head of an item to the next
    // The token (b, t) of an item and its first head h; the others are h + groups, h + 2 * groups, ...
    __device__ __forceinline__ void split(int64_t item, unsigned& b, unsigned& h, unsigned& t) const {
        unsigned i1, i2;
        if (item >> 31) {
            const int64_t q = item / inner.d;
            i1 = (unsigned)(item - q * inner.d); b = (unsigned)(q / outer.d); i2 = (unsigned)(q - b * (int64_t)outer.d);
        } else {
            const unsigned r = (unsigned)item, q = inner.quotient(r), p = outer.quotient(q);
            i1 = r - q * inner.d; i2 = q - p * outer.d; b = p;
        }
        h = heads_inside ? i1 : i2; t = heads_inside ? i2 : i1;
    }
};
template <class I> __device__ __forceinline__ int64_t place(const Strides<I>& s, unsigned b, unsigned h, unsigned t) { return (int64_t)((uint64_t)b * s.b + (uint64_t)h * s.h + (uint64_t)t * s.t); }

template <class T> constexpr int VEC = 16 / sizeof(T);
template <class T> using V = Vec<T, VEC<T>>;                      // one lane's channels

template <class T> __device__ __forceinline__ V<T> load_gain(const void* w, bool w_f32, int i) {
    V<T> o;
#pragma unroll
    for (int k = 0; k < VEC<T>; k++) o.set(k, gain<T>(w, w_f32, i + k));
    return o;
}
// What the lane `src` holds
template <class T> __device__ __forceinline__ V<T> from_lane(const V<T>& x, int src) {
    const int4 a = *reinterpret_cast<const int4*>(&x);
    const int4 b = {__shfl_sync(~0u, a.x, src), __shfl_sync(~0u, a.y, src), __shfl_sync(~0u, a.z, src), __shfl_sync(~0u, a.w, src)};
    return *reinterpret_cast<const V<T>*>(&b);
}

// y = turn(x) or turn(norm(x)); BACK turns by the negative angle, which is the gradient.
template <class T, int HEADS, bool NORM, bool BACK>
__global__ void __launch_bounds__(TURN_THREADS<NORM>) turn_kernel(const V<T>* __restrict__ x, const V<T>* __restrict__ cs, const V<T>* __restrict__ sn, const void* __restrict__ w, bool w_f32, V<T>* __restrict__ y, Shape<unsigned> S, float eps) {
    const int lane = threadIdx.x & (S.lanes - 1), vecs = S.D / VEC<T>, half = vecs / 2;
    const bool low = lane < half;
    const int64_t item = blockIdx.x * (int64_t)(TURN_THREADS<NORM> >> S.shift) + (threadIdx.x >> S.shift);
    const bool on = item < S.items && lane < vecs;
    unsigned b, h, t;
    S.split(item < S.items ? item : 0, b, h, t);
    V<T> v[HEADS] = {}, cv, sv;
    if (on) {
        x += place(S.x, b, h, t) + lane;
#pragma unroll
        for (int k = 0; k < HEADS; k++) v[k] = x[k * S.next_x];
        cv = cs[place(S.cs, b, h, t) + lane];
        sv = sn[place(S.sn, b, h, t) + (!BACK ? lane : low ? lane + half : lane - half)];
        if (low != BACK)
#pragma unroll
            for (int i = 0; i < VEC<T> / 2; i++) sv.pair(i) = negative(sv.pair(i));
    }
    if constexpr (NORM) {
        float ss[HEADS] = {};
#pragma unroll
        for (int k = 0; k < HEADS; k++)
#pragma unroll
            for (int i = 0; i < VEC<T>; i++) ss[k] += v[k][i] * v[k][i];
        lane_sums(ss, S.lanes);
        if (on) {
            const V<T> wv = load_gain<T>(w, w_f32, lane * VEC<T>);
#pragma unroll
            for (int k = 0; k < HEADS; k++) { v[k].repack(); v[k] = normed(v[k], inverse_root<T>(mean_plus(ss[k], S.one_over_D, eps)), wv); }
        }
    }
    const int other = (threadIdx.x & 31) + (lane >= vecs ? 0 : low ? half : -half);
    y += place(S.y, b, h, t) + lane;
#pragma unroll
    for (int k = 0; k < HEADS; k++) {
        const V<T> u = from_lane<T>(v[k], other);
        if (on) {
            V<T> o;
#pragma unroll
            for (int i = 0; i < VEC<T> / 2; i++) o.pair(i) = add_rn(mul_rn(v[k].pair(i), cv.pair(i)), mul_rn(u.pair(i), sv.pair(i)));
            y[k * S.next_y] = o;
        }
    }
}
// Heads of any even width, any alignment: a thread for each pair of channels
template <class T, bool BACK>
__global__ void turn_any(const T* __restrict__ x, const T* __restrict__ cs, const T* __restrict__ sn, T* __restrict__ y, Shape<int64_t> S) {
    const int half = S.D / 2;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < S.items * half; i += gridDim.x * (int64_t)blockDim.x) {
        unsigned b, h, t;
        S.split(i / half, b, h, t);
        const int c = (int)(i % half);
        const T *px = x + place(S.x, b, h, t) + c, *pc = cs + place(S.cs, b, h, t) + c, *ps = sn + place(S.sn, b, h, t) + c;
        T* py = y + place(S.y, b, h, t) + c;
        const float a = to_float(px[0]), z = to_float(px[half]), s1 = to_float(BACK ? ps[half] : ps[0]), s2 = to_float(BACK ? ps[0] : ps[half]);
        const auto product = [](float p, float q) { return round_to<T>(__fmul_rn(p, q)); };
        py[0] = from_float<T>(__fadd_rn(product(a, to_float(pc[0])), product(z, BACK ? s1 : -s1)));
        py[half] = from_float<T>(__fadd_rn(product(z, to_float(pc[half])), product(a, BACK ? -s2 : s2)));
    }
}

// Gradient of turn(norm(x)). With a = the gradient turned back, r = 1/rms and m = mean(a*w*x) * r^2:
// dx = r * (a*w - x*m),  dw = sum over heads and tokens of a * x * r.  All in float32, rounded once.
// A lane copies what it needs of the next token to shared memory while it works on this one.
template <class T, int HEADS>
__global__ void __launch_bounds__(GRAD_THREADS, GRAD_BLOCKS) grad_kernel(const V<T>* __restrict__ g, const V<T>* __restrict__ x, const V<T>* __restrict__ cs, const V<T>* __restrict__ sn, const void* __restrict__ w, bool w_f32,
                                                               V<T>* __restrict__ dx, float* __restrict__ dw_part, Shape<unsigned> S, float eps) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    V<T>* ring = reinterpret_cast<V<T>*>(dynamic) + threadIdx.x;  // [2 stages][HEADS][x, g][GRAD_THREADS]
    const int lane = threadIdx.x & (S.lanes - 1), slot = threadIdx.x >> S.shift, slots = GRAD_THREADS >> S.shift, vecs = S.D / VEC<T>, half = vecs / 2, c = lane * VEC<T>;
    const bool on = lane < vecs, low = lane < half;
    const int other = (threadIdx.x & 31) + (!on ? 0 : low ? half : -half);
    const int64_t stride = gridDim.x * (int64_t)slots;
    Sums<T, VEC<T>, HEADS> dw;
    V<T> wv = {};
    if (on) wv = load_gain<T>(w, w_f32, c);
    struct Item { V<T>* dx; const V<T> *cs, *sn; bool live; };
    auto fetch = [&](int64_t item, int stage) {
        Item i{};
        i.live = on && item < S.items;
        if (i.live) {
            unsigned b, h, t;
            S.split(item, b, h, t);
            const V<T> *px = x + place(S.x, b, h, t) + lane, *pg = g + place(S.g, b, h, t) + lane;
#pragma unroll
            for (int k = 0; k < HEADS; k++) {
                V<T>* to = ring + (stage * HEADS + k) * 2 * GRAD_THREADS;
                copy_async(to, px + k * S.next_x); copy_async(to + GRAD_THREADS, pg + k * S.next_g);
            }
            i.dx = dx + place(S.y, b, h, t) + lane; i.cs = cs + place(S.cs, b, h, t) + lane; i.sn = sn + place(S.sn, b, h, t) + (low ? lane + half : lane - half);
        }
        copy_commit();
        return i;
    };
    int64_t item = blockIdx.x * (int64_t)slots + slot;
    Item next = fetch(item, 0);
    int stage = 0;
    for (int64_t base = blockIdx.x * (int64_t)slots; base < S.items; base += stride, stage ^= 1) {
        const Item now = next;
        V<T> cv = {}, sv = {}, xv[HEADS] = {}, gv[HEADS] = {};
        if (now.live) { cv = now.cs[0]; sv = now.sn[0]; }
        next = fetch(item += stride, stage ^ 1);
        copy_wait<1>();
        if (now.live)
#pragma unroll
            for (int k = 0; k < HEADS; k++) { const V<T>* from = ring + (stage * HEADS + k) * 2 * GRAD_THREADS; xv[k] = from[0]; gv[k] = from[GRAD_THREADS]; }
        if (!low)
#pragma unroll
            for (int i = 0; i < VEC<T> / 2; i++) sv.pair(i) = negative(sv.pair(i));
        float a[HEADS][VEC<T>], sums[2 * HEADS] = {};
#pragma unroll
        for (int k = 0; k < HEADS; k++) {
            const V<T> u = from_lane<T>(gv[k], other);
#pragma unroll
            for (int i = 0; i < VEC<T>; i++) {
                a[k][i] = gv[k][i] * cv[i] + u[i] * sv[i];
                sums[2 * k] += xv[k][i] * xv[k][i];
                sums[2 * k + 1] += a[k][i] * wv[i] * xv[k][i];
            }
        }
        lane_sums(sums, S.lanes);
        if (now.live)
#pragma unroll
            for (int k = 0; k < HEADS; k++) {
                const float r = inverse_root<T>(mean_plus(sums[2 * k], S.one_over_D, eps)), m = sums[2 * k + 1] * S.one_over_D.x * r * r;
                V<T> o;
                xv[k].repack(); wv.repack();
#pragma unroll
                for (int i = 0; i < VEC<T>; i++) {
                    dw.s[i] += a[k][i] * (xv[k][i] * r);
                    o.set(i, r * (a[k][i] * wv[i] - xv[k][i] * m));
                }
                o.store_once(reinterpret_cast<T*>(now.dx + k * S.next_y));
            }
        dw.turn();
    }
    copy_wait<0>();
    __syncthreads();
    float* acc = reinterpret_cast<float*>(dynamic);
    if (on)
#pragma unroll
        for (int i = 0; i < VEC<T>; i++) acc[slot * S.D + c + i] = dw.total(i);
    __syncthreads();
    for (int j = threadIdx.x; j < S.D; j += blockDim.x) {
        double s = 0;
        for (int k = 0; k < slots; k++) s += acc[k * S.D + j];
        dw_part[blockIdx.x * (int64_t)S.D + j] = (float)s;
    }
    done();
}

// Do rows begin at 16-byte boundaries?
inline bool vectors(const Tensor& t, int vec) {
    if (!aligned16(t.const_data_ptr())) return false;
    for (int i = 0; i + 1 < t.dim(); i++) if (t.size(i) > 1 && t.stride(i) % vec) return false;
    return true;
}
inline Tensor with_vectors(const Tensor& t, int vec) { return vectors(t, vec) ? t : torch::stable::clone(t); }
// Strides of the axes B, H, T of a tensor in that order, or of a table that broadcasts to it
template <class I> Strides<I> strides_of(const Tensor& t, int unit) {
    const int n = (int)t.dim();
    auto stride = [&](int i) {
        const int64_t v = n > i && t.size(n - 1 - i) > 1 ? (int64_t)t.stride(n - 1 - i) / unit : 0;
        STD_TORCH_CHECK(v == (int64_t)(I)v, "rope: a stride of ", v * unit, " elements is too large");
        return (I)v;
    };
    return {stride(3), stride(2), stride(1)};
}
// One angle for all heads of a token?
inline bool shared_by_heads(const Tensor& t) { return t.dim() < 3 || t.size(t.dim() - 3) == 1 || t.stride(t.dim() - 3) == 0; }
template <class I> Shape<I> shape_of(const Tensor& x, const Tensor& y, const Tensor& g, const Tensor& cs, const Tensor& sn, int lanes, int heads, int unit) {
    Shape<I> S;
    S.B = (int)x.size(0); S.H = (int)x.size(1); S.T = (int)x.size(2); S.D = (int)x.size(3);
    S.x = strides_of<I>(x, unit); S.y = strides_of<I>(y, unit); S.g = strides_of<I>(g, unit); S.cs = strides_of<I>(cs, unit); S.sn = strides_of<I>(sn, unit);
    S.lanes = lanes; S.one_over_D = one_over(S.D);
    for (S.shift = 0; 1 << S.shift < lanes;) S.shift++;
    S.groups = S.H / heads;
    S.next_x = S.groups * (int64_t)S.x.h; S.next_y = S.groups * (int64_t)S.y.h; S.next_g = S.groups * (int64_t)S.g.h;
    S.items = (int64_t)S.B * S.T * S.groups;
    S.heads_inside = S.x.t >= S.x.h;
    S.inner = Divisor(S.heads_inside ? S.groups : S.T);
    S.outer = Divisor(S.heads_inside ? S.T : S.groups);
    return S;
}

// Do whole vectors make up a head, and one warp?
template <class T> bool one_warp(int64_t D) { return D % (2 * VEC<T>) == 0 && D <= 32 * VEC<T>; }

// x and y are [B, H, T, D] of any memory order
template <bool NORM, bool BACK> void turn(const Tensor& x_, const Tensor& cs_, const Tensor& sn_, const Tensor* w, double eps, Tensor& y) {
    if (!x_.numel()) return;
    const int D = (int)x_.size(3);
    torch::stable::accelerator::DeviceGuard guard(x_.get_device_index());
    const cudaStream_t s = stream_of(x_);
    const bool w_f32 = NORM && w->scalar_type() == ScalarType::Float;
    if (NORM) check_gain("qk_norm_rope", *w, x_);
    DISPATCH(x_.scalar_type(), "rope", {
        const bool fast = one_warp<T>(D);
        STD_TORCH_CHECK(!NORM || fast, "qk_norm_rope: head_dim must be a multiple of ", 2 * VEC<T>, " up to ", 32 * VEC<T>, ", got ", D);
        auto fit = [&](const Tensor& t) { return fast ? with_vectors(dense_last(t), VEC<T>) : dense_last(t); };
        const Tensor x = fit(x_), cs = fit(cs_), sn = fit(sn_);
        const T *px = (const T*)x.const_data_ptr(), *pc = (const T*)cs.const_data_ptr(), *ps = (const T*)sn.const_data_ptr();
        T* py = (T*)y.mutable_data_ptr();
        if (fast) {
            const int lanes = pow2_at_least(D / VEC<T>), H = (int)x.size(1), heads = !shared_by_heads(cs) || !shared_by_heads(sn) ? 1 : H % TURN_HEADS<NORM> ? H % 2 ? 1 : 2 : TURN_HEADS<NORM>;
            const auto S = shape_of<unsigned>(x, y, x, cs, sn, lanes, heads, VEC<T>);
            auto kernel = turn_kernel<T, 1, NORM, BACK>;
            if constexpr (NORM) kernel = heads == 1 ? kernel : heads == 2 ? turn_kernel<T, 2, NORM, BACK> : turn_kernel<T, TURN_HEADS<NORM>, NORM, BACK>;
            kernel<<<ceil_div(S.items, TURN_THREADS<NORM> / lanes), TURN_THREADS<NORM>, 0, s>>>((const V<T>*)px, (const V<T>*)pc, (const V<T>*)ps, NORM ? w->const_data_ptr() : nullptr, w_f32, (V<T>*)py, S, (float)eps);
        } else {
            const auto S = shape_of<int64_t>(x, y, x, cs, sn, 1, 1, 1);
            const int64_t blocks = ceil_div(S.items * (D / 2), 256);
            turn_any<T, BACK><<<blocks < (1 << 30) ? blocks : (1 << 30), 256, 0, s>>>(px, pc, ps, py, S);
        }
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
    check_gain("qk_norm_rope", w, x_);
    DISPATCH(x_.scalar_type(), "qk_norm_rope", {
        STD_TORCH_CHECK(one_warp<T>(D), "qk_norm_rope: head_dim must be a multiple of ", 2 * VEC<T>, " up to ", 32 * VEC<T>, ", got ", D);
        auto fit = [&](const Tensor& t) { return with_vectors(dense_last(t), VEC<T>); };
        const Tensor g = fit(g_), x = heads_first(fit(x_)), cs = fit(cs_), sn = fit(sn_), out = heads_first(dx);
        const int lanes = pow2_at_least(D / VEC<T>), slots = GRAD_THREADS / lanes;
        const bool two = shared_by_heads(cs) && shared_by_heads(sn) && x.size(1) % GRAD_HEADS == 0;
        const int heads = two ? GRAD_HEADS : 1;
        const auto S = shape_of<unsigned>(x, out, g, cs, sn, lanes, heads, VEC<T>);
        const auto kernel = two ? grad_kernel<T, GRAD_HEADS> : grad_kernel<T, 1>;
        const int ring = 2 * 2 * heads * GRAD_THREADS * 16, smem = slots * D * 4 > ring ? slots * D * 4 : ring;
        if (smem > 32 << 10) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
        const int64_t want = (int64_t)sm_count() * GRAD_BLOCKS, have = ceil_div(S.items, slots), parts = want < have ? want : have;
        Tensor part = torch::stable::new_empty(x, {parts, (int64_t)D}, ScalarType::Float);
        kernel<<<parts, GRAD_THREADS, smem, s>>>((const V<T>*)g.const_data_ptr(), (const V<T>*)x.const_data_ptr(), (const V<T>*)cs.const_data_ptr(), (const V<T>*)sn.const_data_ptr(), w.const_data_ptr(), w_f32,
                                                 (V<T>*)dx.mutable_data_ptr(), (float*)part.mutable_data_ptr(), S, (float)eps);
        check_launch("qk_norm_rope gradient");
        reduce_parts<T>(part.const_data_ptr(), dw.mutable_data_ptr(), w_f32, parts, D, s);
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
